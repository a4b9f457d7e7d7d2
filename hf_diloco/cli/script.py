"""`hf-diloco launch -- COMMAND`: starts islands on this machine that run a user's own script.

Environment variables identify each island; `DiLoCoConfig` and `GossipConfig` read them. With a `DiLoCoCallback` or a
`GossipCallback` the script also reports its progress, and stops with a checkpoint on request; with an `OuterLoop` it
stops on request if it calls `should_stop`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from hf_diloco.apps.common.base import problem_of_name
from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.lm.runfile import outer_loop
from hf_diloco.cli import devices
from hf_diloco.cli.display import terminal
from hf_diloco.cli.log import FINISHED
from hf_diloco.cli.plan import IslandPlan, Plan, island_environment, place_to_meet
from hf_diloco.cli.run import print_commands, print_failures, run_islands
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import ConfigError
from hf_diloco.utils.files import PROGRESS_FILE

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_NUM_PROCESSES = re.compile(r"--(nproc[_-]per[_-]node|num_processes|num_gpus)(=(?P<count>.+))?")
_PORT = re.compile(r"--(main_process_port|master[_-]port|rdzv[_-]endpoint|standalone)(=|$)")
_LAUNCHERS = {
    "accelerate launch": "--main_process_port",
    "accelerate-launch": "--main_process_port",
    "accelerate.commands.accelerate_cli launch": "--main_process_port",
    "accelerate.commands.launch": "--main_process_port",
    "deepspeed": "--master_port",
    "deepspeed.launcher.runner": "--master_port",
    "torch.distributed.launch": "--master_port",
    "torch.distributed.run": "--master_port",
    "torchrun": "--master_port",
}
"""Launchers of an island's ranks, as programs and as modules of `python -m`, with the option for the port at which the
ranks meet: each island needs a different port."""


def run_script(plan: Plan, *, grace: float, dry_run: bool) -> int:
    """Runs `hf-diloco launch -- COMMAND` and returns its exit code, see `hf_diloco.cli.launch`."""
    if dry_run:
        print_commands(plan)
        return 0
    out, err = terminal(sys.stdout), terminal(sys.stderr)
    alone = " (--islands 2 starts two)" if plan.num_islands == 1 else ""
    result = run_islands(plan, plan.describe(alone), out, grace)
    print_failures(result, err)
    if result.exit_code == STOPPED:
        out.print("the same command continues if the script resumes from its checkpoints", highlight=False)
    if result.exit_code in (FINISHED, STOPPED):
        if any((island.folder / PROGRESS_FILE).exists() for island in plan.islands):
            out.print(f"its figures: hf-diloco report {plan.folder}", soft_wrap=True, highlight=False)
        elif plan.num_islands > 1:
            out.print(
                "warning: nothing was heard of a DiLoCoCallback, GossipCallback or OuterLoop: without one of them "
                "islands train apart",
                soft_wrap=True,
                highlight=False,
            )
    return result.exit_code


def plan_script(
    command: Sequence[str],
    island: int | None = None,
    num_islands: int | None = None,
    rendezvous: str | None = None,
    name: str | None = None,
    output: str | None = None,
) -> Plan:
    """Plans a launch, and checks what can be checked before a process starts; raises `ConfigError` on a mistake.

    Args:
        command: program and arguments.
        island: the only island to start here; None starts all.
        num_islands, rendezvous: None: from the environment, else one island, on this machine.
        name, output: the run's folder is OUTPUT/NAME; None: runs, and the script's name.
    """
    command = _with_program(command)
    if name is not None and (problem := problem_of_name(name)):
        raise ConfigError(f"--name: {problem}")
    given = {"num_islands": num_islands, "rendezvous": rendezvous}
    meeting = outer_loop(island=island or 0, **{key: value for key, value in given.items() if value is not None})
    total = meeting.num_islands
    numbers = range(total) if island is None else [island]
    port, *ports = devices.free_ports(1 + len(numbers))
    place = place_to_meet(meeting, "island", island, port)
    num_processes = _num_processes(command)
    threads = devices.fitting_threads(len(numbers) * num_processes)
    found = devices.cuda_devices()  # if fewer than an island's processes, every island gets all
    per_island = max(min(num_processes, len(found)), len(found) // len(numbers))
    shares = devices.share_devices(found, len(numbers), per_island)
    folder = Path(output or "runs") / (name or _name(command))
    islands = []
    for number, main_process_port, share in zip(numbers, ports, shares, strict=True):
        own_folder = folder / f"island-{number}"
        environment = island_environment(number, total, place, threads, share)
        environment[ENV_FOLDER] = str(own_folder.absolute())
        own_command = _with_port(command, main_process_port, len(numbers))
        islands.append(IslandPlan(number, own_folder, own_command, environment, {}))
    crowding = devices.describe_crowding("island", len(numbers), num_processes, threads, shares)
    return Plan(folder, total, tuple(islands), place, meeting.survives_losses, crowding)


def _with_program(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the command with its program's path, first from this environment, so that `python` has hf_diloco.

    Raises `ConfigError` if the program or the script does not exist.
    """
    if not command:
        raise ConfigError(
            "a command is missing after `--`, as in: hf-diloco launch --islands 2 -- python my_script.py"
        )
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which(command[0], path=places)
    if program is None:
        raise ConfigError(f"{command[0]}: no such program; behind `--` stands a command, as `python my_script.py`")
    is_script = _PYTHON.fullmatch(Path(program).name) and len(command) > 1 and command[1].endswith(".py")
    if is_script and not Path(command[1]).is_file():
        raise ConfigError(f"{command[1]}: no such file")
    return (program, *command[1:])


def _name(command: Sequence[str]) -> str:
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    modules = [word for flag, word in pairwise(command) if flag == "-m" and word not in _LAUNCHERS]
    return (scripts or modules or [Path(command[0]).name])[0]


def _launcher(command: Sequence[str]) -> tuple[int, str] | None:
    """Returns where a rank launcher's options begin, and its option for the port; None if it is no rank launcher."""
    is_python = _PYTHON.fullmatch(Path(command[0]).name) and "-m" in command
    place = command.index("-m") + 1 if is_python else 0
    for end in (place + 1, place + 2):
        program, *words = command[place:end] or ("",)
        if option := _LAUNCHERS.get(" ".join((Path(program).name, *words))):
            return end, option
    return None


def _options(command: Sequence[str]) -> list[str]:
    """Returns the rank launcher's options, without those of the script; empty without a launcher."""
    found = _launcher(command)
    words = command[found[0] :] if found else ()
    return list(takewhile(lambda word: not word.endswith(".py") and word not in ("-m", "--module"), words))


def _num_processes(command: Sequence[str]) -> int:
    """Returns the processes of an island, from the launcher's options; 1 without them."""
    options = _options(command)
    for word, following in pairwise([*options, ""]):
        if match := _NUM_PROCESSES.fullmatch(word):
            count = match["count"] or following
            return max(1, int(count)) if count.isdecimal() else 1
    return 1


def _with_port(command: Sequence[str], port: int, num_islands: int) -> tuple[str, ...]:
    """Returns the command; if it is a rank launcher, with a port that no other island uses."""
    if (found := _launcher(command)) is None:
        return tuple(command)
    place, option = found
    given = next((word for word in _options(command) if _PORT.match(word)), None)
    if given is None:
        return (*command[:place], option, str(port), *command[place:])
    if num_islands > 1 and given != "--standalone":
        raise ConfigError(
            f"{given}: the launchers of {num_islands} islands on one machine need different ports; leave it out, "
            "and each is given one"
        )
    return tuple(command)
