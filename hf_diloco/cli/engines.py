"""The engines for which `hf-diloco init` writes files. Starts nothing, writes nothing.

Each engine is a function from a `Deployment` to files and the command that starts the islands.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_diloco.apps.common.arguments import check_names
from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.load import kind_of
from hf_diloco.apps.common.paths import get_at
from hf_diloco.apps.common.shipped import find_run_file
from hf_diloco.apps.common.yaml_file import KeyPath, dump_yaml
from hf_diloco.cli import accelerate
from hf_diloco.cli.plan import LaunchOptions, load_options
from hf_diloco.errors import ConfigError
from hf_diloco.store.credentials import identity_path
from hf_diloco.store.signing import ENV_KEY
from hf_diloco.utils.files import read_json
from hf_diloco.utils.own_files import is_own
from hf_diloco.utils.urls import is_object_store

CPUS_PER_GPU = 8
_NEED_IMAGE = ("compose", "kubernetes", "skypilot")
_WITHOUT_FOLDERS = ("kubernetes", "skypilot")  # islands do not see this machine's folders
_SERVER = "rendezvous:29400"
_PASSED_ON = (
    *(ENV_KEY, "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
    *("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
)


@dataclass(frozen=True)
class Deployment:
    """The input of the templates: a run, and the resources of each of its islands.

    All paths are absolute.

    Attributes:
        run: the run file with all overrides.
        overrides: `key=value` items for the processes of an island.
        rendezvous: the object store in which the islands meet; None if the engine runs a server for them.
        num_gpus: GPUs of one island on each of its nodes; 0 trains on CPUs.
        num_nodes: nodes of one island.
        image: container image with hf-diloco; None if the engine needs none.
        folder: of the engine's files.
        working_folder: what the run's relative paths refer to.
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
    def label(self) -> str:
        """The run's name as engines accept it: lower-case letters, digits and dashes, a letter first, at most 54."""
        name = re.sub(r"[^a-z0-9]+", "-", self.run.name.lower())[:50].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def num_islands(self) -> int:
        return self.run.meeting.num_islands

    @property
    def num_processes(self) -> int:
        """Ranks of one island on each of its nodes."""
        return self.num_gpus or self.run.launch.num_processes

    @property
    def num_cpus(self) -> int:
        """CPU cores to request for one island on each of its nodes."""
        return CPUS_PER_GPU * self.num_gpus or self.num_processes

    @property
    def run_folder(self) -> Path:
        return self.working_folder / self.run.folder

    def launch_command(self, run_file: str | Path, *arguments: str) -> list[str]:
        """Returns the command that starts an island in a container; `arguments` or the environment has its number."""
        meeting = self.rendezvous or f"http://{_SERVER}/{self.run.name}"
        return [
            *("hf-diloco", "launch", str(run_file), *arguments),
            *("--num-islands", str(self.num_islands), "--rendezvous", meeting),
        ]

    def server_command(self) -> list[str]:
        """Returns the command that runs the rendezvous server, in the container `rendezvous`."""
        return ["hf-diloco", "rendezvous", _SERVER, "--folder", str(self.folder / "rendezvous")]

    def device_ids(self, island: int) -> list[str]:
        """Returns the island's GPUs if all islands run on one machine."""
        return [str(number) for number in range(island * self.num_gpus, (island + 1) * self.num_gpus)]


