"""`pytest -k WORD` imports only the test files in which some test has that word in its name: it starts in seconds.

The names come from the last collection, in pytest's cache: a file that has changed since, or is new, is always looked
at. A word that is in no name, or an expression with `not`, looks at all files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_KEY = "hf_diloco/names"
_CHOSEN: pytest.StashKey[set[str] | None] = pytest.StashKey()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files in which nothing matches `-k`."""
    if collection_path.suffix != ".py":
        return None
    if _CHOSEN not in config.stash:
        config.stash[_CHOSEN] = _left_out(config)
    left_out = config.stash[_CHOSEN]
    return True if left_out and _relative(collection_path, config) in left_out else None


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notes the names of all tests of all collected files."""
    cache = getattr(config, "cache", None)  # -p no:cacheprovider
    if cache is None or config.args_source.name == "ARGS":  # which may be some of a file's tests
        return
    names: dict[Path, set[str]] = {}
    for item in items:
        names.setdefault(item.path, set()).update(map(str.lower, (item.nodeid, *item.keywords)))
    index = cache.get(_KEY, {})
    before = dict(index)
    for path, found in names.items():
        index[_relative(path, config)] = [_state(path), "\n".join(sorted(found))]
    if index != before:
        cache.set(_KEY, index)


def _left_out(config: pytest.Config) -> set[str] | None:
    words = set(re.findall(r"[^\s()]+", config.option.keyword.lower())) - {"and", "or"}
    cache = getattr(config, "cache", None)
    if not words or "not" in words or cache is None:
        return None
    index = cache.get(_KEY, {})
    known = {name for name, (state, _) in index.items() if state == _state(config.rootpath / name)}
    without = {name for name in known if not any(word in index[name][1] for word in words)}
    return without if without < index.keys() else None


def _state(path: Path) -> list[int]:
    try:
        state = path.stat()
    except OSError:
        return []
    return [state.st_mtime_ns, state.st_size]


def _relative(path: Path, config: pytest.Config) -> str:
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else str(path)
