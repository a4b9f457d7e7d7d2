"""`hf-diloco status`: look at a run where its islands meet, once or again and again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hf_diloco.cli.display import terminal
from hf_diloco.errors import ConfigError, RendezvousError, StoreError
from hf_diloco.status import Observer, RunStatus, observe
from hf_diloco.status.rows import ISLAND_COLUMNS, ROUND_COLUMNS, figures, island_row, round_row
from hf_diloco.store.credentials import load_key
from hf_diloco.utils.tables import empty_table, fact_table, plain, warning
from hf_diloco.utils.urls import VALID_URLS, check_between_processes, check_store_url, is_object_store, split_tcp_url

TIMEOUT = 15.0  # seconds without an answer after which a person is told
MAX_FAILURES = 3
"""Looks one after the other at a store that island 0 keeps, until that counts as gone."""
_LIFE = ISLAND_COLUMNS.index("life")
_WORDS = ("host", "phase", "life", "state", "islands", "left out")
_STYLES = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}


def run_status(run: str, key_file: Path | None, interval: float | None, num_rounds: int, as_json: bool) -> None:
    """Runs `hf-diloco status`.

    Args:
        run: its folder, or where its islands meet.
        key_file: see `hf_diloco.store.signing.load_key`.
        interval: seconds between two looks; None: once.
        num_rounds: how many of the last rounds to show.
        as_json: for programs.

    Raises:
        ConfigError: there is no such folder, or the URL or the key cannot be one.
        RendezvousError: there is no run, or it was begun with another key, or the store cannot be opened.
        StoreError: the store does not answer; once it has, watching goes on regardless, unless island 0 keeps it.
    """
    url = _rendezvous_of(run)
    check_url(url, "status", may_be_tcp=True)
    with contextlib.suppress(KeyboardInterrupt) if interval else contextlib.nullcontext():
        key = load_key(key_file)
        observer = observe(url, key, num_rounds, TIMEOUT)
        if interval is None:
            _show_once(observer.settle(), as_json)
        else:
            _watch(observer, interval, as_json)


def _rendezvous_of(run: str) -> str:
    """Where the islands of a run meet."""
    if ":" in run.partition("/")[0]:
        return run
    from hf_diloco.report import load_run

    settings = load_run(run).settings.get("diloco") or {}
    if not (url := settings.get("rendezvous")):
        raise ConfigError(f"{run} has no islands that meet anywhere; see `hf-diloco report {run}`")
    return str(url)


def check_url(url: str, command: str, may_be_tcp: bool = False) -> None:
    """Raises `ConfigError` unless a run's islands can meet there in a store that a command can look at.

    Args:
        url: the rendezvous.
        command: that looks, for messages.
        may_be_tcp: it looks at what island 0 keeps at tcp://HOST:PORT, too.
    """
    try:
        if may_be_tcp and url.startswith("tcp:"):
            split_tcp_url(url)
            return
        if not is_object_store(url):
            where = f"{'tcp://HOST:PORT, ' if may_be_tcp else ''}{VALID_URLS}"
            raise ConfigError(
                f"rendezvous {url!r}: {command} needs the place where the run's islands leave records ({where}); what "
                "other runs do is in the launcher's output and in `hf-diloco report RUN`"
            )
        check_between_processes(url)
        check_store_url(url)
    except (RendezvousError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _show_once(status: RunStatus, as_json: bool) -> None:
    if as_json:
        print(status.model_dump_json(indent=2))
    else:
        terminal(sys.stdout).print(render(status))


def _watch(observer: Observer, interval: float, as_json: bool) -> None:
    """Shows one look after the other until the run is over; at tcp:// its store ends with it."""
    num_failures = 0
    with _display(as_json) as show:
        while True:
            begun = time.monotonic()
            try:
                status = observer.look()
            except StoreError as error:  # the run goes on without the store for a while, and so does this
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
    """Where looks go: one place on a terminal, one after the other elsewhere."""
    console = terminal(sys.stdout)
    if as_json:
        yield lambda status: print(status.model_dump_json(), flush=True)
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda status: console.print(render(status))
    else:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(render(status), refresh=True)


def render(status: RunStatus) -> Group:
    """The run's figures, a row for each island and each of the last rounds, and what was refused."""
    tables = [fact_table(figures(status)), _island_table(status), _round_table(status)]
    refused = [warning(f"refused {path}: {reason}") for path, reason in status.refused.items()]
    for island in status.islands:
        refused += [
            warning(f"island {island.island} refuses island {name}: {why}") for name, why in island.refuses.items()
        ]
    return Group(*(part for table in tables for part in (table, plain(""))), *refused)


def _island_table(status: RunStatus) -> Table:
    table = _table(ISLAND_COLUMNS)
    for island in status.islands:
        cells = [plain(cell) for cell in island_row(status, island)]
        cells[_LIFE] = Text(cells[_LIFE].plain, style=_STYLES[island.presence])
        table.add_row(*cells)
    return table


def _round_table(status: RunStatus) -> Table:
    table = _table(ROUND_COLUMNS)
    for entry in status.rounds:
        table.add_row(*map(plain, round_row(entry)))
    return table


def _table(columns: tuple[str, ...]) -> Table:
    table = empty_table()
    for name in columns:
        table.add_column(
            name, header_style="cyan", justify="left" if name in _WORDS else "right", no_wrap=name != "left out"
        )
    return table
