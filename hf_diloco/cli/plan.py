"""From a run file to the commands that start its islands on this machine. Starts nothing, writes nothing."""

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
from hf_diloco.utils.urls import is_object_store

if TYPE_CHECKING:
    from hf_diloco.apps.lm.runfile import DiLoCoBlock
    from hf_diloco.apps.vision.runfile import GossipBlock

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The interface over which the processes of an island on this machine talk to each other."""

_FOREIGN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|ACCELERATE_USE_(CPU|DEEPSPEED|FSDP)"
    r"|TORCHELASTIC_(USE_AGENT_STORE|RUN_ID|ERROR_FILE)|(PET|OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD)_.*"
)
"""What another launcher, as torchrun, mpirun, or the one of a cluster, left in the environment would make an island
think that it is part of that one's world."""


@dataclass(frozen=True)
class LaunchOptions:
    """What `hf-diloco launch` was asked for.

    Attributes:
        run_file: path of the YAML file.
        overrides: `key=value` items.
        island: the only island to start here; None starts all.
        num_islands, rendezvous, name, output, resume: shorthands for overrides; None leaves them to the file.
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
        """The overrides with the shorthands, which win; but for the island, of which each process has its own."""
        return [*self.overrides, *shorthands(kind, {**vars(self), "island": None})]

    def resume_command(self, run: BaseRun) -> str:
        """The command line that continues the run."""
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
    """How one island, or node, is started.

    Attributes:
        folder: its own, in the run folder.
        environment: changes to the launcher's environment; None removes a variable.
        files: files that are written before the start, by path.
        unit: what it is called: island, or node.
    """

    number: int
    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    files: Mapping[Path, str]
    unit: str = "island"

    def shell_line(self) -> str:
        """The command with its environment, to be pasted into a shell."""
        changes = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items() if value is not None]
        return " ".join([*changes, shlex.join(self.command)])


@dataclass(frozen=True)
class Plan:
    """What will be started here: `islands`, of `num_islands` in the run.

    Attributes:
        rendezvous: where all islands meet; None for a run of one.
        survives_losses: whether the others go on when one is lost.
        crowding: that they share devices, or have more threads than this machine has cores; empty if neither.
    """

    folder: Path
    num_islands: int
    islands: tuple[IslandPlan, ...]
    rendezvous: str | None
    survives_losses: bool
    crowding: str

    @property
    def unit(self) -> str:
        """As each island's."""
        return self.islands[0].unit

    @property
    def way_back(self) -> str:
        """How one that was lost comes back to the others, who go on; empty if they do not."""
        if not self.survives_losses:
            return ""
        command = f"the same command with --{self.unit} K --rendezvous {self.rendezvous} brings {self.unit} K back"
        return f"{command}, but not node 0" if self.unit == "node" else command

    def describe(self, remark: str = "") -> str:
        """What is being started, of how many, where they meet, and where the logs are."""
        who = counted(len(self.islands), self.unit)
        if len(self.islands) != self.num_islands:
            number = self.islands[0].number
            who = f"{self.unit} {number}{_told_by(ENV_ISLAND, number)} of {self.num_islands}"
        if self.rendezvous:
            remark += f", meeting at {self.rendezvous}{_told_by(ENV_RENDEZVOUS, self.rendezvous)}"
        return f"{who}{remark}; full logs in {self.folder}/island-*/log.txt"


def is_from_environment(variable: str, value: object) -> bool:
    """Whether the environment says what a launch goes by; it may be left over from another run."""
    return os.environ.get(variable) == str(value)


def _told_by(variable: str, value: object) -> str:
    return f" ({variable})" if is_from_environment(variable, value) else ""


def make_plan(run: BaseRun, options: LaunchOptions) -> Plan:
    """Checks everything that can be checked before a process starts; `run`: as `load_options` has read it.

    Raises `ConfigError` when the options or this machine do not fit.
    """
    numbers = range(run.meeting.num_islands) if options.island is None else [options.island]
    num_processes, config_file = _processes(run)
    port, *ports = devices.free_ports(1 + len(numbers))
    rendezvous = place_to_meet(run.meeting, run.unit, options.island, port)
    if rendezvous is not None:
        check_own_address(run.meeting.bind_address)
        for number in numbers:
            find_credentials(run.meeting, number, run.unit)
    shares = _devices(run, len(numbers), num_processes)
    threads = str(run.launch.threads or devices.fitting_threads(len(numbers) * num_processes))
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
    crowding = devices.describe_crowding(run.unit, len(numbers), num_processes, int(threads), shares)
    survives = run.meeting.survives_losses
    return Plan(run.folder, run.meeting.num_islands, tuple(islands), rendezvous, survives, crowding)


