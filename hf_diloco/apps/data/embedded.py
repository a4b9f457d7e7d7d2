"""The embedded text: English that comes with every Python, so that a first run downloads nothing.

It consists of the language reference's topics and the standard library's docstrings, about 2 MB of prose. It is
deterministic for one version of Python, but differs slightly between versions; islands notice this when they compare
their tokenizers. Parsing takes seconds, so the result is cached in the user's cache folder, under a name that changes
with the sources.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hf_diloco.errors import ConfigError
from hf_diloco.utils.files import write_whole

MIN_CHARACTERS = 100

# Not prose, not in every installation, or (site-packages) not part of Python.
_LEFT_OUT = {
    "__pycache__", "_pyrepl", "dist-packages", "distutils", "ensurepip", "idlelib", "lib2to3", "site-packages", "test",
    "tests", "tkinter", "turtledemo", "turtle.py", "venv",
}  # fmt: skip

_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*)`")  # :func:`~os.path.join`
_UNDERLINE = re.compile(r"^\s*([=*~^\-#+.])\1{2,}\s*$")
_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.)( |$)")


def embedded_documents() -> list[str]:
    """Returns the documents, ordered by the version of Python alone; raises `ConfigError` without its sources."""
    kept = list(_documents(_standard_library(), _cache_folder()))
    if len(kept) < 500:
        raise ConfigError(
            f"data.source: embedded: found {len(kept)} documents in {_standard_library()}: this Python comes without "
            "the sources of its standard library; use source files or hub"
        )
    return kept


def cached_documents(folder: Path, cache: Path | None) -> tuple[str, ...]:
    """Returns the documents of the Python sources below `folder`, and of the language reference.

    Creates the folder `cache` if missing; parses the sources again if the file there is corrupt or cannot be written.
    """
    if cache is None:
        return _parse(folder)
    file = cache / f"embedded-{_fingerprint(folder)}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept and isinstance(kept, list) and all(isinstance(text, str) for text in kept):
            return tuple(kept)
    documents = _parse(folder)
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(documents), durable=False)
    return documents


_documents = functools.cache(cached_documents)  # used by tokenizer and data


def _cache_folder() -> Path | None:
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf-diloco"
    return None


def _fingerprint(folder: Path) -> str:
    """Returns a hash of the version of Python, the parsed files' names, sizes and times, and this module."""
    digest = hashlib.sha256(f"{sys.version}\0".encode() + Path(__file__).read_bytes())
    for path in _sources(folder):
        state = path.stat()
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _parse(folder: Path) -> tuple[str, ...]:
    documents = dict.fromkeys(clean(text) for text in [*_topics(), *_docstrings(folder)])
    return tuple(text for text in documents if len(text) >= MIN_CHARACTERS)


def clean(text: str) -> str:
    """Removes reStructuredText's roles and underlines, and interactive examples."""
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
    """Yields all docstrings of the modules below a folder, without importing them."""
    for path in _sources(folder):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node, clean=False) or ""


def _sources(folder: Path) -> list[Path]:
    """Returns Python's own modules below a folder, in an order that depends only on their names."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(parent, name) for name in files if name.endswith(".py") and name not in _LEFT_OUT]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
