"""Files that a run file names: made absolute, globs expanded, missing ones reported before anything starts."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_diloco.errors import ConfigError
from hf_diloco.lm.yaml_file import KeyPath, nearest_line

FILES: tuple[KeyPath, ...] = (("deepspeed",), ("accelerate",), ("diloco", "key_file"))
HUB_ID_OR_FILES: tuple[KeyPath, ...] = (("model", "path"), ("tokenizer", "path"), ("data", "path"))
GLOBS: tuple[KeyPath, ...] = (("data", "files"), ("data", "eval_files"))


def resolve_paths(values: dict[str, Any], folders: Sequence[Path], origins: Mapping[KeyPath, str]) -> None:
    """Makes the files named in a run file absolute, in place; values of a wrong type are left to the schema.

    Args:
        values: the run file's content.
        folders: where to look, the first match wins.
        origins: the place of each setting, put before an error's text.

    Raises:
        ConfigError: when a file does not exist, or a glob matches none.
    """
    for path in (*FILES, *HUB_ID_OR_FILES):
        text = _get(values, path)
        if isinstance(text, str):
            may_be_hub_id = path in HUB_ID_OR_FILES and not _looks_local(text)
            found = _find(text, folders)
            if found is None and not may_be_hub_id:
                raise ConfigError(f"{_at(origins, path)}{'.'.join(path)}: no file {text!r} in {_names(folders)}")
            _put(values, path, found or text)
    for path in GLOBS:
        patterns = _get(values, path)
        if isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns):
            _put(values, path, [file for pattern in patterns for file in _expand(pattern, folders, path, origins)])


def _expand(pattern: str, folders: Sequence[Path], path: KeyPath, origins: Mapping[KeyPath, str]) -> list[str]:
    if "://" in pattern:
        return [pattern]
    for folder in folders:
        files = sorted(glob.glob(str(folder / Path(pattern).expanduser()), recursive=True))
        if files:
            return [str(Path(file).resolve()) for file in files]
    raise ConfigError(f"{_at(origins, path)}{'.'.join(path)}: no file matches {pattern!r} in {_names(folders)}")


def _find(text: str, folders: Sequence[Path]) -> str | None:
    for folder in folders:
        candidate = folder / Path(text).expanduser()
        if candidate.exists():
            return str(candidate.resolve())
    return None


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith(".json") or text.count("/") > 1


def _names(folders: Sequence[Path]) -> str:
    return " or ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))


def _at(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    return nearest_line(origins, path) or ""


def _get(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value
