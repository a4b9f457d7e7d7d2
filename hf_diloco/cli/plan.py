"""Plans the commands that start a run's islands on this machine. Starts nothing, writes nothing."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.load import kind_of, read_run_file, shorthands
from hf_diloco.apps.common.process import check_folder
from hf_diloco.cli import accelerate, devices
from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.rendezvous import check_own_address
from hf_diloco.utils.text import counted
from hf_diloco.utils.urls import check_is_folder, is_object_store

if TYPE_CHECKING:
    from hf_diloco.apps.lm.runfile import DiLoCoBlock
    from hf_diloco.apps.vision.runfile import GossipBlock

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The interface over which the processes of an island on this machine talk to each other."""

_FOREIGN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|ACCELERATE_USE_(CPU|DEEPSPEED|FSDP)"
    r"|TORCHELASTIC_(USE_AGENT_STORE|RUN_ID|ERROR_FILE)|(PET|OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD)_.*"
)
"""Variables of other launchers (torchrun, mpirun, a cluster's). If an island inherited them, it would join the other
launcher's world."""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `hf-diloco launch`; None leaves one to the run file.

    Attributes:
        overrides: `key=value` items.
        island: the only island to start here; None starts all.
        num_islands, rendezvous, name, output, resume: shorthands for overrides.
    """

    run_file: Path
    overrides: Sequence[str] = ()
    island: int | None = None
    num_islands: int | None = None
    rendezvous: str | None = None
    name: str | None = None
    output: str | None = None
    resume: str | None = None

    def all_overrides(self, kind: type[BaseRun]) -> list[str]:
        """Returns the overrides and the shorthands, which win; without the island, which differs between processes."""
        return [*self.overrides, *shorthands(kind, {**vars(self), "island": None})]

    def resume_command(self, run: BaseRun) -> str:
        options = {
            f"--{run.unit}": self.island,
            f"--num-{run.unit}s": self.num_islands,
            "--rendezvous": self.rendezvous,
            "--name": self.name,
            "--output": self.output,
            "--resume": "auto" if run.launch.resume != "auto" else None,
        }
        given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
        return shlex.join(["hf-diloco", "launch", str(self.run_file), *self.overrides, *given])


@dataclass(frozen=True)
class IslandPlan:
    """How to start one island or node.

    Attributes:
        folder: its own folder, in the run folder.
        environment: changes to the launcher's environment; None removes a variable.
        files: contents of files to write before the start, by path.
        unit: what it is called: island or node.
    """

    number: int
    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    files: Mapping[Path, str]
    unit: str = "island"

    def shell_line(self) -> str:
        changes = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items() if value is not None]
        return " ".join([*changes, shlex.join(self.command)])


@dataclass(frozen=True)
class Plan:
    """The islands to start here: `islands`, out of `num_islands` in the run.

    Attributes:
        rendezvous: where all islands meet; None for a run of one.
        survives_losses: whether the others continue when one is lost.
        crowding: a warning that they share devices, or have more threads than this machine has cores; else empty.
    """

    folder: Path
    num_islands: int
    islands: tuple[IslandPlan, ...]
    rendezvous: str | None
    survives_losses: bool
    crowding: str

    @property
    def unit(self) -> str:
        return self.islands[0].unit

    def way_back(self, unit: str) -> str:
        """How a lost one rejoins, if the others continue; `unit` is island or node, which only a script may know."""
        return f"the same command with --{unit} K --rendezvous {self.rendezvous} brings {unit} K back"

    def describe(self, remark: str = "") -> str:
        """Returns which islands are started, out of how many, where they meet, and where the logs are."""
        who = counted(len(self.islands), self.unit)
        if len(self.islands) != self.num_islands:
            number = self.islands[0].number
            who = f"{self.unit} {number}{_told_by(ENV_ISLAND, number)} of {self.num_islands}"
        if self.rendezvous:
            remark += f", meeting at {self.rendezvous}{_told_by(ENV_RENDEZVOUS, self.rendezvous)}"
        return f"{who}{remark}; full logs in {self.folder}/island-*/log.txt"


def is_from_environment(variable: str, value: object) -> bool:
    """Whether an environment variable has this value; it may be left over from another run."""
    return os.environ.get(variable) == str(value)


def _told_by(variable: str, value: object) -> str:
    return f" ({variable})" if is_from_environment(variable, value) else ""


def make_plan(run: BaseRun, options: LaunchOptions) -> Plan:
    """Plans a launch of `load_options`' run, and checks everything that can be checked before a process starts.

    Raises `ConfigError` if the options or this machine do not fit.
    """
    numbers = range(run.meeting.num_islands) if options.island is None else [options.island]
    num_processes, config_file = _processes(run)
    port, *ports = devices.free_ports(1 + len(numbers))
    rendezvous = place_to_meet(run.meeting, run.unit, options.island, port)
    check_own_address(run.meeting.bind_address)
    if rendezvous is not None:
        for number in numbers:
            find_credentials(run.meeting, number, run.unit)
    shares = _devices(run, len(numbers), num_processes)
    threads = run.launch.threads or devices.fitting_threads(len(numbers) * num_processes)
    islands = []
    for number, main_process_port, share in zip(numbers, ports, shares, strict=True):
        check_folder(run, number)
        folder = run.island_folder(number)
        own_file = folder / "accelerate.yaml"
        command = accelerate.command(
            config_file or own_file,
            main_process_port,
            run.module,
            [str(options.run_file), *options.all_overrides(type(run))],
            num_processes if config_file else None,
        )
        environment = island_environment(number, run.meeting.num_islands, rendezvous, threads, share)
        files = {} if config_file else {own_file: accelerate.configuration(num_processes, run.deepspeed is not None)}
        islands.append(IslandPlan(number, folder, tuple(command), environment, files, run.unit))
    crowding = devices.describe_crowding(run.unit, len(numbers), num_processes, threads, shares)
    survives = run.meeting.survives_losses
    return Plan(run.folder, run.meeting.num_islands, tuple(islands), rendezvous, survives, crowding)


def island_environment(
    number: int, num_islands: int, rendezvous: str | None, threads: int, share: Sequence[str]
) -> dict[str, str | None]:
    """Returns the environment variables of an island's processes, for any program; None removes a variable.

    `threads` are those of each process, `share` the island's CUDA devices.
    """
    return {
        **dict.fromkeys(filter(_FOREIGN.fullmatch, os.environ)),
        ENV_ISLAND: str(number),
        ENV_NUM_ISLANDS: str(num_islands),
        ENV_RENDEZVOUS: rendezvous,
        "HF_DILOCO_LAUNCHED": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK,
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": _spins(),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {}),
    }


def leave_other_launchers() -> None:
    """Removes other launchers' variables from this process, before libraries join the other launcher's world."""
    for name in filter(_FOREIGN.fullmatch, tuple(os.environ)):
        del os.environ[name]


def _spins() -> str | None:
    """Returns how often an OpenMP thread of PyTorch on Linux spins before it sleeps.

    The default of 300,000 suits a process that has the cores alone. If islands or other programs share them, steps
    take up to fifty times as long. OpenMP itself uses 1,000 if a process has more threads than there are cores.
    """
    return os.environ.get("GOMP_SPINCOUNT") or (None if "OMP_WAIT_POLICY" in os.environ else "1000")


def load_options(options: LaunchOptions, trains_here: bool = True) -> BaseRun:
    """Reads the run file with all overrides.

    Raises `ConfigError` if the file or an override is invalid; with `trains_here`, also if this machine lacks a
    library that the run needs.
    """
    kind = kind_of(options.run_file)
    island = kind.setting("island")
    if any(item.replace(" ", "").startswith(f"{island}=") for item in options.overrides):
        raise ConfigError(f"{island} on the command line: start one {kind.unit} with --{kind.unit} NUMBER")
    # When starting all islands, a number from the file or the environment does not matter.
    run = read_run_file(kind, options.run_file, [*options.all_overrides(kind), f"{island}={options.island or 0}"])
    run.check()
    if trains_here:
        run.check_extras()
    return run


def _processes(run: BaseRun) -> tuple[int, Path | None]:
    """Returns the number of processes of one island, and the user's Accelerate configuration if there is one."""
    num_processes, path = run.launch.num_processes, None
    if run.accelerate is not None:
        path = Path(run.accelerate)
        values = accelerate.read_configuration(path, run.deepspeed is not None, run.fsdp is not None)
        if "num_processes" not in run.launch.model_fields_set:
            num_processes = values.get("num_processes") or 1
    if run.fsdp is not None:
        run.fsdp.num_shards(num_processes)
    return num_processes, path


