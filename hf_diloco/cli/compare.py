"""`hf-diloco compare`: several runs in one table, and on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="two run folders or more", show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: loss against tokens, time and bytes.")
    ] = None,
) -> None:
    """Compare runs: loss, tokens, time, bytes sent, time spent waiting; also while they go on.

    [bold]Examples[/bold]

    [cyan]hf-diloco compare runs/first runs/second[/cyan]

    [cyan]hf-diloco compare runs/first runs/second --html comparison.html[/cyan]
    """
    from rich.text import Text

    from hf_diloco.cli.display import terminal
    from hf_diloco.report.compare import COLUMNS, load_candidates, row, write_comparison
    from hf_diloco.utils.tables import empty_table

    found = load_candidates(runs)
    table = empty_table(padding=2)
    for name in COLUMNS:
        table.add_column(name, header_style="cyan", justify="left" if name in ("run", "method") else "right")
    for entry in found:
        table.add_row(*map(Text, row(entry)))
    terminal(sys.stdout).print(table)
    if html is not None:
        typer.echo(f"wrote {write_comparison(found, html)}")
