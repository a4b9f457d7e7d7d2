"""A run's status as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.status.models import IslandStatus, RoundStatus, RunStatus
from hf_diloco.utils import text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_ISLAND_COLUMNS = ("island", "host", "phase", "life", "round", "lag", "steps", "tokens/s", "ranks", "starts")
_ROUND_COLUMNS = ("round", "state", "attempts", "islands", "left out", "payload", "took")
_WORDS = ("host", "phase", "life", "state", "islands", "left out")
_STYLES = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}


def render(status: RunStatus) -> Group:
    """The run's figures, a row for each island and each of the last rounds, and what was refused."""
    from rich.console import Group

    parts = [_overview(status), _island_table(status), _round_table(status)]
    refused = [_warning(f"refused {path}: {reason}") for path, reason in status.refused.items()]
    return Group(*(part for table in parts for part in (table, _plain(""))), *refused)


def _overview(status: RunStatus) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _figures(status):
        table.add_row(name, _plain(value))
    return table


def _figures(status: RunStatus) -> list[tuple[str, str]]:
    host = f" ({status.begun_on})" if status.begun_on else ""
    stored = status.stored
    return [
        ("run", f"{status.run[:12]} at {status.url}, begun by island {status.begun_by}{host}"),
        ("rounds", _progress(status)),
        (
            "key",
            "yes: what islands write is authenticated"
            if status.has_key
            else "none: whoever can write to the store is believed",
        ),
        ("snapshot", _snapshot(status)),
        (
            "in the store",
            f"{text.size(stored.payloads)} pseudo-gradients, {text.size(stored.snapshots)} snapshots, "
            f"{text.size(stored.records)} records",
        ),
    ]


def _progress(status: RunStatus) -> str:
    of_all = f" of {status.num_rounds:,}" if status.num_rounds is not None else ""
    progress = f"{status.round:,}{of_all} committed"
    if status.is_over:
        return f"{progress}: the run is over"
    if status.seconds_per_round is None:
        return progress
    progress += f", {text.seconds(round(status.seconds_per_round, 2))} each"
    if status.num_rounds is None or status.num_rounds <= status.round:
        return progress
    return f"{progress}, {text.seconds((status.num_rounds - status.round) * status.seconds_per_round)} to go"


def _snapshot(status: RunStatus) -> str:
    snapshot = status.snapshot
    if snapshot is None:
        return "none that is whole"
    by = f" by island {snapshot.island}" if snapshot.island is not None else ""
    return f"round {snapshot.round:,}{by}, {text.size(snapshot.num_bytes)}"


def _island_table(status: RunStatus) -> Table:
    table = _table(_ISLAND_COLUMNS)
    sync_every = status.settings.get("sync_every")
    for island in status.islands:
        steps = text.count(island.steps)
        table.add_row(
            str(island.island),
            _plain(island.host or text.MISSING),
            island.phase or text.MISSING,
            _sign_of_life(island),
            text.count(island.round),
            text.count(island.lag),
            f"{steps} of {sync_every:,}" if isinstance(sync_every, int) and island.steps is not None else steps,
            text.count(island.tokens_per_second or None),
            text.count(island.num_ranks),
            str(island.claim),
        )
    return table


def _sign_of_life(island: IslandStatus) -> Text:
    from rich.text import Text

    words = {"ended": text.MISSING, "unknown": "unknown yet"}
    shown = words.get(island.presence, island.presence)
    if island.presence == "silent":
        shown = f"silent {text.seconds(round(island.seconds_silent))}"
    return Text(shown, style=_STYLES[island.presence])


def _round_table(status: RunStatus) -> Table:
    table = _table(_ROUND_COLUMNS)
    for entry in status.rounds:
        table.add_row(
            text.count(entry.round),
            _state(entry),
            str(entry.attempts),
            text.numbers(entry.participants or entry.offered) or text.MISSING,
            _plain("; ".join(_left_out(entry)) or text.MISSING),
            "direct" if entry.payload_bytes is None else text.size(entry.payload_bytes),
            text.seconds(None if entry.seconds is None else round(entry.seconds, 2)),
        )
    return table


def _state(entry: RoundStatus) -> str:
    if entry.state == "gathering":
        return f"{len(entry.offered)} {text.plural('offer', len(entry.offered))} so far"
    return entry.state


def _left_out(entry: RoundStatus) -> list[str]:
    tried_again = [f"tried again: {reason}" for reason in entry.aborted]
    return [f"{island}: {reason}" for island, reason in entry.left_out.items()] + tried_again


def _table(columns: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        words = name in _WORDS
        table.add_column(
            name,
            header_style="cyan",
            justify="left" if words else "right",
            no_wrap=name != "left out",
        )
    return table


def _warning(message: str) -> Text:
    from rich.text import Text

    return Text.assemble(("warning: ", "bold yellow"), _plain(message))


def _plain(value: str) -> Text:
    """What others wrote: no markup, and nothing that a terminal would obey."""
    from rich.text import Text

    return Text(text.printable(value))
