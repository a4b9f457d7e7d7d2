"""How Gloo tells its addresses to the other ends of a lane, and to nobody else; see `meeting`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from hf_diloco.errors import DiLoCoError, IslandLostError
from hf_diloco.transport.transfers import Deadline


class GlooAddresses(Store):
    """As much of a store as Gloo needs to tell its addresses. Any number of threads may use it.

    Args:
        tell: sends a value to all other ends.
        deadline: until when values are waited for.
    """

    def __init__(self, tell: Callable[[str, bytes], None], deadline: Deadline) -> None:
        super().__init__()
        self._tell = tell
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._num_heard: dict[int, int] = {}
        self._failure: DiLoCoError | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns once all keys are there; raises `IslandLostError` if they do not come."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or wanted <= self._values.keys(), self._deadline.remaining().total_seconds()
            )
        if not wanted <= self._values.keys():
            raise self._failure or IslandLostError("the others did not all say where Gloo listens")

    def check(self, keys: Sequence[str]) -> bool:
        return set(keys) <= self._values.keys()

    def hear(self, peer: int, message: bytes) -> None:
        """Takes what another end tells; raises `ValueError` if that makes no sense."""
        try:
            key, value = json.loads(message)
            with self._changed:
                self._values.setdefault(str(key), bytes.fromhex(value))
                self._num_heard[peer] = self.num_heard(peer) + 1
                self._changed.notify_all()
        except (TypeError, RecursionError):
            raise ValueError(f"no address: {message[:80]!r}") from None

    def num_heard(self, peer: int) -> int:
        """How many values an end has told."""
        return self._num_heard.get(peer, 0)

    def fail(self, error: DiLoCoError) -> None:
        """Nothing more comes: whoever waits is told so."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
