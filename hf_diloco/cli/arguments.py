"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml", help="the run file, or the name of one that comes with hf-diloco", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="overrides of the run file, as in training.max_steps=20"),
]
