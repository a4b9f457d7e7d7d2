"""Reads a run's state from its rendezvous: `hf-diloco status`, once or repeatedly, and `hf-diloco store check`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Group
from rich.text import Text

from hf_diloco.config.base import origin
from hf_diloco.errors import ConfigError, RendezvousError, StoreError
from hf_diloco.report import load_run
from hf_diloco.status.check import CheckReport, check_store, set_aside
from hf_diloco.status.models import ROUND_COLUMNS, RunStatus, figures, island_columns, island_row, round_row
from hf_diloco.status.observer import TIMEOUT, Observer, observe
from hf_diloco.store.credentials import load_key
from hf_diloco.store.objects import ObjectStore
from hf_diloco.utils import text
from hf_diloco.utils.tables import empty_table, fact_table, output, plain, print_figures, warning, within
from hf_diloco.utils.urls import VALID_URLS, check_between_processes, check_store_url, is_object_store, split_tcp_url

MAX_FAILURES = 3  # in a row, after which a store hosted by island 0 counts as gone
_WORDS = ("host", "phase", "life", "state", "islands", "left out")
_LONG = ("host", "left out")  # shortened on a narrow terminal
_LIFE_STYLES = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}
_KIND_STYLES = {
    "damaged": "bold red",
    "forged": "bold red",
    "abandoned": "yellow",
    "foreign": "yellow",
    "settled": "dim",
}


def run_status(run: str, key_file: Path | None, interval: float | None, num_rounds: int, as_json: bool) -> None:
    """Runs `hf-diloco status`, see its options; `interval` is None to show the status once.

    Raises:
        ConfigError: the folder does not exist, or the URL or the key is invalid.
        RendezvousError: there is no run, or it has another key, or the store cannot be opened.
        StoreError: the store does not answer. While watching, later failures only print a warning, unless island 0
            hosts the store.
    """
    url = _rendezvous_of(run)
    check_url(url, "status", may_be_tcp=True)
    with contextlib.suppress(KeyboardInterrupt) if interval else contextlib.nullcontext():
        key = load_key(key_file)
        try:
            observer = observe(url, key, num_rounds)
        except RendezvousError as error:
            if url == run or not url.startswith("tcp:"):
                raise
            raise RendezvousError(f"{error}; `hf-diloco report {run}` shows what it has recorded") from None
        if interval is None:
            status = observer.look_until_known()
            if as_json:
                print(status.model_dump_json(indent=2))
            else:
                print_figures(output(), *render(status).renderables)
            return
        with _display(as_json) as show:
            _watch(observer, interval, show)


def is_rendezvous(run: str) -> bool:
    """Whether a command's argument names the place where islands meet, and not a run folder."""
    return (":" in run.partition("/")[0] or bool(origin("rendezvous", run))) and not Path(run).is_dir()


def _rendezvous_of(run: str) -> str:
    if is_rendezvous(run):
        return run
    found = load_run(run)
    if found.rendezvous:
        return found.rendezvous
    if not found.settings:
        raise ConfigError(
            f"{run} does not say where its islands meet. If the run has just begun, look again in a moment, or give "
            "the rendezvous that `hf-diloco launch` showed, such as tcp://10.0.0.1:29400"
        )
    raise ConfigError(f"{run} has no islands that meet anywhere; see `hf-diloco report {run}`")


def check_url(url: str, command: str, may_be_tcp: bool = False) -> None:
    """Raises `ConfigError` unless a command can read a store there: with `may_be_tcp`, also that of island 0."""
    try:
        _check_url(url, command, may_be_tcp)
    except ConfigError as error:
        raise ConfigError(f"{error}{origin('rendezvous', url)}") from None


def _check_url(url: str, command: str, may_be_tcp: bool) -> None:
    if may_be_tcp and url.startswith("tcp:"):
        split_tcp_url(url)
        return
    if not is_object_store(url):
        where = f"{'tcp://HOST:PORT, ' if may_be_tcp else ''}{VALID_URLS}"
        raise ConfigError(
            f"rendezvous {url!r}: {command} needs the place where the run's islands leave records ({where})"
            + ("; other runs have `hf-diloco report RUN`" if may_be_tcp else "")
        )
    check_between_processes(url)
    check_store_url(url)


