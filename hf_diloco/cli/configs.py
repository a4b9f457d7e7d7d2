"""`hf-diloco configs`: lists, shows and copies the run files that come with the package."""

from __future__ import annotations

import filecmp
import itertools
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hf_diloco.apps.common.shipped import SHIPPED, shipped_files, shipped_names
from hf_diloco.cli.arguments import examples, group
from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import nearest

configs_app = group("List, show and copy the run files that come with hf-diloco.")


@configs_app.command("ls")
@examples("hf-diloco configs ls")
def ls() -> None:
    """List the run files, by the names that `hf-diloco launch` takes, and the files that they name."""
    names = shipped_names()
    width = max(len(name) for name in names)
    for name in names:
        typer.echo(f"{name:{width}}  {_headline((SHIPPED / f'{name}.yaml').read_text())}")
    others = [file for file in shipped_files() if file.removesuffix(".yaml") not in names]
    typer.echo(f"\nfor `deepspeed:` and `accelerate:` of run files: {', '.join(others)}")


@configs_app.command("show")
@examples(
    "hf-diloco configs show quickstart",
    "hf-diloco configs show deepspeed/zero2.json",
)
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="as `hf-diloco configs ls` lists it")]) -> None:
    """Print one of the files."""
    typer.echo((SHIPPED / _file_of(name)).read_text(), nl=False)


@configs_app.command("copy")
@examples(
    "hf-diloco configs copy quickstart",
    "hf-diloco configs copy recipes/slowmo --to my-runs",
)
def copy(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="which; default: all")] = None,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; made if it is missing.")] = Path("configs"),
) -> None:
    """Copy run files, with the files that they name, to change them. Nothing is overwritten."""
    files = sorted({file for name in names for file in _with_named(_file_of(name))} if names else shipped_files())
    for file in files:
        is_same = (to / file).is_file() and filecmp.cmp(SHIPPED / file, to / file, shallow=False)
        if (to / file).exists() and not is_same:
            raise ConfigError(
                f"{to / file} is there already, with other contents: choose another folder (--to FOLDER)"
            )
    try:
        for file in files:
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            if not (to / file).exists():  # otherwise it is equal, perhaps the same file
                shutil.copyfile(SHIPPED / file, to / file)
            typer.echo(to / file)
    except OSError as error:
        raise ConfigError(f"{to / file} cannot be written ({error.strerror}): give another folder (--to)") from None


def _headline(text: str) -> str:
    """Returns the first sentence of the comment at the top of a run file."""
    lines = itertools.takewhile(re.compile(r"# \S").match, text.splitlines())
    comment = " ".join(line.removeprefix("# ") for line in lines)
    return re.split(r"(?<=[a-z0-9)])\. ", comment)[0].rstrip(".:")


def _file_of(name: str) -> str:
    """Returns the path in `configs` of the file that a user names; raises `ConfigError` if there is none."""
    files = shipped_files()
    for file in (name, f"{name}.yaml"):
        if file in files:
            return file
    hint = nearest(name, shipped_names())
    raise ConfigError(f"{name}: no such file comes with hf-diloco{hint}; `hf-diloco configs ls` lists them")


def _with_named(file: str) -> list[str]:
    """Returns a file and the files of the package that it names, such as its DeepSpeed configuration."""
    from hf_diloco.apps.common.load import kind_of
    from hf_diloco.apps.common.paths import get_at
    from hf_diloco.apps.common.yaml_file import read_yaml

    if file.removesuffix(".yaml") not in shipped_names():
        return [file]
    path = SHIPPED / file
    values, settings = read_yaml(path)[0], kind_of(path).files
    texts = [get_at(values, setting) for setting in (*settings.paths, *settings.hub_ids_or_paths)]
    named = [(path.parent / text).resolve() for text in texts if isinstance(text, str)]
    return [file, *(other.relative_to(SHIPPED).as_posix() for other in named if other.is_file())]
