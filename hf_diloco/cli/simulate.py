"""`hf-diloco launch --simulate N`: all islands, or nodes, of a run as threads of this process."""

from __future__ import annotations

import sys
from dataclasses import replace

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.cli.display import terminal
from hf_diloco.cli.plan import LaunchOptions, load_options
from hf_diloco.errors import ConfigError


def run_simulation(options: LaunchOptions, num_islands: int) -> int:
    """Trains, prints the report of a run that has finished, and returns the exit code.

    Raises:
        ConfigError: an option is for islands that are processes, or a setting is wrong.
        DiLoCoError: the first error that an island met.
    """
    given = {"--island": options.island, "--rendezvous": options.rendezvous, "--islands": options.num_islands}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{wrong[0]} beside --simulate {num_islands}, which trains all of them in this process")
    unsharded = ["deepspeed=null", "fsdp=null", "accelerate=null"]
    run = load_options(replace(options, num_islands=num_islands, overrides=[*options.overrides, *unsharded]))
    code = _simulate(run, num_islands)
    out = terminal(sys.stdout)
    if code:
        out.print(f"stopped; the same command goes on from the checkpoints in {run.folder}")
    else:
        from hf_diloco.report import load_run, print_report, summarise

        print_report(summarise(load_run(run.folder)), out)
    return code


def _simulate(run: BaseRun, num_islands: int) -> int:
    if isinstance(run, VisionRun):
        from hf_diloco.apps.vision.simulate import NodeSimulation

        return NodeSimulation(run, num_islands).run()
    assert isinstance(run, RunFile)
    from hf_diloco.apps.common.hub import use_cache_without_hub

    use_cache_without_hub(run.needs_hub)  # before transformers is imported
    from hf_diloco.apps.lm.simulate import IslandSimulation

    return IslandSimulation(run).run()
