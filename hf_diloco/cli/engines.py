"""Engines for which `hf-diloco init` writes files: each a function from a deployment to files and the next command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
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


ENGINES: dict[str, Callable[[Deployment], Written]] = {
    "slurm": slurm,
    "compose": compose,
    "kubernetes": kubernetes,
}


def _check_image(deployment: Deployment, engine: str) -> None:
    if not deployment.image:
        raise ConfigError(f"{engine} starts containers: give --image, one in which hf-diloco is installed")
    if deployment.num_nodes > 1:
        raise ConfigError(
            f"--nodes-per-island {deployment.num_nodes}: an island of {engine} is one container on one node; give 1, "
            "or use slurm"
        )


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
        "compose": lambda value: _json(value).replace("$", "$$"),
        "kubernetes": lambda value: _json(value).replace("$(", "$$("),
    }
    return environment.get_template(template).render(deployment=deployment, run=deployment.run, **values)


def _json(value: Any) -> str:
    """A value as JSON, which YAML understands."""
    return json.dumps(value, default=str, ensure_ascii=False)
