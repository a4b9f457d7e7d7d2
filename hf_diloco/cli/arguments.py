"""Arguments and options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hf_diloco.config.base import ENV_NUM_ISLANDS

C = TypeVar("C", bound=Callable[..., Any])

_RUN_FILE = typer.Argument(
    metavar="RUN.yaml", help="the run file, or the name of one that comes with hf-diloco", show_default=False
)
RunFileArgument = Annotated[Path, _RUN_FILE]
OptionalRunFile = Annotated[Path | None, _RUN_FILE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="overrides of the run file, as in training.max_steps=20"),
]
RunName = Annotated[str | None, typer.Option(help="Name of the run; its folder is OUTPUT/NAME.")]
RunsFolder = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder of run folders. Default: the run file's, else runs.")
]
NumIslands = Annotated[
    int | None,
    typer.Option(
        "--islands",
        "--num-islands",
        "--num-nodes",
        min=1,
        help=f"Number of islands, or nodes, in the run. Default: {ENV_NUM_ISLANDS}, else the run file's, or 1.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto|never|PATH",
        help="auto, the default: from the newest round that all islands hold a checkpoint of. never: a new run. "
        "Or a folder.",
    ),
]
STORES = "s3://BUCKET/PREFIX, gs://…, az://…, file:///DIR or http://HOST:PORT/NAME"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def group(help: str) -> typer.Typer:
    """Creates a group of commands, such as `hf-diloco keys`; without arguments it prints its help."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def examples(*lines: str) -> Callable[[C], C]:
    """Adds command lines to the help of a command, which is its docstring."""
    shown = ["[bold]Examples[/bold]", *(f"[cyan]{line}[/cyan]" for line in lines)]

    def add(command: C) -> C:
        command.__doc__ = "\n\n".join([inspect.cleandoc(command.__doc__ or ""), *shown])
        return command

    return add
