"""`hf-diloco launch`: plans, starts and shows islands; with `--simulate N`, runs them as threads of this process.

At the end it prints the report of a finished run, how to resume a stopped one, or why a run failed.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from hf_diloco.apps.common.arguments import check_names
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.hub import use_cache_without_hub
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import simulate_nodes
from hf_diloco.cli.display import make_display, terminal
from hf_diloco.cli.launch import Launcher, Result
from hf_diloco.cli.log import FINISHED
from hf_diloco.cli.plan import LaunchOptions, Plan, is_from_environment, leave_other_launchers, load_options, make_plan
from hf_diloco.cli.validate import check_all
from hf_diloco.config.base import ENV_ISLAND
from hf_diloco.errors import ConfigError
from hf_diloco.report import load_run, print_report, summarise
from hf_diloco.utils.tables import output
from hf_diloco.utils.text import counted

_ANEW = "starts from the beginning"


def run_launch(options: LaunchOptions, *, grace: float, dry_run: bool) -> int:
    """Runs `hf-diloco launch` and returns its exit code, see `hf_diloco.cli.launch`.

    Raises `DiLoCoError` if the run file, the options or this machine do not fit; nothing has been started.
    """
    run = load_options(options)
    if dry_run:
        leave_other_launchers()
        print_commands(check_all(run, lambda: make_plan(run, options)))
        return 0
    check_names(run.training)
    out, err = terminal(sys.stdout), terminal(sys.stderr)
    plan = make_plan(run, options)
    result = run_islands(plan, f"run {plan.folder}: {plan.describe()}", out, grace)
    print_ending(result, run, options, out, err)
    return result.exit_code


def run_islands(plan: Plan, summary: str, out: Console, grace: float) -> Result:
    """Starts islands, shows them on `out` after `summary`, and returns when all have ended; see `Launcher`."""
    display = make_display(out, [island.number for island in plan.islands], plan.unit)
    launcher = Launcher(plan, display, grace)
    for note in filter(None, (summary, plan.crowding)):
        display.note(note)
    return launcher.run()


def print_commands(plan: Plan) -> None:
    """Prints the commands that would be started, as lines for a shell."""
    out = output()
    for island in plan.islands:
        out.out(f"# {island.unit} {island.number}", highlight=False)
        for path, text in island.files.items():
            out.out(f"# {path}:", *(f"#   {line}" for line in text.splitlines()), sep="\n", highlight=False)
        out.out(island.shell_line() + "\n", highlight=False)


def run_simulation(options: LaunchOptions, num_islands: int, *, dry_run: bool = False) -> int:
    """Trains all islands or nodes in this process, prints the report, and returns the exit code.

    Raises:
        ConfigError: an option applies only to islands in processes of their own, or a setting is wrong.
        DiLoCoError: the first error of an island.
    """
    island = None if is_from_environment(ENV_ISLAND, options.island) else options.island
    given = {"--island": island, "--rendezvous": options.rendezvous, "--islands": options.num_islands}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{wrong[0]} beside --simulate {num_islands}, which trains all of them in this process")
    unsharded = ["deepspeed=null", "fsdp=null", "accelerate=null"]
    run = load_options(
        replace(options, island=None, num_islands=num_islands, overrides=[*options.overrides, *unsharded])
    )
    out = terminal(sys.stdout)
    leave_other_launchers()
    if dry_run:
        check_all(run, lambda: None)
        out.print(f"this process would train {counted(num_islands, run.unit)} in {run.folder}", soft_wrap=True)
        return 0
    if isinstance(run, VisionRun):
        code = simulate_nodes(run, num_islands, is_command=True)
    else:
        assert isinstance(run, RunFile)
        use_cache_without_hub(run.needs_hub)  # before transformers is imported
        from hf_diloco.apps.lm.simulate import simulate_islands

        code = simulate_islands(run, is_command=True)
    if code:
        how = f"goes on from the checkpoints in {run.folder}" if _has_checkpoints(run) else _ANEW
        out.print(f"stopped; the same command {how}", soft_wrap=True)
    else:
        _print_report(run, out)
    return code


# The end


def print_ending(result: Result, run: BaseRun, options: LaunchOptions, out: Console, err: Console) -> None:
    """Prints the end of a run: results on `out`, failures on `err`."""
    if result.exit_code == FINISHED:
        out.print()
        _print_report(run, out)
        return
    print_failures(result, err)
    if result.failed and not any(island.progress.step for island in result.islands):
        return  # before training: the same command would fail again
    if _has_checkpoints(run):
        _say(out, "to continue from the last checkpoint: ", (options.resume_command(run), "bold"))
    elif not result.failed:
        _say(out, f"there is no checkpoint yet: the same command {_ANEW}")


def print_failures(result: Result, err: Console) -> None:
    """Prints why islands failed."""
    # Killed islands come first: an island that only lost its peer may have ended earlier.
    failed = sorted(
        (i for i in result.islands if i.number in result.failed), key=lambda i: result.outcome(i).code >= 0
    )
    for island in failed:
        outcome, is_first = result.outcome(island), island is failed[0]
        if not is_first and outcome.error == result.outcome(failed[0]).error:
            what = f"{island.name} failed for the same reason"
        else:
            error = outcome.error.removeprefix("error: ") or "it said nothing"
            what = f"{island.name} {'' if is_first else 'then '}failed ({outcome.ending}): {error}"
        _say(err, ("error: ", "bold red"), what)
        if outcome.ending == "SIGKILL":
            _say(err, "       where nobody has killed it, the system did, mostly for want of memory: see `dmesg`")
        _say(err, f"       log: {island.log_path}")


def _has_checkpoints(run: BaseRun) -> bool:
    return any(run.folder.glob("island-*/checkpoint-*"))


def _print_report(run: BaseRun, out: Console) -> None:
    print_report(summarise(load_run(run.folder)), out)


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)
