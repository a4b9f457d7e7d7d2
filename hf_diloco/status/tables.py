"""A run's status as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.status.models import RunStatus
from hf_diloco.status.rows import ISLAND_COLUMNS, ROUND_COLUMNS, figures, island_row, round_row
from hf_diloco.utils import text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_LIFE = ISLAND_COLUMNS.index("life")
_WORDS = ("host", "phase", "life", "state", "islands", "left out")
_STYLES = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}


def render(status: RunStatus) -> Group:
    """The run's figures, a row for each island and each of the last rounds, and what was refused."""
    from rich.console import Group

    parts = [_overview(status), _island_table(status), _round_table(status)]
    refused = [_warning(f"refused {path}: {reason}") for path, reason in status.refused.items()]
    for island in status.islands:
        refused += [
            _warning(f"island {island.island} refuses island {name}: {why}") for name, why in island.refuses.items()
        ]
    return Group(*(part for table in parts for part in (table, _plain(""))), *refused)


def _overview(status: RunStatus) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in figures(status):
        table.add_row(name, _plain(value))
    return table


def _island_table(status: RunStatus) -> Table:
    from rich.text import Text

    table = _table(ISLAND_COLUMNS)
    for island in status.islands:
        cells = [_plain(cell) for cell in island_row(status, island)]
        cells[_LIFE] = Text(cells[_LIFE].plain, style=_STYLES[island.presence])
        table.add_row(*cells)
    return table


def _round_table(status: RunStatus) -> Table:
    table = _table(ROUND_COLUMNS)
    for entry in status.rounds:
        table.add_row(*map(_plain, round_row(entry)))
    return table


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
