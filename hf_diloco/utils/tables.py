"""Tables in a terminal. Imports rich, so commands import it when they have something to show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_diloco.utils.text import printable

_ANY_WIDTH = 1000


def plain(value: str) -> Text:
    """Returns untrusted text without markup or terminal control characters."""
    return Text(printable(value))


def warning(message: str) -> Text:
    """Returns a line that begins with "warning:"."""
    return Text.assemble(("warning: ", "bold yellow"), plain(message))


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Returns a table with one name and value per row."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, plain(value))
    return table


def empty_table(columns: Iterable[str], words: Collection[str] = (), long: Collection[str] = ()) -> Table:
    """Returns an empty table with a line under its headings.

    Columns hold numbers, aligned right, except `words`; those in `long` are wrapped if the terminal is narrow.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in words else "right"
        table.add_column(name, header_style="cyan", justify=justify, no_wrap=name not in long)
    return table


def print_figures(console: Console, *parts: RenderableType) -> None:
    """Prints tables and other parts. On a terminal that is too narrow, lines wrap, so that no figures are cut off."""
    width = console.width
    for part in parts:
        console.width = max(width, _needed(console, part)) if isinstance(part, Table) else width
        console.print(part)
    console.width = width


def within(console: Console, group: Group) -> Group:
    """Returns the parts as `print_figures` prints them, with lines already wrapped, so that the height is known."""

    def broken(part: RenderableType) -> RenderableType:
        if not isinstance(part, Table):
            return part
        wide = console.options.update(width=max(console.width, _needed(console, part)))
        lines = console.render_lines(part, wide, pad=False)
        shown = (Text.assemble(*((one.text, one.style or "") for one in line)) for line in lines)
        return Text("\n", overflow="fold").join(shown)

    return Group(*map(broken, group.renderables))


def _needed(console: Console, table: Table) -> int:
    """Returns the width that a table needs if its wrapping columns are only as wide as their headings."""
    options = console.options.update(max_width=_ANY_WIDTH)

    def width(part: RenderableType) -> int:
        return console.measure(part, options=options).maximum

    long = (column for column in table.columns if not column.no_wrap)
    return width(table) - sum(
        max(0, max(map(width, column.cells), default=0) - width(column.header)) for column in long
    )


def output() -> Console:
    """Returns a console on standard output, for a command that prints and exits: a failed write raises `OSError`."""
    return Console(highlight=False)
