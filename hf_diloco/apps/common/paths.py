"""Resolves the files that a run file names: makes paths absolute, expands globs, and reports missing files."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_diloco.apps.common.yaml_file import KeyPath, nearest_line, set_at
from hf_diloco.errors import ConfigError


class NamedFiles(NamedTuple):
    """Settings that name files, by their place in the run file.

    Attributes:
        paths: files that must exist.
        patterns: paths with a placeholder for the island's number; checked once it is filled in.
        hub_ids_or_paths: a folder or file, or else an id on the Hub.
        globs: lists of patterns, each of which must match a file.
    """

    paths: tuple[KeyPath, ...] = ()
    patterns: tuple[KeyPath, ...] = ()
    hub_ids_or_paths: tuple[KeyPath, ...] = ()
    globs: tuple[KeyPath, ...] = ()


def resolve_paths(
    values: dict[str, Any], named: NamedFiles, folders: Sequence[Path], origins: Mapping[KeyPath, str]
) -> None:
    """Makes the paths in a run file absolute, in place. Skips values of a wrong type, which the schema rejects later.

    Looks in all `folders`; the first match wins. Raises `ConfigError` if a file does not exist, or a glob matches no
    file; `origins` has the place of each setting, for the message.
    """
    for path in (*named.paths, *named.hub_ids_or_paths):
        text = get_at(values, path)
        if isinstance(text, str):
            looks_local = not text or text[0] in "./~" or text.endswith(".json") or text.count("/") > 1
            found = _find(text, folders)
            if found is None and (looks_local or path not in named.hub_ids_or_paths):
                raise ConfigError(f"{_setting(origins, path)}: no file {text!r} in {_names(folders)}")
            set_at(values, path, found or text)
    for path in named.patterns:
        if isinstance(text := get_at(values, path), str) and text:
            set_at(values, path, _find(text, folders) or str(folders[0] / os.path.expanduser(text)))
    for path in named.globs:
        patterns = get_at(values, path)
        if isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns):
            set_at(values, path, [file for pattern in patterns for file in _expand(pattern, folders, path, origins)])


def _expand(pattern: str, folders: Sequence[Path], path: KeyPath, origins: Mapping[KeyPath, str]) -> list[str]:
    if "://" in pattern:
        return [pattern]
    given = Path(os.path.expanduser(pattern))
    for folder in folders:
        if (folder / given).is_file():  # the name itself may look like a pattern, such as a[1].txt
            return [str((folder / given).resolve())]
        matching = glob.glob(os.path.join(glob.escape(str(folder)), given), recursive=True)
        if files := sorted(file for file in matching if os.path.isfile(file)):
            return [str(Path(file).resolve()) for file in files]
    hint = f" (that is a folder: write {given / '*.jsonl'}, or the like)" if _find(pattern, folders) else ""
    raise ConfigError(f"{_setting(origins, path)}: no file matches {pattern!r} in {_names(folders)}{hint}")


def _find(text: str, folders: Sequence[Path]) -> str | None:
    for folder in folders if text else ():  # an empty text would name the folder itself
        candidate = os.path.join(folder, os.path.expanduser(text))
        if os.path.exists(candidate):
            return str(Path(candidate).resolve())
    return None


def _names(folders: Sequence[Path]) -> str:
    return " or ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))


def _setting(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    return f"{nearest_line(origins, path) or ''}{'.'.join(path)}"


def get_at(values: Any, path: KeyPath) -> Any:
    """Returns a nested value; None if it is missing."""
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values
