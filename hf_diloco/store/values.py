"""Small values by key in a run's log, sealed like all records: what islands and nodes tell each other beside rounds.

links/KEY.json      how the participants of a direct exchange find each other, where islands come and go
values/KEY.json     where membership is fixed, and of nodes; see `store.tcp_store`
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Self

from hf_diloco.errors import ForgedError, StoreError
from hf_diloco.store.backends import forget_memory
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.question import Watch, looking_once
from hf_diloco.store.signing import VALUES, Seal
from hf_diloco.utils.clock import REAL

LINKS = "links/"
_MAX_ATTEMPTS = 100


class BytesRecord(Record):
    """The value of one key, in base64; None: there was one."""

    value: str | None


class ValueStore:
    """The values of one run. All of it raises `StoreError` where the store does not answer.

    What cannot be read, as a stranger has written it, counts as absent, and is replaced.

    Args:
        log: of the run. `create` and `add` need a store that can `replace`.
        folder: where the values lie.
    """

    def __init__(self, log: RunLog, folder: str = VALUES) -> None:
        self.log = log
        self._folder = folder

    @classmethod
    def in_memory(cls) -> Self:
        """One of this process alone, and gone with this."""
        name = secrets.token_hex(16)
        store = ObjectStore(f"memory://{name}")
        forget_memory(name)
        return cls(RunLog(store, Seal(b"", name)))

    def set(self, key: str, value: str | bytes) -> None:
        """Puts a value in place of what is there."""
        self.log.put(self._path(key), _record(value))

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        return self.find_all([key]).get(key)

    def find_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that are there, in one question."""
        if not keys:
            return {}
        paths = {self._path(key): key for key in keys}
        with looking_once(self.log.store, (), paths):
            records = {path: self.log.read_or_refuse(path, BytesRecord) for path in paths}
        return {paths[path]: value for path, record in records.items() if (value := _value(record)) is not None}

    def wait(
        self, keys: Sequence[str], seconds: float, should_give_up: Callable[[], bool] = lambda: False
    ) -> dict[str, bytes]:
        """As `find_all`, once all are there, or so many seconds are over.

        Args:
            should_give_up: polled while waiting; true ends it.
        """
        begun = REAL.now()
        watch = Watch(self.log.store, (), REAL, paths=[self._path(key) for key in keys])
        while True:
            found: dict[str, bytes] = watch.ask(lambda: self.find_all(keys))[0]
            if len(found) == len(set(keys)) or REAL.now() - begun >= seconds or should_give_up():
                return found

    def news(self, prefix: str) -> Callable[[], object]:
        """What waits until something below a prefix is written after its last call, or half a second is over. The
        first call returns at once."""
        return Watch(self.log.store, [f"{self._folder}{prefix}"], REAL).ask

    def create(self, key: str, value: str | bytes) -> bytes:
        """Puts a value there unless there is one; returns that which is there now."""
        path, record = self._path(key), _record(value)
        try:
            if (found := _value(self.log.decide(path, record))) is not None:
                return found
        except ForgedError as error:
            self.log.refuse(path, error)
        return self._change(key, lambda found: _bytes(value) if found is None else found)

    def add(self, key: str, amount: int) -> int:
        """Counts from 0, by a value like others, which a stranger cannot make; returns the sum."""
        if not amount:
            return _count(self.find(key))
        own = secrets.token_hex(8).encode()  # of two who count to the same number, one must count on
        return _count(self._change(key, lambda found: b"%d %s" % (_count(found) + amount, own)))

    def remove(self, key: str) -> None:
        """Leaves word that it is gone: `create` and `add` must not take it for what a stranger has deleted."""
        self.log.put(self._path(key), BytesRecord(value=None))

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

    def _path(self, key: str) -> str:
        return f"{self._folder}{key}.json"


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
