"""Small values by key in a run's log, sealed like all records, for communication of islands and nodes outside rounds.

links/KEY.json      how the participants of a direct exchange connect, where islands come and go
values/KEY.json     with fixed membership, and for nodes; see `store.tcp_store`
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
from hf_diloco.store.long_poll import Watch, looking_once
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES, MEETING, NO_RUN, VALUES, Seal
from hf_diloco.utils.clock import REAL

LINKS = "links/"
_MAX_ATTEMPTS = 100


class BytesRecord(Record):
    """The value of one key, in base64; None if it was removed."""

    value: str | None


class ValueStore:
    """The values of one run. Every method raises `StoreError` if the store does not answer.

    A value that cannot be authenticated, because an outsider wrote it, counts as absent and is replaced. `create` and
    `add` need a store that can `replace`.

    Args:
        folder: where the values lie in the log.
        is_hosted: one of the run's own processes hosts the store, at a port that may later be another run's: reads
            then raise `StoreError` once the store there is that of another run.
    """

    def __init__(self, log: RunLog, folder: str = VALUES, is_hosted: bool = False) -> None:
        self.log = log
        self._folder = folder
        self._markers = [MEETING] if is_hosted else []

    @classmethod
    def in_memory(cls) -> Self:
        """Makes a store that only this process sees and that lives as long as this object."""
        name = secrets.token_hex(16)
        store = ObjectStore(f"memory://{name}")
        forget_memory(name)
        return cls(RunLog(store, Seal(b"", name)))

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value, and replaces an existing one."""
        self.log.put(self._path(key), _record(value))

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key; None if it has none."""
        return self.find_all([key]).get(key)

    def find_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Returns the values of the keys that have one, with a single request."""
        if not keys:
            return {}
        paths = {self._path(key): key for key in keys}
        with looking_once(self.log.store, (), [*paths, *self._markers]):
            self._check_run()
            records = {path: self.log.read_or_refuse(path, BytesRecord) for path in paths}
        return {paths[path]: value for path, record in records.items() if (value := _value(record)) is not None}

    def wait(
        self, keys: Sequence[str], seconds: float, should_give_up: Callable[[], bool] = lambda: False
    ) -> dict[str, bytes]:
        """Waits until all keys have values, the time is over, or `should_give_up()`; returns what `find_all` does."""
        begun = REAL.now()
        watch = Watch(self.log.store, (), REAL, paths=[*map(self._path, keys), *self._markers])
        while True:
            found: dict[str, bytes] = watch.ask(lambda: self.find_all(keys))[0]
            if len(found) == len(set(keys)) or REAL.now() - begun >= seconds or should_give_up():
                return found

    def news(self, prefix: str) -> Callable[[], object]:
        """Returns a function that waits until something below a prefix is written after its last call, at most half a
        second. Its first call returns at once."""
        return Watch(self.log.store, [f"{self._folder}{prefix}"], REAL).ask

    def create(self, key: str, value: str | bytes) -> bytes:
        """Writes a value if the key has none; returns the value it has now."""
        path, record = self._path(key), _record(value)
        try:
            if (found := _value(self.log.decide(path, record))) is not None:
                return found
        except ForgedError as error:
            self.log.refuse(path, error)
        return self._change(key, lambda found: _bytes(value) if found is None else found)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at 0; returns the sum. Its value is sealed, so outsiders cannot forge it."""
        if not amount:
            return _count(self.find(key))
        # makes the bytes unique: of two writers with the same sum only one succeeds, the other retries
        own = secrets.token_hex(8).encode()
        return _count(self._change(key, lambda found: b"%d %s" % (_count(found) + amount, own)))

    def remove(self, key: str) -> None:
        """Records the removal, so that `create` and `add` do not mistake it for an outsider's deletion."""
        self.log.put(self._path(key), BytesRecord(value=None))

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Replaces a value by `change(value)`; returns the new value."""
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

    def _check_run(self) -> None:
        if self._markers and run_at(self.log.store, self.log.seal) not in (None, "", self.log.seal.run_id):
            raise StoreError("another run has begun at its port")

    def _path(self, key: str) -> str:
        return f"{self._folder}{key}.json"


def run_at(store: ObjectStore, seal: Seal) -> str | None:
    """Returns the run that a store at tcp:// names; None if it names none yet, "" if the key of `seal` is another."""
    found = store.get(MEETING, MAX_RECORD_BYTES)
    if found is None:
        return None
    try:
        return str(seal.of(NO_RUN).open(MEETING, found).get("run"))
    except ForgedError:
        return ""


def _record(value: str | bytes) -> BytesRecord:
    return BytesRecord(value=base64.b64encode(_bytes(value)).decode())


def _value(record: BytesRecord | None) -> bytes | None:
    try:
        return base64.b64decode(record.value, validate=True) if record and record.value is not None else None
    except ValueError:
        return None


def _count(value: bytes | None) -> int:
    """Parses a counter; a value that is not a number counts as 0."""
    found = re.match(rb"\d{1,18}(?: |\Z)", value or b"")
    return int(found[0]) if found else 0


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
