"""A run, and what an engine that starts its islands must know of it. Starts nothing, writes nothing."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.load import kind_of
from hf_diloco.cli.plan import LaunchOptions, load_options
from hf_diloco.errors import ConfigError
from hf_diloco.utils.urls import is_object_store

CPUS_PER_GPU = 8
_SERVER = "rendezvous:29400"


@dataclass(frozen=True)
class InitOptions:
    """What `hf-diloco init` was asked for; see its options.

    Attributes:
        engine: which starts the islands.
        run_file: path of the YAML file.
        overrides: `key=value` items.
        num_gpus: of one island on each of its nodes; None: as the run file says.
        num_nodes: of one island.
        image: container image with hf-diloco.
        folder: where the files go.
    """

    engine: str
    run_file: Path
    overrides: tuple[str, ...] = ()
    num_islands: int | None = None
    num_gpus: int | None = None
    num_nodes: int = 1
    rendezvous: str | None = None
    name: str | None = None
    image: str | None = None
    folder: Path | None = None

    def load(self) -> BaseRun:
        """The run file with all overrides.

        Raises:
            ConfigError: the file or an override does not fit.
        """
        options = LaunchOptions(
            run_file=self.run_file,
            overrides=self.overrides,
            num_islands=self.num_islands,
            rendezvous=self.rendezvous,
            name=self.name,
        )
        return load_options(options, trains_here=False)


@dataclass(frozen=True)
class Deployment:
    """What templates are told: a run, and the resources of each of its islands.

    Attributes:
        run: the run file with all overrides.
        run_file: its absolute path.
        overrides: `key=value` items for the processes of an island.
        rendezvous: where the islands meet, an object store; None if the engine is to keep a server for them.
        num_gpus: of one island on each of its nodes; 0 trains on CPUs.
        num_nodes: of one island.
        image: container image with hf-diloco; None where the engine needs none.
        folder: absolute path of the folder in which the engine's files are.
        working_folder: absolute path of the folder against which relative paths of the run are meant.
        programs: folder with the programs of this Python environment.
    """

    run: BaseRun
    run_file: Path
    overrides: tuple[str, ...]
    rendezvous: str | None
    num_gpus: int
    num_nodes: int
    image: str | None
    folder: Path
    working_folder: Path
    programs: Path

    @property
    def name(self) -> str:
        """Of the run."""
        return self.run.name

    @property
    def label(self) -> str:
        """The run's name as containers' engines want names: small letters, digits and dashes, at most 50."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:50].strip("-") or "run"

    @property
    def num_islands(self) -> int:
        """Islands in the run."""
        return self.run.meeting.num_islands

    @property
    def num_processes(self) -> int:
        """Ranks of one island on each of its nodes."""
        return self.num_gpus or self.run.launch.num_processes

    @property
    def num_cpus(self) -> int:
        """CPU cores to ask for, of one island on each of its nodes."""
        return CPUS_PER_GPU * self.num_gpus or self.num_processes

    @property
    def run_folder(self) -> Path:
        """Absolute path of OUTPUT/NAME."""
        return self.working_folder / self.run.folder

    def launch_command(self, run_file: str | Path, *arguments: str) -> list[str]:
        """What starts an island in a container; its number comes as an argument, or from the environment."""
        meeting = self.rendezvous or f"http://{_SERVER}/{self.name}"
        return [
            *("hf-diloco", "launch", str(run_file), *arguments),
            *("--num-islands", str(self.num_islands), "--rendezvous", meeting),
        ]

    def server_command(self) -> list[str]:
        """What keeps a place to meet, in the container `rendezvous`."""
        return ["hf-diloco", "rendezvous", _SERVER, "--folder", str(self.folder / "rendezvous")]

    def device_ids(self, island: int) -> list[str]:
        """The island's GPUs where all islands share one machine."""
        return [str(number) for number in range(island * self.num_gpus, (island + 1) * self.num_gpus)]


def plan_deployment(options: InitOptions) -> Deployment:
    """Reads the run file, and checks whether the engine's islands can meet.

    Raises:
        ConfigError: they cannot, or the run file or an option does not fit.
    """
    if kind_of(options.run_file).unit != "island":
        raise ConfigError(
            f"{options.engine}: nodes that average with their neighbours meet at node 0's address, which nobody knows "
            "before the engine has placed it; start each with `hf-diloco launch RUN.yaml --node NUMBER`"
        )
    run = options.load()
    num_gpus = options.num_gpus
    if num_gpus is None:
        num_gpus = 0 if run.launch.use_cpu else run.launch.num_processes
    elif num_gpus and run.launch.use_cpu:
        raise ConfigError(
            f"--gpus-per-island {num_gpus}, but launch.use_cpu is true: give 0, or remove launch.use_cpu"
        )
    return Deployment(
        run=run,
        run_file=options.run_file.resolve(),
        overrides=(*options.overrides, f"name={run.name}"),
        rendezvous=run.meeting.rendezvous,
        num_gpus=num_gpus,
        num_nodes=options.num_nodes,
        image=options.image,
        folder=(options.folder or Path("deploy") / run.name / options.engine).resolve(),
        working_folder=Path.cwd(),
        programs=Path(sys.executable).parent,
    )


def check_store(deployment: Deployment, engine: str, *, has_folders: bool) -> None:
    """Checks that islands which an engine starts, moves and starts again can meet.

    Args:
        deployment: of the run.
        engine: its name.
        has_folders: whether islands see the folders of this machine.

    Raises:
        ConfigError: the run has no rendezvous, or one that needs an address or a folder that islands may not have.
    """
    rendezvous = deployment.rendezvous
    folder = "file:///DIR, " if has_folders else ""
    remedy = (
        f"Let the islands meet in an object store, --rendezvous s3://BUCKET/PREFIX, {folder}gs:// or az://, or at a "
        "server, `hf-diloco rendezvous`, --rendezvous http://HOST:PORT/NAME"
    )
    if rendezvous is None:
        raise ConfigError(f"no rendezvous, but {engine} decides where an island runs. {remedy}")
    if not is_object_store(rendezvous):
        raise ConfigError(
            f"rendezvous {rendezvous} is the address of island 0, but {engine} decides where that runs, and may move "
            f"it. {remedy}"
        )
    if rendezvous.startswith("file:") and not has_folders:
        raise ConfigError(f"rendezvous {rendezvous}: islands of {engine} do not see that folder. {remedy}")


def portable_run_file(deployment: Deployment) -> str:
    """The run file with all overrides as YAML that names no file of this machine.

    Raises:
        ConfigError: it names one.
    """
    run = deployment.run
    values: dict[str, Any] = run.model_dump(mode="json", exclude_unset=True, exclude={"output": True})
    for name in ("island", "num_islands", "rendezvous"):  # which the engine says
        values.get(run.meeting_name, {}).pop(name, None)
    if isinstance(run.deepspeed, str):
        values["deepspeed"] = yaml.safe_load(Path(run.deepspeed).read_text(encoding="utf-8"))
    named = [*run.files.paths, *run.files.hub_ids_or_paths, *run.files.globs]
    for path in named:
        value: Any = values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.startswith("/"):
                raise ConfigError(
                    f"{'.'.join(path)}: {text} is a file of this machine, which islands elsewhere do not have; name "
                    "one of the Hub or, for data, of an object store"
                )
    if deployment.num_gpus:
        values.setdefault("launch", {})["num_processes"] = deployment.num_gpus
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
