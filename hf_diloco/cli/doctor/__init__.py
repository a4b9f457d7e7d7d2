"""`hf-diloco doctor`: finds problems of this machine that would break a run, with remedies; and `hf-diloco env`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_diloco import __version__
from hf_diloco.cli.arguments import AsJson, examples
from hf_diloco.cli.devices import cuda_devices, num_cores
from hf_diloco.cli.meeting import open_listener
from hf_diloco.utils import text
from hf_diloco.utils.extras import installed_version
from hf_diloco.utils.redact import redact

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "obstore", "numba", "numpy", "pydantic")
_PREFIXES = ("HF_DILOCO_", "GLOO_", "NCCL_", "OMP_", "CUDA_VISIBLE", "ACCELERATE_", "DS_", "TORCH_")
"""For bug reports: versions of these packages, and environment variables with these prefixes."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: what was checked, such as "deepspeed" or "host name".
        level: "problem": a run will fail; "warning": a run may fail or be slow; "ok".
        text: the result in words.
        remedy: what to do; empty if nothing.
    """

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def judge(
    check: str, is_fine: bool, text: str, remedy: str, otherwise: Literal["warning", "problem"] = "warning"
) -> Finding:
    """Returns a finding that is ok, or else has the level `otherwise` and the remedy."""
    return Finding(check, "ok", text) if is_fine else Finding(check, otherwise, text, remedy)


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yields all findings as they come. If a check raises, yields a warning with its name, and continues."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # checks may raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield Finding(name, "warning", f"this could not be looked at ({reason})", "look at it by hand")


def show_findings(findings: Iterable[Finding], as_json: bool) -> int:
    """Prints findings as they come, and their numbers; returns the exit code: 1 if there is a problem, else 0."""
    from hf_diloco.utils.tables import output

    console = output()
    found = []
    for one in findings:
        found.append(one)
        if as_json:
            continue
        console.print(f"[{_STYLES[one.level]}]{one.level:<8}[/] ", end="")
        console.print(f"{one.check}: {one.text}", markup=False, soft_wrap=True)
        if one.remedy:
            console.print(f"         → {one.remedy}", markup=False, soft_wrap=True)
    problems, warnings = (sum(one.level == level for one in found) for level in ("problem", "warning"))
    if as_json:
        counts = {"problems": problems, "warnings": warnings}
        print(json.dumps({**counts, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        console.print(f"\n{text.counted(problems, 'problem')}, {text.counted(warnings, 'warning')}", markup=False)
    return min(problems, 1)


def checks(store: str | None, peer: str | None, port: int | None, folder: Path) -> Iterator[tuple[str, Check]]:
    """Yields the checks of `hf-diloco doctor`, by its options; raises `ConfigError` for an invalid address."""
    from hf_diloco.cli.doctor import machine, network

    yield "versions", machine.check_versions
    yield "driver", machine.check_driver
    yield "torch", machine.check_torch
    yield "deepspeed", machine.check_deepspeed_build
    yield "memory", machine.check_memory
    yield "disk", partial(machine.check_disk, folder)
    yield "open files", machine.check_files
    yield "host name", network.check_host_name
    yield "interfaces", network.check_interfaces
    if port is not None:
        yield "port", partial(network.check_port, port)
    if store is not None:
        from hf_diloco.cli.status import check_url

        check_url(store, "doctor --store")
        yield "store", partial(network.check_store, store)
    if peer is not None:
        yield "peer", partial(network.check_peer, *network.split_peer(peer))


def answer(address: str) -> int:
    """Runs `hf-diloco doctor --listen`: answers other machines until Ctrl-C. For errors see `open_listener`."""
    from hf_diloco.cli.doctor.network import serve

    with (
        open_listener(address.removeprefix("tcp://"), "other machines") as listener,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(f"listening at {address}; there: hf-diloco doctor --peer {address} (Ctrl-C ends it)", flush=True)
        serve(listener)
    return 0


@examples(
    "hf-diloco doctor",
    "hf-diloco doctor --store s3://bucket/my-run",
    "hf-diloco doctor --listen 10.0.0.1:29400  # on one machine",
    "hf-diloco doctor --peer 10.0.0.1:29400  # on the other",
)
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

    [bold]Exit codes[/bold]

    0: no problem; there may be warnings. 1: a problem, with which a run would fail. 2: wrong command.
    """
    if listen is not None:
        raise typer.Exit(answer(listen))
    chosen = [*checks(store, peer, port, folder)]  # validates addresses before any check runs
    raise typer.Exit(show_findings(run_checks(chosen), as_json))


@examples("hf-diloco env")
def env(as_json: AsJson = False) -> None:
    """Show versions, devices and settings of the environment, for a report of a bug. Secrets are left out."""
    facts = _environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}{value}")


def _environment() -> dict[str, str]:
    """Returns facts about the environment by name, in the order to print them; without secrets."""
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
    """Returns the CUDA version that PyTorch was built for."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    return torch.version.cuda or "none: a PyTorch for CPUs"
