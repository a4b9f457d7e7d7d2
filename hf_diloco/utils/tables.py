"""Tables in a terminal. Imports rich, so commands import it when they have something to show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_diloco.utils.text import printable

_ANY_WIDTH = 1000


def plain(value: str) -> Text:
    """What others wrote: no markup, and nothing that a terminal would obey."""
    return Text(printable(value))


def warning(message: str) -> Text:
    """A line that begins with "warning:"."""
    return Text.assemble(("warning: ", "bold yellow"), plain(message))


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A name and its value a row."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, plain(value))
    return table


def empty_table(columns: Iterable[str], words: Collection[str] = (), long: Collection[str] = ()) -> Table:
    """A table with a line under its headings.

    Args:
        columns: their headings.
        words: those that hold words; others hold numbers, to the right.
        long: those that give way where the terminal is narrow.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in words else "right"
        table.add_column(name, header_style="cyan", justify=justify, no_wrap=name not in long)
    return table


def print_figures(console: Console, table: Table) -> None:
    """Prints a table of figures: in a narrower terminal its lines are broken, not figures left out."""
    wanted = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    width = console.width
    console.width = max(width, wanted)
    console.print(table)
    console.width = width
