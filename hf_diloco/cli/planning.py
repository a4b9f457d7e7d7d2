"""The commands of `hf-diloco` that look before a run starts; `cli.main` adds them to the program."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_diloco import __version__
from hf_diloco.cli.arguments import AsJson, Overrides, RunFileArgument
from hf_diloco.cli.devices import cuda_devices, num_cores
from hf_diloco.utils import text
from hf_diloco.utils.extras import installed_version
from hf_diloco.utils.redact import redact

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "obstore", "numba", "numpy", "pydantic")
_PREFIXES = ("HF_DILOCO_", "GLOO_", "NCCL_", "OMP_", "CUDA_VISIBLE", "ACCELERATE_", "DS_", "TORCH_")
"""What a report of a bug should say: versions of these packages, and variables that begin so."""


def doctor(
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Try a store: rights, exclusive creation, speed.")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure the way to another machine that runs --listen.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Answer another machine's --peer, until Ctrl-C.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="See whether this machine can listen on a port.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs write.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Look for what would keep a run from working on this machine; each finding comes with its remedy.

    [bold]Examples[/bold]

    [cyan]hf-diloco doctor[/cyan]

    [cyan]hf-diloco doctor --store s3://bucket/my-run[/cyan]

    [cyan]hf-diloco doctor --listen 10.0.0.1:29400[/cyan]  (on one machine)

    [cyan]hf-diloco doctor --peer 10.0.0.1:29400[/cyan]  (on the other)

    [bold]Exit codes[/bold]

    0: no problem; there may be warnings. 1: a problem, with which a run would fail. 2: wrong command.
    """
    from hf_diloco.cli.doctor import answer, checks, run_checks, show_findings

    if listen is not None:
        raise typer.Exit(answer(listen))
    chosen = [*checks(store, peer, port, folder)]  # addresses are checked before anything is looked at
    raise typer.Exit(show_findings(run_checks(chosen), as_json))


def env(as_json: AsJson = False) -> None:
    """Show versions, devices and settings of the environment, for a report of a bug. Secrets are left out.

    [bold]Examples[/bold]

    [cyan]hf-diloco env[/cyan]
    """
    facts = _environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}{value}")


def _environment() -> dict[str, str]:
    """Names and values, in the order in which they are read; without secrets."""
    import psutil

    gpus = cuda_devices()
    return {
        "hf-diloco": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        "cuda": _cuda(),
        "gpus": f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none",
        "cores": str(num_cores()),
        "memory": text.size(psutil.virtual_memory().total),
        **{name: str(redact(value, name)) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def _cuda() -> str:
    """That PyTorch was built for; its name says it without an import."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    return torch.version.cuda or "none: a PyTorch for CPUs"


def validate(
    run_file: RunFileArgument,
    overrides: Overrides = None,
    island: Annotated[
        int | None,
        typer.Option("--island", "--node", min=0, help="The one that starts here. Default: all, on this machine."),
    ] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="URL", help="Where the islands meet.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a run without starting it: settings, model, data, memory, disk and store; and say what was not tried.

    [bold]Examples[/bold]

    [cyan]hf-diloco validate configs/quickstart.yaml[/cyan]

    [cyan]hf-diloco validate run.yaml --island 1 --rendezvous s3://bucket/my-run[/cyan]

    [bold]Exit codes[/bold]

    0: nothing speaks against it. 1: it would fail on this machine. 2: wrong command or run file.
    """
    from hf_diloco.cli.plan import LaunchOptions
    from hf_diloco.cli.validate import run_validate

    asked = LaunchOptions(run_file, tuple(overrides or ()), island, None, rendezvous)
    raise typer.Exit(run_validate(asked, as_json))