def plan_deployment(
    engine: str, options: LaunchOptions, num_gpus: int | None, num_nodes: int, image: str | None, folder: Path | None
) -> Deployment:
    """Reads the run file, and checks that the engine's islands can meet.

    For the arguments see `Deployment`; if `num_gpus` is None, the run file decides. Raises `ConfigError` if the
    islands cannot meet, or the run file or an option does not fit the engine.
    """
    if kind_of(options.run_file).unit != "island":
        raise ConfigError(
            f"{engine}: nodes that average with their neighbours need node 0's address in advance, and the engine "
            "chooses its machine; start each with `hf-diloco launch RUN.yaml --node NUMBER`"
        )
    run = load_options(options, trains_here=False)
    check_names(run.training)
    if num_gpus is None:
        num_gpus = 0 if run.launch.use_cpu else run.launch.num_processes
    elif num_gpus and run.launch.use_cpu:
        raise ConfigError(
            f"--gpus-per-island {num_gpus}, but launch.use_cpu is true: give 0, or remove launch.use_cpu"
        )
    if engine in _NEED_IMAGE and not image:
        raise ConfigError(f"{engine} starts containers: give --image, one in which hf-diloco is installed")
    if engine != "slurm" and num_nodes > 1:
        raise ConfigError(
            f"--nodes-per-island {num_nodes}: an island of {engine} runs on one node; give 1, or use slurm"
        )
    if engine != "compose" or run.meeting.rendezvous is not None:  # compose runs a server if there is none
        _check_store(run.meeting.rendezvous, engine)
    return Deployment(
        run=run,
        run_file=find_run_file(options.run_file).resolve(),
        overrides=(*options.overrides, f"name={json.dumps(run.name)}"),
        rendezvous=run.meeting.rendezvous,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        image=image,
        folder=(folder or Path("deploy") / run.name / engine).resolve(),
        working_folder=Path.cwd(),
        programs=Path(sys.executable).parent,
    )


def _check_store(rendezvous: str | None, engine: str) -> None:
    """Raises `ConfigError` without a rendezvous that islands reach wherever an engine starts or moves them."""
    has_folders = engine not in _WITHOUT_FOLDERS
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
    """Returns the run file with all overrides as YAML; raises `ConfigError` if it names a file on this machine."""
    run = deployment.run
    values: dict[str, Any] = run.model_dump(mode="json", exclude_unset=True, exclude={"output": True})
    for name in ("island", "num_islands", "rendezvous"):  # set by the engine
        values.get(run.meeting_name, {}).pop(name, None)
    if isinstance(run.deepspeed, str):
        values["deepspeed"] = read_json(Path(run.deepspeed))
    for path, text in _files_named(run, values):
        raise _names_file_here(path, text)
    for path in run.files.patterns:  # their files may exist only on other machines
        pattern = str(get_at(values, path) or "")
        if any(identity_path(pattern, island).is_file() for island in range(deployment.num_islands)):
            raise _names_file_here(path, pattern)
    if deployment.num_gpus:
        values.setdefault("launch", {})["num_processes"] = deployment.num_gpus
    return dump_yaml(values)


