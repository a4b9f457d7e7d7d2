"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.report.rows import island_columns, island_row, overview, title
from hf_diloco.report.summary import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints the figures of the run, a row for each island, and the warnings; on standard output by default."""
    from rich.console import Console

    from hf_diloco.utils.tables import empty_table, fact_table, plain, warning

    heading = plain(title(report))
    heading.stylize("bold")
    sample = [("it writes", " ".join(report.sample.split()))] if report.sample else []
    islands = empty_table()
    for name in island_columns(report):
        islands.add_column(name.replace(" ", "\n"), justify="right", header_style="cyan", no_wrap=True)
    for island in report.islands:
        islands.add_row(*map(plain, island_row(report, island)))
    console = console or Console(highlight=False)
    console.print(heading, end="\n\n")
    console.print(fact_table(overview(report) + sample))
    console.print()
    console.print(islands)
    console.print()
    for message in report.warnings:
        console.print(warning(message))
