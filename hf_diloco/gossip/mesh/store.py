"""Small records that nodes of a mesh write for each other to the store, apart from the connections for vectors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from hf_diloco.errors import DiLoCoError, IslandLostError, StoreError
from hf_diloco.gossip.records import Record, pack_record, unpack_record
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.clock import REAL, Clock

logger = logging.getLogger("hf_diloco")

KEEPER = 0
"""The node whose process hosts the store."""

BROKEN = "its connection broke"
"""Why a node is lost that most likely still runs: the two connect again."""


def lost_key(node: int) -> str:
    """The key under which other nodes report that they have lost `node`."""
    return f"lost/{node}"


def greeting_key(node: int, start: int, peer: int) -> str:
    """The key under which `peer` confirms that it has seen this start of `node`."""
    return f"greet/{node}/{start}/{peer}"


def entry_prefix(node: int, start: int) -> str:
    """The prefix of the keys by which `node` and its neighbours agree on the step at which it enters."""
    return f"entry/{node}/{start}"


def company_key(node: int, start: int) -> str:
    """The key under which `node` lists the neighbours that it connects to after this start."""
    return f"{entry_prefix(node, start)}/company"


class Board:
    """Reads and writes small records in the store, which node 0 hosts; thread-safe.

    Args:
        store: shared by all nodes.
        name: of the mesh, unique in the store.
        clock: of the mesh's waits for nodes that say nothing.
    """

    def __init__(self, store: ValueStore, name: str, clock: Clock = REAL) -> None:
        self._store = store
        self._putting = threading.Lock()
        self._pending: dict[str, Record] = {}
        self._is_putting = False  # in a thread; one at a time, so that an older record never replaces a newer one
        self.name = name
        self.clock = clock

    def put(self, key: str, record: Record) -> None:
        """Writes a record under `key`; replaces an earlier one."""
        packed = pack_record(key, record).decode()
        with asking():
            self._store.set(self._path(key), packed)

    def put_later(self, key: str, record: Record) -> None:
        """Like `put`, without waiting for the store; of several records under one key the last one counts.

        A record that cannot be written is dropped.
        """
        with self._putting:
            self._pending[key] = record
            if self._is_putting:
                return
            with suppress(RuntimeError):  # no thread can be started now: the next call tries again
                threading.Thread(target=self._put_pending, name="hf-diloco-put", daemon=True).start()
                self._is_putting = True

    def _put_pending(self) -> None:
        while True:
            with self._putting:
                if not self._pending:
                    self._is_putting = False
                    return
                key = next(iter(self._pending))
                record = self._pending.pop(key)
            try:
                self.put(key, record)
            except DiLoCoError:  # calls that need the store report its loss
                pass
            except Exception:
                logger.exception("the record %r is not written", key)

    def put_first(self, key: str, record: Record, node: int = KEEPER) -> Record:
        """Writes a record under `key` unless there is one, written by `node`; returns the record that is there now."""
        packed = pack_record(key, record).decode()
        with asking():
            found = self._store.create(self._path(key), packed)
        return unpack_record(key, node, found)

    def read(self, key: str, node: int = KEEPER) -> Record | None:
        """Returns the record under `key`, written by `node`; None if there is none. Raises like `read_all`."""
        return self.read_all({node: key}).get(node)

    def read_all(self, keys: Mapping[int, str]) -> dict[int, Record]:
        """Reads the existing records among `keys`, each by the node that writes it, in one request.

        Raises:
            PayloadError: a value is not a valid record.
        """
        return {node: unpack_record(keys[node], node, packed) for node, packed in self._find(keys).items()}

    def has(self, key: str) -> bool:
        """Whether there is a record under `key`."""
        return bool(self.who_has({KEEPER: key}))

    def who_has(self, keys: Mapping[int, str]) -> Collection[int]:
        """Returns the nodes whose keys exist, in one request; see `read_all`."""
        return self._find(keys).keys()

    def remove(self, key: str) -> None:
        """Removes a record, if there is one."""
        with asking():
            self._store.remove(self._path(key))

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a shared counter that starts at 0; returns the sum."""
        with asking():
            return self._store.add(self._path(key), more)

    def await_all(
        self, keys: Mapping[int, str], seconds: float, meanwhile: Callable[[Collection[int]], None]
    ) -> dict[int, Record]:
        """Like `read_all`, but waits until all records exist, at most for `seconds`.

        Polls `meanwhile` with the missing nodes; an exception that it raises ends the wait.
        """
        deadline, await_news = self.clock.now() + seconds, self.news()
        while True:
            found = self.read_all(keys)
            missing = keys.keys() - found.keys()
            if not missing or self.clock.now() >= deadline:
                return found
            meanwhile(missing)
            await_news()

    def news(self) -> Callable[[], object]:
        """See `ValueStore.news`; for any record of the mesh."""
        return asking()(self._store.news(self.name))

    def _find(self, keys: Mapping[int, str]) -> dict[int, bytes]:
        paths = {node: self._path(key) for node, key in keys.items()}
        with asking():
            found = self._store.find_all(list(paths.values()))
        return {node: found[path] for node, path in paths.items() if path in found}

    def _path(self, key: str) -> str:
        return f"{self.name}/{key}"


@contextmanager
def asking() -> Iterator[None]:
    """Turns a `StoreError` inside into an `IslandLostError` of node 0, which hosts the store."""
    try:
        yield
    except StoreError:
        raise IslandLostError(
            f"the rendezvous does not answer: node {KEEPER}, which keeps it, is gone or cannot be reached. Start all "
            "nodes again from their checkpoints",
            [KEEPER],
        ) from None