def _files_named(run: BaseRun, values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yields the local files that a run names, except patterns, each with its setting."""
    named = [*run.files.paths, *run.files.hub_ids_or_paths, *run.files.globs]
    for path in (*named, *((run.meeting_name, name) for name in ("method", "payload"))):
        texts = get_at(values, path)
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str) and (text.startswith("/") or is_own(text)):
                yield path, text


def _names_file_here(setting: KeyPath, text: str) -> ConfigError:
    remedy = {
        "key_file": f"remove it, and give the key as {ENV_KEY} there",
        "identity_file": "name a path that they have",
    }.get(setting[-1], "name one of the Hub or, for data, of an object store")
    return ConfigError(
        f"{'.'.join(setting)}: {text} is a file of this machine, which islands elsewhere do not have; {remedy}"
    )


Written = tuple[dict[str, str], str]
"""The contents of files by name, for the deployment's folder, and the command that starts the islands."""


def slurm(deployment: Deployment) -> Written:
    """Writes a job array in which each task is one island, on one or several nodes."""
    num_ranks = deployment.num_nodes * deployment.num_processes
    config = accelerate.configuration(num_ranks, deployment.run.deepspeed is not None, deployment.num_nodes)
    files = {"islands.sbatch": _render("slurm/islands.sbatch.j2", deployment), "accelerate.yaml": config}
    return (files, shlex.join(["sbatch", str(deployment.folder / "islands.sbatch")]))


def compose(deployment: Deployment) -> Written:
    """Writes a service for each island, on one machine, and a rendezvous server if the run names no store."""
    named = [Path(text) for _, text in _files_named(deployment.run, deployment.run.model_dump(mode="json"))]
    for path in (deployment.run_file, deployment.run_folder.resolve(), deployment.folder, *named):
        if not (deployment.working_folder / path).is_relative_to(deployment.working_folder):
            raise ConfigError(
                f"{path}: containers see {deployment.working_folder} alone, where you call this; call it in a folder "
                "that holds the run file, all that it names, its output, and --folder; `hf-diloco configs copy` "
                "copies what comes with hf-diloco"
            )
    folders = [str(deployment.working_folder)]
    if deployment.rendezvous and deployment.rendezvous.startswith("file://"):
        folders.append(deployment.rendezvous.removeprefix("file://"))
    processes = [f"launch.num_processes={deployment.num_gpus}"] if deployment.num_gpus else []
    text = _render(
        "compose/compose.yaml.j2",
        deployment,
        arguments=[*deployment.overrides, *processes],
        folders=folders,
        passed_on=_PASSED_ON,
    )
    command = ["docker", "compose", "-f", str(deployment.folder / "compose.yaml"), "up", "--detach"]
    return ({"compose.yaml": text}, shlex.join(command))


def kubernetes(deployment: Deployment) -> Written:
    """Writes an Indexed Job in which each index is one island."""
    text = _render("kubernetes/job.yaml.j2", deployment, run_file=portable_run_file(deployment))
    return ({"job.yaml": text}, shlex.join(["kubectl", "apply", "-f", str(deployment.folder / "job.yaml")]))


def skypilot(deployment: Deployment) -> Written:
    """Writes a managed job, which SkyPilot runs once for each island."""
    file = deployment.folder / "island.yaml"
    text = _render(
        "skypilot/island.yaml.j2",
        deployment,
        command=deployment.launch_command("hf-diloco/run.yaml", "--output", "runs"),
    )
    command = (
        f"for island in {_numbers(deployment)}; do sky jobs launch --yes --async --name {deployment.label}-$island "
        f"--env HF_DILOCO_ISLAND=$island {shlex.quote(str(file))}; done"
    )
    return ({"island.yaml": text, "run.yaml": portable_run_file(deployment)}, command)


def ray(deployment: Deployment) -> Written:
    """Writes a job for each island, which runs the island as one Ray task."""
    output = deployment.run.output if Path(deployment.run.output).is_absolute() else "~/runs"
    arguments = deployment.launch_command("run.yaml", "--output", output)[2:]
    files = {
        "submit.sh": _render("ray/submit.sh.j2", deployment, islands=_numbers(deployment)),
        "island.py": _render("ray/island.py.j2", deployment, arguments=arguments),
        "run.yaml": portable_run_file(deployment),
    }
    return (files, shlex.join(["bash", str(deployment.folder / "submit.sh")]))


ENGINES: dict[str, Callable[[Deployment], Written]] = {
    engine.__name__: engine for engine in (slurm, compose, kubernetes, skypilot, ray)
}


def _numbers(deployment: Deployment) -> str:
    return " ".join(map(str, range(deployment.num_islands)))


def _render(template: str, deployment: Deployment, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hf_diloco", "templates/deploy"),
        autoescape=False,  # scripts and YAML: the filters quote values
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": lambda value: shlex.quote(str(value)),
        "sh_all": shlex.join,
        "json": _json,
        "python": repr,
        "compose": lambda value: _json(value).replace("$", "$$"),
        "kubernetes": lambda value: _json(value).replace("$(", "$$("),
    }
    return environment.get_template(template).render(deployment=deployment, run=deployment.run, **values)


def _json(value: Any) -> str:
    """Returns a value as JSON, which YAML can read, and Slurm if it is a string."""
    return json.dumps(value, default=str, ensure_ascii=False)
