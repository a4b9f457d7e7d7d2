"""`hf-diloco doctor`: finds what would keep a run from working on this machine, with remedies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hf_diloco.cli.meeting import open_listener
from hf_diloco.utils.tables import output
from hf_diloco.utils.text import counted

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at, as "deepspeed" or "host name".
        level: "problem": a run will fail; "warning": it may, or will be slow; "ok".
        text: what was found.
        remedy: what to do; empty if there is nothing to be done.
    """

    check: str
    level: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def judge(
    check: str, is_fine: bool, text: str, remedy: str, otherwise: Literal["warning", "problem"] = "warning"
) -> Finding:
    """The same figures, whether they are fine or else need a remedy."""
    return Finding(check, "ok", text) if is_fine else Finding(check, otherwise, text, remedy)


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """All findings, as they come. A check that fails by itself is a warning, under its name: the others go on."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # whatever the machine has in store
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield Finding(name, "warning", f"this could not be looked at ({reason})", "look at it by hand")


def show_findings(findings: Iterable[Finding], as_json: bool) -> int:
    """Prints findings as they come, and how many of them matter; returns the exit code: 1 if there is a problem."""
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
        console.print(f"\n{counted(problems, 'problem')}, {counted(warnings, 'warning')}", markup=False)
    return min(problems, 1)


def checks(store: str | None, peer: str | None, port: int | None, folder: Path) -> Iterator[tuple[str, Check]]:
    """What `hf-diloco doctor` looks at, see its options; raises `ConfigError` for an address that cannot be one."""
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
        open_listener(address.removeprefix("tcp://"), "the other machine") as listener,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(f"listening at {address}; there: hf-diloco doctor --peer {address} (Ctrl-C ends it)", flush=True)
        serve(listener)
    return 0
