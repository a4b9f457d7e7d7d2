"""Engines for which `hf-diloco init` writes files: each a function from a deployment to files and the next command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_diloco.cli import accelerate
from hf_diloco.cli.deployment import Deployment, check_store, portable_run_file
from hf_diloco.errors import ConfigError
from hf_diloco.store.signing import ENV_KEY

_PASSED_ON = (
    *(ENV_KEY, "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
    *("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
)


@dataclass(frozen=True)
class Written:
    """What an engine needs.

    Attributes:
        files: texts by name, for the deployment's folder.
        command: starts the islands.
    """

    files: dict[str, str]
    command: str


def slurm(deployment: Deployment) -> Written:
    """A job array, of which each task is one island, on one node or several."""
    check_store(deployment, "slurm", has_folders=True)
    num_ranks = deployment.num_nodes * deployment.num_processes
    config = accelerate.configuration(num_ranks, deployment.run.deepspeed is not None, deployment.num_nodes)
    files = {"islands.sbatch": _render("slurm/islands.sbatch.j2", deployment), "accelerate.yaml": config}
    return Written(files, shlex.join(["sbatch", str(deployment.folder / "islands.sbatch")]))


def compose(deployment: Deployment) -> Written:
    """A service for each island, on one machine, and one to meet at where the run names no store."""
    _check_image(deployment, "compose")
    if deployment.rendezvous is not None:
        check_store(deployment, "compose", has_folders=True)
    for path in (deployment.run_file, deployment.run_folder.resolve(), deployment.folder):
        if not path.is_relative_to(deployment.working_folder):
            raise ConfigError(
                f"{path}: containers see {deployment.working_folder} alone, where you call this; call it in a folder "
                "that holds the run file, all that it names, its output, and --folder"
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
    return Written({"compose.yaml": text}, shlex.join(command))


def kubernetes(deployment: Deployment) -> Written:
    """An Indexed Job, of which each index is one island."""
    _check_image(deployment, "kubernetes")
    check_store(deployment, "kubernetes", has_folders=False)
    text = _render("kubernetes/job.yaml.j2", deployment, run_file=portable_run_file(deployment))
    return Written({"job.yaml": text}, shlex.join(["kubectl", "apply", "-f", str(deployment.folder / "job.yaml")]))


def skypilot(deployment: Deployment) -> Written:
    """A managed job, of which SkyPilot runs one for each island."""
    _check_image(deployment, "skypilot")
    check_store(deployment, "skypilot", has_folders=False)
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
    return Written({"island.yaml": text, "run.yaml": portable_run_file(deployment)}, command)


def ray(deployment: Deployment) -> Written:
    """A job for each island, which keeps one task of Ray's for it."""
    _check_one_node(deployment, "ray")
    check_store(deployment, "ray", has_folders=True)
    output = deployment.run.output if Path(deployment.run.output).is_absolute() else "~/runs"
    arguments = deployment.launch_command("run.yaml", "--output", output)[2:]
    files = {
        "submit.sh": _render("ray/submit.sh.j2", deployment, islands=_numbers(deployment)),
        "island.py": _render("ray/island.py.j2", deployment, arguments=arguments),
        "run.yaml": portable_run_file(deployment),
    }
    return Written(files, shlex.join(["bash", str(deployment.folder / "submit.sh")]))


ENGINES: dict[str, Callable[[Deployment], Written]] = {
    "slurm": slurm,
    "compose": compose,
    "kubernetes": kubernetes,
    "skypilot": skypilot,
    "ray": ray,
}


def _check_image(deployment: Deployment, engine: str) -> None:
    if not deployment.image:
        raise ConfigError(f"{engine} starts containers: give --image, one in which hf-diloco is installed")
    _check_one_node(deployment, engine)


def _check_one_node(deployment: Deployment, engine: str) -> None:
    if deployment.num_nodes > 1:
        raise ConfigError(
            f"--nodes-per-island {deployment.num_nodes}: an island of {engine} runs on one node; give 1, or use slurm"
        )


def _numbers(deployment: Deployment) -> str:
    return " ".join(map(str, range(deployment.num_islands)))


def _render(template: str, deployment: Deployment, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hf_diloco", "templates/deploy"),
        autoescape=False,  # scripts and YAML, whose values the filters quote
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
    """A value as JSON, which YAML understands."""
    return json.dumps(value, default=str, ensure_ascii=False)
