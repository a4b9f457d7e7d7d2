"""Small text files that are replaced whole: a reader, or a crash, sees the old contents or the new, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Replaces a text file (UTF-8).

    Args:
        path: the file; its folder exists.
        text: the new contents.
        durable: returns once they are on disk; without it, a machine that loses power may lose them.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    if durable:
        flush(temporary)
    os.replace(temporary, path)
    if durable:
        flush(path.parent)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Replaces a JSON file as `write_whole` does, and makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1) + "\n", durable)


def flush(path: Path) -> None:
    """Returns once a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
