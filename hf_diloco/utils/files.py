"""Small text files that are replaced atomically: a reader, or a crash, sees the old contents or the new, never a part.

Also the errors that a full or failing disk causes.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_diloco.errors import CheckpointError

DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
PROGRESS_FILE = "progress.json"
STOP_FILE = "stop"
SUMMARY_FILE = "summary.json"
"""Files in an island's folder: a hash of its training data, its metrics, its progress, a request to stop, and the
summary at the end.
"""

_WRITE_FAILURE = re.compile(
    r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error|Parent directory .* does not"
)


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Replaces a text file (UTF-8) in a folder that exists. If `durable`, returns once it is on disk; otherwise a
    power failure may lose it."""
    # Not the process's number: islands in containers that share the folder often have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
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
    """Replaces a JSON file as `write_whole` does, and creates its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1) + "\n", durable)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if the file is absent or invalid."""
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
    """Replaces non-finite numbers by None, because JSON has none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def try_write_json(path: Path, values: Mapping[str, Any]) -> str:
    """Like `write_json`, for figures that training can do without; returns why the write failed, "" if it did not."""
    try:
        write_json(path, finite(values), durable=False)
    except OSError as error:
        return f"{path} cannot be written ({reason_of(error)})"
    return ""


def is_write_failure(error: BaseException) -> bool:
    """Whether a full or failing disk caused the error.

    Libraries in C++ and Rust have their own types for it: `SafetensorError`, torch's `RuntimeError` from its zip
    writer, a bare `Exception` of tokenizers.
    """
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and _WRITE_FAILURE.search(str(error)) is not None
    )


def reason_of(error: BaseException) -> str:
    """Returns why a write failed, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return text if "os error" in text else f"the disk does not take it: {text}"


@contextmanager
def telling(checkpoint: Path) -> Iterator[None]:
    """Raises `CheckpointError`, which ranks can send each other, if writing `checkpoint` fails on the disk."""
    try:
        yield
    except Exception as error:
        if not is_write_failure(error):
            raise
        raise CheckpointError(f"{checkpoint} cannot be written ({reason_of(error)})") from error
