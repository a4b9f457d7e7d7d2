"""Objects in this process's memory, for a store that lives only as long as the process that serves it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from hf_diloco.store.folder import Entry, Opened

MAX_BYTES = 256 << 20
"""Limit for all objects together, whoever writes them."""

_BYTES_BESIDE = 512
"""Charged per object beside its data and path, so that many small objects cannot exceed the limit."""


class MemoryFolder:
    """Like `Folder`, in memory; for use by one thread."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, datetime]] = {}
        self._num_bytes = 0

    def read(self, path: str, limit: int) -> bytes:
        data = self._get(path)
        if len(data) > limit:
            raise OverflowError(len(data))
        return data

    @contextmanager
    def opened(self, path: str) -> Iterator[Opened]:
        data = self._get(path)
        yield Opened(len(data), self._objects[path][1], lambda start, length: data[start : start + length])

    def find(self, prefix: str = "") -> list[Entry]:
        below = f"{prefix}/" if prefix else ""
        return [Entry(path, len(data), at) for path, (data, at) in self._objects.items() if path.startswith(below)]

    def create(self, path: str, data: bytes) -> None:
        if path in self._objects:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._put(path, data)

    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = False
    ) -> None:
        self._put(path, bytes(data))

    def assemble(self, path: str, pieces: Iterable[bytes]) -> None:
        self._put(path, b"".join(pieces))

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._num_bytes -= self._size(path)
            self._objects.pop(path, None)

    def clear(self) -> None:
        """Drops all objects."""
        self._objects.clear()
        self._num_bytes = 0

    def _get(self, path: str) -> bytes:
        if path not in self._objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._objects[path][0]

    def _put(self, path: str, data: bytes) -> None:
        more = _BYTES_BESIDE + len(path) + len(data) - self._size(path)
        if self._num_bytes + more > MAX_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self._num_bytes += more
        self._objects[path] = data, datetime.now(UTC)

    def _size(self, path: str) -> int:
        found = self._objects.get(path)
        return 0 if found is None else _BYTES_BESIDE + len(path) + len(found[0])
