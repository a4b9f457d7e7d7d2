"""What nodes of a mesh leave for each other in the store: small, and off the way that their vectors take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.records import Record, pack_record, unpack_record
from hf_diloco.utils.timeouts import call_within
from hf_diloco.utils.waiting import Wait

T = TypeVar("T")

STORE_SECONDS = 30.0
"""What the store may take to answer before it counts as gone. It does within a round trip, but a process may stand
still for seconds, as while it asks a slow name service; one that ended is noticed at once."""

POLL_SECONDS = 0.02

KEEPER = 0
"""The node whose process keeps the store."""


class SharedStore(Store):
    """One client of a store for several threads, in which Gloo connects.

    Who waits for a key of torch's TCP store keeps all others from using the same client; here waiting is asking now
    and then. A client for each thread would do as well, but each asks the name service for the address of the other
    side, and where that is slow takes seconds, in which the whole process stands still.

    Args:
        store: what is shared.
        patience: seconds to wait for a key.
        meanwhile: called now and then while a key is waited for; what it raises ends that.
    """

    def __init__(self, store: Store, patience: float, meanwhile: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._store = store
        self._patience = patience
        self._meanwhile = meanwhile

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes too, whatever torch's stubs say

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns once all keys are there.

        Raises:
            IslandLostError: they do not come; nobody is named, as keys name none.
        """
        deadline = time.monotonic() + self._patience
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise IslandLostError(f"not all have come ({', '.join(keys)})")
            if self._meanwhile:
                self._meanwhile()
            time.sleep(POLL_SECONDS)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))


class Board:
    """Access to small records in the store, which node 0 keeps; for any number of threads.

    A store whose machine is gone keeps whoever asks it waiting for ever, so every call here has a limit.

    Args:
        store: reaches all nodes.
        name: of the mesh, unique in the store.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name = name

    def put(self, key: str, record: Record) -> None:
        """Shows a record under `key`, in place of an earlier one."""
        packed = pack_record(key, record).decode()
        self._ask(lambda: self._store.set(self._path(key), packed))

    def put_first(self, key: str, record: Record) -> None:
        """Shows a record under `key` unless there is one; of several who try, one succeeds."""
        packed = pack_record(key, record).decode()
        self._ask(lambda: self._store.compare_set(self._path(key), "", packed))

    def read(self, key: str, node: int = KEEPER) -> Record | None:
        """The record under `key`; None if there is none.

        Args:
            key: see `put`.
            node: who wrote it, for messages.

        Raises:
            PayloadError: what is there is no record.
        """

        def get() -> bytes | None:
            path = self._path(key)
            return self._store.get(path) if self._store.check([path]) else None

        packed = self._ask(get)
        return None if packed is None else unpack_record(key, node, packed)

    def has(self, key: str) -> bool:
        """Whether there is a record under `key`."""
        path = self._path(key)
        return self._ask(lambda: self._store.check([path]))

    def remove(self, key: str) -> None:
        """Takes a record away, if there is one."""
        self._ask(lambda: self._store.delete_key(self._path(key)))

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a number, from 0, which all can; returns the sum."""
        path = self._path(key)

        def add() -> int:
            if more == 0 and not self._store.check([path]):
                return 0  # to add nothing would make it, and `has` find it
            return self._store.add(path, more)

        return self._ask(add)

    def await_all(self, keys: dict[int, str], seconds: float, wait: Wait | None = None) -> Collection[int]:
        """Waits until every node's key is there; returns the nodes whose key is not after `seconds`.

        Args:
            keys: by node.
            seconds: to wait.
            wait: says who is missing.
        """
        missing = dict(keys)
        deadline = time.monotonic() + seconds
        while True:
            for node, key in list(missing.items()):
                if self.has(key):
                    del missing[node]
            if not missing or time.monotonic() >= deadline:
                return missing.keys()
            if wait:
                wait.look(missing)
            time.sleep(POLL_SECONDS)

    def _path(self, key: str) -> str:
        return f"{self.name}/{key}"

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call_within(STORE_SECONDS, call)
        except (RuntimeError, TimeoutError):
            raise store_is_gone() from None


def store_is_gone() -> IslandLostError:
    """The error for a store that does not answer."""
    return IslandLostError(
        f"the rendezvous does not answer: node {KEEPER}, which keeps it, is gone or cannot be reached. Start all "
        "nodes again from their checkpoints",
        [KEEPER],
    )
