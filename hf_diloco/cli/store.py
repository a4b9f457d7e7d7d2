"""`hf-diloco store check`: what lies in a run's store and should not, or is damaged."""

from __future__ import annotations

import sys
from pathlib import Path

from hf_diloco.cli.display import terminal
from hf_diloco.cli.status import TIMEOUT, check_url
from hf_diloco.status.check import CheckReport, Finding, check_store, set_aside
from hf_diloco.store.credentials import load_key
from hf_diloco.store.objects import open_object_store
from hf_diloco.utils import text

_STYLES = {"damaged": "bold red", "forged": "bold red", "abandoned": "yellow", "foreign": "yellow", "settled": "dim"}


def run_check(url: str, key_file: Path | None, *, is_deep: bool, repair: bool, as_json: bool) -> int:
    """Runs `hf-diloco store check`; returns its exit code: 0 if there is nothing to be done, else 1.

    Args:
        url: where the islands meet.
        key_file: see `hf_diloco.store.signing.load_key`.
        is_deep: read all values too.
        repair: set aside what is found.
        as_json: for programs.

    Raises:
        ConfigError: the URL or the key cannot be one.
        RendezvousError: there is no run, or it was begun with another key, or the store cannot be opened.
        StoreError: the store does not answer.
    """
    check_url(url, "store check")
    key = load_key(key_file)
    store = open_object_store(url, TIMEOUT, read_only=not repair)
    report = check_store(store, key, is_deep)
    if repair:
        report = set_aside(store, report)
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        _show(report)
    return 0 if report.is_clean else 1


def _show(report: CheckReport) -> None:
    console = terminal(sys.stdout)
    console.print(f"run       {report.run[:12]} at {report.url}", markup=False, soft_wrap=True)
    console.print(f"looked at {report.num_objects:,} objects, {text.size(report.num_bytes)}", markup=False)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(report.counts.items()))
    console.print(f"found     {counts or 'nothing wrong'}", markup=False)
    for finding in report.findings:
        console.print(_line(finding), markup=False, soft_wrap=True, style=_STYLES[finding.kind])


def _line(finding: Finding) -> str:
    size = f", {text.size(finding.num_bytes)}" if finding.num_bytes else ""
    line = f"{finding.kind} {finding.path}{size}: {finding.reason}"
    line += f"; moved to {finding.moved_to}" if finding.moved_to else ""
    return "".join(letter if letter.isprintable() else "?" for letter in line)
