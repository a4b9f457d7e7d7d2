"""A run's status as a person reads it."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hf_diloco.status.models import RunStatus
from hf_diloco.status.rows import ISLAND_COLUMNS, ROUND_COLUMNS, figures, island_row, round_row
from hf_diloco.utils.tables import empty_table, fact_table, plain, warning

_LIFE = ISLAND_COLUMNS.index("life")
_WORDS = ("host", "phase", "life", "state", "islands", "left out")
_STYLES = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}


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
