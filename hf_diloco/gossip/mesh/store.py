"""What nodes of a mesh leave for each other in the store: small, and off the way that their vectors take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from torch.distributed import DistStoreError

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.records import Record, pack_record, unpack_record
from hf_diloco.store.torch_store import ValueStore
from hf_diloco.utils.waiting import Wait

T = TypeVar("T")

POLL_SECONDS = 0.02

KEEPER = 0
"""The node whose process keeps the store."""


class Board:
    """Access to small records in the store, which node 0 keeps; for any number of threads.

    Args:
        store: reaches all nodes.
        name: of the mesh, unique in the store.
    """

    def __init__(self, store: ValueStore, name: str) -> None:
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
        packed = self._ask(lambda: self._store.find(self._path(key)))
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
        return self._ask(lambda: self._store.add(self._path(key), more))

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
            return call()
        except DistStoreError:
            raise store_is_gone() from None


def store_is_gone() -> IslandLostError:
    """The error for a store that does not answer."""
    return IslandLostError(
        f"the rendezvous does not answer: node {KEEPER}, which keeps it, is gone or cannot be reached. Start all "
        "nodes again from their checkpoints",
        [KEEPER],
    )
