"""Torch's key-value store, kept in the run's log: what Gloo asks for to connect processes, sealed like all records.

links/KEY.json      the bytes that one process has put there
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from hf_diloco.errors import IslandLostError
from hf_diloco.store.log import Record, RunLog

_MAX_BYTES = 1 << 16
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.01, 0.3


class BytesRecord(Record):
    """The value of one key, in base64."""

    value: str


class RecordStore(Store):
    """As much of a store as Gloo's connecting and `LossNotes` need.

    Args:
        log: of the run.
        patience: seconds that `wait` and `get` wait for a key.
        should_give_up: polled while waiting; true ends the wait as if the patience were over.
    """

    def __init__(self, log: RunLog, patience: float, should_give_up: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._log = log
        self._patience = patience
        self._should_give_up = should_give_up

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._log.put(_path(key), BytesRecord(value=base64.b64encode(data).decode()))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._find(key)
        if found is None:
            raise IslandLostError(f"{_path(key)} was written and can no longer be read")
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns once all keys are there.

        Raises:
            IslandLostError: they do not come; nobody is named, as keys name none.
        """
        deadline = time.monotonic() + self._patience
        pause = _MIN_POLL_SECONDS
        while not self.check(keys):
            if time.monotonic() >= deadline or self._should_give_up():
                raise IslandLostError(f"not all have come ({', '.join(keys)})")
            time.sleep(pause)
            pause = min(_MAX_POLL_SECONDS, pause * 1.5)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._find(key) is not None for key in keys)

    def _find(self, key: str) -> bytes | None:
        """The value of a key; what is not of this run counts as absent."""
        found = self._log.read_or_refuse(_path(key), BytesRecord, _MAX_BYTES)
        try:
            return base64.b64decode(found.value, validate=True) if found else None
        except ValueError:
            return None


def _path(key: str) -> str:
    return f"links/{key}.json"
