"""`hf-diloco compare`: several runs in one table, and on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_ANY_WIDTH = 1000


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
    table = empty_table()
    for name in COLUMNS:
        is_text = name in ("run", "method")
        heading = name.replace(" ", "\n")
        table.add_column(heading, header_style="cyan", justify="left" if is_text else "right", no_wrap=True)
    for entry in found:
        table.add_row(*map(Text, row(entry)))
    console = terminal(sys.stdout)
    wanted = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    console.width = max(console.width, wanted)  # in a narrower terminal lines are broken, not figures left out
    console.print(table)
    if html is not None:
        typer.echo(f"wrote {write_comparison(found, html)}")
