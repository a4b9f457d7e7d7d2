"""Small text files that are replaced whole: a reader, or a crash, sees the old contents or the new, never a part.

And what a disk that is full, or fails, says to those who write to it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_diloco.errors import CheckpointError

METRICS_FILE = "metrics.jsonl"
PROGRESS_FILE = "progress.json"
STOP_FILE = "stop"
SUMMARY_FILE = "summary.json"
"""What lies in an island's folder: its record, where it stands, a wish that it ends, and how it ended."""

_WRITE_FAILURE = re.compile(
    r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error|Parent directory .* does not"
)


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Replaces a text file (UTF-8) in a folder that exists.

    If `durable`, returns once it is on disk; else a machine that loses power may lose it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        if durable:
            flush(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Replaces a JSON file as `write_whole` does, and makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1) + "\n", durable)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def flush(path: Path) -> None:
    """Returns once a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has no numbers that are not finite: such a loss becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def try_write_json(path: Path, values: Mapping[str, Any]) -> str:
    """As `write_json`, for figures that training can do without; returns why they were not written, else nothing."""
    try:
        write_json(path, finite(values), durable=False)
    except OSError as error:
        return f"{path} cannot be written ({reason_of(error)})"
    return ""


def is_write_failure(error: BaseException) -> bool:
    """Whether a disk that is full, or fails, is behind it.

    Libraries in C++ and Rust have types of their own for it: `SafetensorError`, torch's `RuntimeError` from its zip
    writer, a bare `Exception` of tokenizers.
    """
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and _WRITE_FAILURE.search(str(error)) is not None
    )


def reason_of(error: BaseException) -> str:
    """Why something could not be written, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return text if "os error" in text else f"the disk does not take it: {text}"


@contextmanager
def telling(checkpoint: Path) -> Iterator[None]:
    """Raises `CheckpointError`, which ranks can tell each other, where the disk does not take `checkpoint`."""
    try:
        yield
    except Exception as error:
        if not is_write_failure(error):
            raise
        raise CheckpointError(f"{checkpoint} cannot be written ({reason_of(error)})") from error