def place_to_meet(meeting: DiLoCoBlock | GossipBlock, unit: str, island: int | None, free_port: int) -> str | None:
    """Returns where the islands or nodes meet: by their settings, else at a port of this machine if all start here.

    `island` is the only one to start here; None starts all. Raises `ConfigError` if they cannot meet there.
    """
    given = meeting.rendezvous
    if meeting.num_shares > 1 and island is not None and given is None and is_from_environment(ENV_ISLAND, island):
        raise ConfigError(
            f"{ENV_ISLAND}={island} in the environment starts {unit} {island} alone, and nothing says where it meets "
            f"the others: give --rendezvous, or unset {ENV_ISLAND} to start all {unit}s on this machine"
        )
    if island is not None and meeting.enabled:
        given = meeting.resolve().rendezvous  # raises if several islands have no rendezvous
    elif given is None and island is None and meeting.num_shares > 1:
        given = f"tcp://127.0.0.1:{free_port}"
        if meeting.enabled:
            meeting.model_copy(update={"rendezvous": given}).resolve()  # raises if a setting needs another rendezvous
        return given
    if given is not None and given.startswith("file:"):
        check_is_folder(given)
    elif given is not None and not is_object_store(given) and island in (None, 0):
        devices.check_port_is_free(given)
    return given


def _devices(run: BaseRun, num_islands: int, num_processes: int) -> list[list[str]]:
    found = [] if run.launch.use_cpu else devices.cuda_devices()
    if not found and run.launch.use_cpu is False:
        raise ConfigError("launch.use_cpu is false, but this machine shows no CUDA device (nvidia-smi -L)")
    return devices.share_devices(found, num_islands, num_processes)
