"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.report.rows import island_columns, island_row, overview, title
from hf_diloco.report.summary import Report
from hf_diloco.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints the figures of the run, a row for each island, and the warnings; on standard output by default."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    console.print(Text(printable(title(report)), style="bold"), end="\n\n")
    console.print(_overview_table(report))
    console.print()
    console.print(_island_table(report))
    console.print()
    for warning in report.warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), printable(warning)))


def _overview_table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    written = [("it writes", " ".join(report.sample.split()))] if report.sample else []
    for name, value in overview(report) + written:
        table.add_row(name, Text(printable(value)))  # Text: brackets in a sample are no markup
    return table


def _island_table(report: Report) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in island_columns(report):
        table.add_column(name.replace(" ", "\n"), justify="right", header_style="cyan", no_wrap=True)
    for island in report.islands:
        table.add_row(*(Text(printable(cell)) for cell in island_row(report, island)))
    return table