def island_environment(
    number: int, num_islands: int, rendezvous: str | None, threads: str, share: Sequence[str]
) -> dict[str, str | None]:
    """What an island's processes find in their environment, whatever program they run; None: removed.

    Args:
        number, num_islands, rendezvous: who it is, of how many, and where they meet.
        threads: of each process.
        share: the CUDA devices that are the island's.
    """
    return {
        **dict.fromkeys(filter(_FOREIGN.fullmatch, os.environ)),
        ENV_ISLAND: str(number),
        ENV_NUM_ISLANDS: str(num_islands),
        ENV_RENDEZVOUS: rendezvous,
        "HF_DILOCO_LAUNCHED": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK,
        "OMP_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": _spins(),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {}),
    }


def leave_other_launchers() -> None:
    """Removes from this process what keeps an island out of another launcher's world, before libraries join that."""
    for name in filter(_FOREIGN.fullmatch, tuple(os.environ)):
        del os.environ[name]


def _spins() -> str | None:
    """How often a thread of PyTorch's on Linux looks for work before it sleeps.

    Its default, 300,000, is for who has the cores alone. Where islands or others share them, steps take up to fifty
    times as long. 1,000 is what it takes by itself where a process has more threads than there are cores.
    """
    return os.environ.get("GOMP_SPINCOUNT") or (None if "OMP_WAIT_POLICY" in os.environ else "1000")


def load_options(options: LaunchOptions, trains_here: bool = True) -> BaseRun:
    """The run file with all overrides.

    Raises `ConfigError` if the file or an override does not fit; with `trains_here`, also if this machine lacks a
    library that the run needs.
    """
    kind = kind_of(options.run_file)
    island = kind.setting("island")
    if any(item.replace(" ", "").startswith(f"{island}=") for item in options.overrides):
        raise ConfigError(f"{island} on the command line: start one {kind.unit} with --{kind.unit} NUMBER")
    # Starting all islands, this one's number is of no interest, wherever it may come from.
    run = read_run_file(kind, options.run_file, [*options.all_overrides(kind), f"{island}={options.island or 0}"])
    run.check()
    if trains_here:
        run.check_extras()
    return run


def _processes(run: BaseRun) -> tuple[int, Path | None]:
    """Processes of one island, and the user's accelerate configuration if there is one."""
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
    """Where the islands, or nodes, meet: as their settings say, else at a port of this machine if all start here.

    `island`: the only one to start here; None starts all. Raises `ConfigError` if they cannot meet there.
    """
    given = meeting.rendezvous
    if meeting.num_shares > 1 and island is not None and given is None and is_from_environment(ENV_ISLAND, island):
        raise ConfigError(
            f"{ENV_ISLAND}={island} in the environment starts {unit} {island} alone, and nothing says where it meets "
            f"the others: give --rendezvous, or unset {ENV_ISLAND} to start all {unit}s on this machine"
        )
    if island is not None and meeting.enabled:
        given = meeting.resolve().rendezvous  # several islands without one are refused here
    elif given is None and island is None and meeting.num_shares > 1:
        given = f"tcp://127.0.0.1:{free_port}"
        if meeting.enabled:
            meeting.model_copy(update={"rendezvous": given}).resolve()  # refuses what needs another place to meet
        return given
    if given is not None and not is_object_store(given) and island in (None, 0):
        devices.check_port_is_free(given)
    return given


def _devices(run: BaseRun, num_islands: int, num_processes: int) -> list[list[str]]:
    found = [] if run.launch.use_cpu else devices.cuda_devices()
    if not found and run.launch.use_cpu is False:
        raise ConfigError("launch.use_cpu is false, but this machine shows no CUDA device (nvidia-smi -L)")
    return devices.share_devices(found, num_islands, num_processes)