def _watch(observer: Observer, interval: float, show: Callable[[RunStatus], object]) -> None:
    """Shows the status repeatedly until the run is over; at tcp:// the store ends with the run."""
    num_failures = 0
    while True:
        begun = time.monotonic()
        try:
            status = observer.look()
        except StoreError as error:  # a run survives an outage of the store, and so does this
            num_failures += 1
            if observer.is_of_tcp and num_failures >= MAX_FAILURES:
                raise
            print(f"warning: {error}", file=sys.stderr)
        else:
            num_failures = 0
            show(status)
            if status.is_over:
                return
        time.sleep(max(0.0, begun + interval - time.monotonic()))


@contextlib.contextmanager
def _display(as_json: bool) -> Iterator[Callable[[RunStatus], object]]:
    """Yields a function that shows a status: in place on a terminal, one after the other elsewhere."""
    console = output()
    if as_json:
        yield lambda status: print(status.model_dump_json(), flush=True)
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda status: print_figures(console, *render(status).renderables)
    else:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(within(console, render(status)), refresh=True)


def render(status: RunStatus) -> Group:
    """Returns the run's figures, a row for each island and each of the last rounds, and refused objects."""
    columns = island_columns(status)
    islands, rounds = (empty_table(names, _WORDS, _LONG) for names in (columns, ROUND_COLUMNS))
    for island in status.islands:
        cells = [plain(cell) for cell in island_row(status, island)]
        life = columns.index("life")
        cells[life] = Text(cells[life].plain, style=_LIFE_STYLES[island.presence])
        islands.add_row(*cells)
    for entry in status.rounds:
        rounds.add_row(*map(plain, round_row(entry)))
    refused = [warning(f"refused {path}: {reason}") for path, reason in status.refused.items()]
    for island in status.islands:
        refused += [
            warning(f"{status.unit} {island.island} refuses {status.unit} {name}: {why}")
            for name, why in island.refuses.items()
        ]
    tables = (fact_table(figures(status)), islands, *([rounds] if status.unit == "island" else []))
    return Group(*(part for table in tables for part in (table, plain(""))), *refused)


def run_check(url: str, key_file: Path | None, *, is_deep: bool, repair: bool, as_json: bool) -> int:
    """Runs `hf-diloco store check`, see its options; returns the exit code: 0 if nothing needs to be done, else 1.

    Raises:
        ConfigError: the URL or the key is invalid.
        RendezvousError: there is no run, or it has another key, or the store cannot be opened.
        StoreError: the store does not answer.
    """
    check_url(url, "store check")
    key = load_key(key_file)
    store = ObjectStore(url, TIMEOUT, read_only=not repair)
    report = check_store(store, key, is_deep)
    if repair:
        report = set_aside(store, report)
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        _show_found(report)
    return 0 if report.is_clean else 1


def _show_found(report: CheckReport) -> None:
    console = output()
    console.print(f"run       {report.run[:12]} at {report.url}", markup=False, soft_wrap=True)
    console.print(f"looked at {report.num_objects:,} objects, {text.size(report.num_bytes)}", markup=False)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(report.counts.items()))
    console.print(f"found     {counts or 'nothing wrong'}", markup=False)
    for finding in report.findings:
        size = f", {text.size(finding.num_bytes)}" if finding.num_bytes else ""
        stays = " (it stays: islands pass over it by themselves)" if finding.stays else ""
        moved = f"; moved to {finding.moved_to}" if finding.moved_to else ""
        line = text.printable(f"{finding.kind} {finding.path}{size}: {finding.reason}{stays}{moved}")
        console.print(line, markup=False, soft_wrap=True, style=_KIND_STYLES[finding.kind])
