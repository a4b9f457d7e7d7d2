"""A run's log as torch's key-value store: what Gloo asks for to connect processes, sealed like all records.

links/KEY.json      the bytes that one process has put there, where islands come and go
values/KEY.json     likewise, where membership is fixed, and of nodes; see `store.tcp_store`
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Self, TypeVar

from torch.distributed import DistStoreError, Store

from hf_diloco.errors import ForgedError, IslandLostError, StoreError
from hf_diloco.store.backends import forget_memory
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.question import Watch, looking_once
from hf_diloco.store.signing import MAX_RECORD_BYTES, VALUES, Seal
from hf_diloco.utils.clock import REAL

T = TypeVar("T")

_MAX_LINK_BYTES = 1 << 16
_MAX_ATTEMPTS = 100


class BytesRecord(Record):
    """The value of one key, in base64; None: there was one."""

    value: str | None


class RecordStore(Store):
    """As much of a store as Gloo's connecting and `LossNotes` need.

    Args:
        patience: seconds that `wait` and `get` wait for a key.
        should_give_up: polled while waiting; true ends the wait as if the patience were over.
    """

    _folder = "links/"
    _max_bytes = _MAX_LINK_BYTES

    def __init__(self, log: RunLog, patience: float, should_give_up: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.log = log
        self._patience = patience
        self._should_give_up = should_give_up

    def set(self, key: str, value: str | bytes) -> None:
        self.log.put(self._path(key), _record(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there; raises as `wait`."""
        if (value := self.find(key)) is None:
            self.wait([key])
            value = self.find(key)
        if value is None:
            raise IslandLostError(f"{key!r} was written and can no longer be read")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns once all keys are there.

        Raises:
            IslandLostError: they do not come; nobody is named, as keys name none.
        """
        if not self._await(keys, self._patience):
            raise IslandLostError(f"not all have come ({', '.join(keys)})")

    def check(self, keys: Sequence[str]) -> bool:
        return len(self.find_all(keys)) == len(set(keys))

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        return self.find_all([key]).get(key)

    def _await(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all keys are there before so many seconds are over."""
        begun = REAL.now()
        watch = Watch(self.log.store, (), REAL, paths=[self._path(key) for key in keys])
        while not watch.ask(lambda: self.check(keys))[0]:
            if REAL.now() - begun >= seconds or self._should_give_up():
                return False
        return True

    def find_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that are there, in one question; what is not of this run counts as absent."""
        if not keys:
            return {}
        paths = {self._path(key): key for key in keys}
        store = self.log.store
        sight = store.sights.current
        is_seen = sight is not None and all(map(sight.covers, paths))
        with nullcontext() if is_seen else looking_once(store, (), paths):
            records = {path: self.log.read_or_refuse(path, BytesRecord, self._max_bytes) for path in paths}
        return {paths[path]: value for path, record in records.items() if (value := _value(record)) is not None}

    def _path(self, key: str) -> str:
        return f"{self._folder}{key}.json"


class ValueStore(RecordStore):
    """All of a store that islands of fixed membership and nodes need; one of them keeps it.

    What cannot be read, as a stranger has written it, counts as absent, and is replaced.

    Args:
        log: of the run, in a store that can `replace`.
        patience: seconds that `wait` and `get` wait for a key.
        should_give_up: see `RecordStore`.

    Raises:
        DistStoreError: by each call: the store does not answer; or, by `wait` and `get`, a key does not come.
    """

    _folder = VALUES
    _max_bytes = MAX_RECORD_BYTES

    @classmethod
    def in_memory(cls) -> Self:
        """One of this process alone, and gone with this."""
        name = secrets.token_hex(16)
        store = ObjectStore(f"memory://{name}")
        forget_memory(name)
        return cls(RunLog(store, Seal(b"", name)), 60.0)

    def waiting(self, patience: float, should_give_up: Callable[[], bool]) -> Self:
        """The same store, for who waits in another way; see `RecordStore`."""
        return type(self)(self.log, patience, should_give_up)

    def news(self, prefix: str) -> Callable[[], None]:
        """What waits until something below a prefix is written after its last call, or half a second is over. The
        first call returns at once."""
        watch = Watch(self.log.store, [f"{self._folder}{prefix}"], REAL)

        def wait() -> None:
            self._ask(watch.ask)

        return wait

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: RecordStore.set(self, key, value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout is not None else self._patience
        if not self._ask(lambda: self._await(keys, seconds)):
            raise DistStoreError(f"not all have come ({', '.join(keys)})")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Creates a value; returns that which is there now. Nothing else is asked of it."""
        assert not expected
        path, record = self._path(key), _record(desired)

        def create() -> bytes:
            try:
                value = _value(self.log.decide(path, record))
                if value is not None:
                    return value
            except ForgedError as error:
                self.log.refuse(path, error)
            return self._change(key, lambda found: _bytes(desired) if found is None else found)

        return self._ask(create)

    def add(self, key: str, amount: int) -> int:
        """Counts. Unlike torch's, numbers are values as others are: a stranger cannot make one."""
        if not amount:
            return _count(self.find(key))
        own = secrets.token_hex(8).encode()  # of two who count to the same number, one must count on
        return _count(self._ask(lambda: self._change(key, lambda found: b"%d %s" % (_count(found) + amount, own))))

    def delete_key(self, key: str) -> bool:
        """Leaves word that it is gone: `compare_set` and `add` must not take it for what a stranger has deleted."""
        self._ask(lambda: self.log.put(self._path(key), BytesRecord(value=None)))
        return True

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Puts what `change` makes of a value in its place; returns that."""
        path = self._path(key)
        for _ in range(_MAX_ATTEMPTS):
            read = self.log.read_tagged(path, BytesRecord)
            found = _value(read[1]) if read else None
            wish = change(found)
            if wish == found:
                return wish
            record = _record(wish)
            if self.log.replace(path, read[0], record) if read else self.log.create(path, record):
                return wish
        raise StoreError(f"{path} is overwritten again and again: keep others away from the rendezvous")

    def find_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        return self._ask(lambda: RecordStore.find_all(self, keys))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreError as error:
            raise DistStoreError(str(error)) from None


def _record(value: str | bytes) -> BytesRecord:
    return BytesRecord(value=base64.b64encode(_bytes(value)).decode())


def _value(record: BytesRecord | None) -> bytes | None:
    try:
        return base64.b64decode(record.value, validate=True) if record and record.value is not None else None
    except ValueError:
        return None


def _count(value: bytes | None) -> int:
    """What is no number counts as absent, too."""
    found = re.match(rb"\d{1,18}(?: |\Z)", value or b"")
    return int(found[0]) if found else 0


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
