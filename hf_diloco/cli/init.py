"""`hf-diloco init`: writes the files with which an engine (Slurm, Kubernetes, ...) starts the islands of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hf_diloco.cli.arguments import STORES, Overrides, RunFileArgument, RunName, examples
from hf_diloco.config.base import ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import counted


@examples(
    "hf-diloco init slurm run.yaml --islands 4 --gpus-per-island 8 --rendezvous s3://bucket/my-run",
    "hf-diloco init compose run.yaml --gpus-per-island 4 --image my/image",
)
def init(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="what starts the islands: slurm, compose, kubernetes, skypilot or ray",
            show_default=False,
        ),
    ],
    run_file: RunFileArgument,
    overrides: Overrides = None,
    num_islands: Annotated[
        int | None, typer.Option("--islands", min=1, help="Number of islands in the run. Default: the run file's.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-island",
            min=0,
            help="GPUs of an island on one node, or on each of its nodes; 0 for CPUs. "
            "Default: launch.num_processes, or 0 with launch.use_cpu.",
        ),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nodes-per-island", min=1, help="Nodes of an island.")] = 1,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Where the islands meet: {STORES}. Default: {ENV_RENDEZVOUS}, else the run file's.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Container image in which hf-diloco is installed; compose, kubernetes and skypilot need it."
        ),
    ] = None,
    name: RunName = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files go. Default: deploy/NAME/ENGINE.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Write what an engine needs to start the islands of a run, stop them with a checkpoint, and start them again.

    The islands meet in an object store, so the engine may start each of them where and when it likes. The files are
    yours to change. What is there already stays, unless you give --force.
    """
    from hf_diloco.cli.engines import ENGINES, plan_deployment
    from hf_diloco.cli.plan import LaunchOptions

    if engine not in ENGINES:
        raise ConfigError(f"no files are known for {engine!r}: give one of {', '.join(ENGINES)}")
    options = LaunchOptions(run_file, tuple(overrides or ()), None, num_islands, rendezvous, name)
    deployment = plan_deployment(engine, options, num_gpus, num_nodes, image, folder)
    files, command = ENGINES[engine](deployment)
    _write(deployment.folder, files, force)
    typer.echo(f"start {counted(deployment.num_islands, 'island')} with:\n  {command}")


def _write(folder: Path, files: Mapping[str, str], force: bool) -> None:
    """Writes files into a folder; raises `ConfigError` if one exists, unless `force`, or it cannot be written to."""
    present = [name for name in files if (folder / name).exists()]
    if present and not force:
        raise ConfigError(
            f"{folder / present[0]} is there already: give --force to write over it, or another --folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
            typer.echo(f"wrote {folder / name}")
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror}; give another folder") from None
