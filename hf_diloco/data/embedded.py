"""English text that comes with every Python: the language reference's topics and the standard library's docstrings.

About 2 MB of prose, so that a first run downloads nothing. Deterministic for one version of Python; it differs a
little between versions, which the islands notice when they compare their tokenizers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hf_diloco.errors import ConfigError

MIN_CHARACTERS = 100

# Not prose, not of every installation, or (site-packages) not Python's own.
_LEFT_OUT = {
    "__pycache__", "_pyrepl", "dist-packages", "distutils", "ensurepip", "idlelib", "lib2to3", "site-packages", "test",
    "tests", "tkinter", "turtledemo", "turtle.py", "venv",
}  # fmt: skip

_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*)`")  # :func:`~os.path.join`
_UNDERLINE = re.compile(r"^\s*([=*~^\-#+.])\1{2,}\s*$")
_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.)( |$)")


def embedded_documents() -> list[str]:
    """The documents, in an order that depends on nothing but the version of Python.

    Raises:
        ConfigError: when this Python comes without its sources.
    """
    kept = list(_documents(_standard_library()))
    if len(kept) < 500:
        raise ConfigError(
            f"data.source: embedded: found {len(kept)} documents in {_standard_library()}: this Python comes without "
            "the sources of its standard library; use source files or hub"
        )
    return kept


@functools.cache
def _documents(folder: Path) -> tuple[str, ...]:
    """Found once: parsing the standard library takes seconds, and tokenizer and data both want it."""
    documents = dict.fromkeys(clean(text) for text in [*_topics(), *_docstrings(folder)])
    return tuple(text for text in documents if len(text) >= MIN_CHARACTERS)


def clean(text: str) -> str:
    """Text without reStructuredText's roles and underlines, and without interactive examples."""
    lines = _ROLE.sub(r"\1", inspect.cleandoc(text)).replace("``", "").splitlines()
    kept = [line.rstrip() for line in lines if not _UNDERLINE.match(line) and not _DOCTEST.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    yield from (topics[name] for name in sorted(topics))


def _docstrings(folder: Path) -> Iterator[str]:
    """All docstrings of the modules below a folder, without importing any."""
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            yield from _docstrings_of(path.read_text(encoding="utf-8", errors="replace"))


def _docstrings_of(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
