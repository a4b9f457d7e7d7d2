"""Folders import in one direction, which docs/architecture.md states."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT

PAGE = ROOT / "docs" / "architecture.md"
MODULES = sorted((ROOT / "hf_diloco").rglob("*.py"))


def ranks() -> dict[str, int]:
    """The folders of the page's table, each with the number of its row."""
    table = PAGE.read_text().partition("## Folders")[2].partition("## Where")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    return {folder: row for row, cell in enumerate(rows) for folder in re.findall(r"`([\w.]+)`", cell)}


def folder_of(module: str, known: dict[str, int]) -> str:
    """The folder of the page that a module is in, as "methods.gossip" or "store"."""
    parts = module.split(".")[1:]
    return next((found for count in (2, 1) if (found := ".".join(parts[:count])) in known), "")


def imports_of(path: Path, at_once: bool = False) -> Iterator[str]:
    """What one of the package's files imports, except for the type checker; `at_once`: when it is itself imported."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(below)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for below in ast.walk(node)
    }
    later = {
        id(below)
        for node in ast.walk(tree)
        if at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for below in ast.walk(node)
    }
    skipped = for_types | later
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import) and id(node) not in skipped:
            yield from (name.name for name in node.names)


def test_the_page_names_every_folder_once() -> None:
    folders = {path.relative_to(ROOT / "hf_diloco").parts[0].removesuffix(".py") for path in MODULES}
    assert {folder.partition(".")[0] for folder in ranks()} == folders - {"__init__", "templates"}


@pytest.mark.parametrize("folder", sorted(ranks()))
def test_a_folder_imports_only_what_stands_above_it(folder: str) -> None:
    known = ranks()
    wrong = []
    for path in MODULES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if folder_of(module, known) == folder:
            named = [name for name in imports_of(path) if name.startswith("hf_diloco.") and folder_of(name, known)]
            wrong += [f"{module} imports {name}" for name in named if known[folder_of(name, known)] > known[folder]]
    assert not wrong


def test_no_import_circle() -> None:
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES
    }
    graph = {
        module: {name if name in names else name.rpartition(".")[0] for name in imports_of(path, at_once=True)}
        & names.keys()
        for module, path in names.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " imports ".join([*way[way.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module] - {module}):
                visit(other, (*way, module))
            done.add(module)

    for module in names:
        visit(module, ())


def test_no_file_has_more_than_400_lines() -> None:
    """What grows beyond that holds two ideas: it becomes two files."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert not {path: length for path, length in lengths.items() if length > 400}
