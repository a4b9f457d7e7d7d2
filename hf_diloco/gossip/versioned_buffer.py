"""A payload that one thread replaces now and then while others read it, none of whom waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Version:
    """A payload that was published once, and how many read it."""

    payload: torch.Tensor
    num_readers: int = 0


class VersionedBuffer:
    """A node's last payload. Readers keep the version that they began with; used memory is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: _Version | None = None
        self._spare: torch.Tensor | None = None
        self._num_bytes_read = 0

    def put(self, payload: torch.Tensor) -> None:
        """Copies the payload, and shows it in place of the last one. Waits for no reader."""
        with self._lock:
            buffer, self._spare = self._spare, None
        if buffer is None or buffer.numel() != payload.numel():
            buffer = torch.empty(payload.numel(), dtype=torch.uint8)
        buffer.copy_(payload)
        with self._lock:
            old, self._newest = self._newest, _Version(buffer)
            if old is not None and not old.num_readers:
                self._spare = old.payload

    @contextmanager
    def newest(self) -> Iterator[torch.Tensor | None]:
        """The last payload, which stays as it is inside; None if there is none."""
        with self._lock:
            version = self._newest
            if version is not None:
                version.num_readers += 1
        try:
            yield None if version is None else version.payload
        finally:
            with self._lock:
                if version is not None:
                    version.num_readers -= 1
                    if version is not self._newest and not version.num_readers:
                        self._spare = version.payload

    def count(self, num_bytes: int) -> None:
        """Notes that another node has taken so many bytes."""
        with self._lock:
            self._num_bytes_read += num_bytes

    def take_count(self) -> int:
        """Bytes that others have taken since the last call."""
        with self._lock:
            num_bytes, self._num_bytes_read = self._num_bytes_read, 0
        return num_bytes
