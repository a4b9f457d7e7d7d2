"""The run's log in an object store: small sealed JSON records, most of them written once and never changed.

    run.json                          what all islands share; the first island writes it
    start.json                        which snapshot the run starts from
    incarnations/I/N.json             the N-th process that ran as island I
    heartbeats/I/N.json               its heartbeat, overwritten every few seconds
    rounds/R/A/offers/I-N-S.json      island I's offer for attempt A of round R: the last one counts
    rounds/R/A/plan.json              who takes part
    rounds/R/A/votes/I.json           island I holds the average, or abstains
    rounds/R/A/outcome.json           whether the round is committed (outcome-2.json if that record is damaged)
    rounds/R/A/missing/I-N.json       island I misses the committed average, of a direct exchange
    rounds/R/A/revoked.json           committed, but nobody holds its average any more, of a direct exchange
    rounds/R/A/mean/rank-K.json       where one rank's part of the average is, of a direct exchange
    links/KEY.json                    how the participants of a direct exchange connect
    values/KEY.json                   values of islands with fixed membership, and of nodes, outside rounds
    snapshots/R/I-N/rank-K.json       where one rank's part of the outer state after round R is

Every decision rests on the store's *create if absent*: the first writer decides, and all others read its record.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import ForgedError, UnknownIdentityError
from hf_diloco.store.failures import TooLargeError, UnreadableError
from hf_diloco.store.long_poll import Awaited, Watch
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES, Seal
from hf_diloco.utils.clock import Clock
from hf_diloco.utils.threads import ask_together

logger = logging.getLogger("hf_diloco")

_QUESTIONS_AT_ONCE = 16


class Record(BaseModel):
    """A record of the log: refuses unknown keys, non-finite numbers and wrong types."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


Number = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A whole number in a record, below 2^53: exact as a float and in JSON."""

R = TypeVar("R", bound=Record)


class Refusals:
    """Islands that were refused, with the last reason, until they are taken; threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: dict[int, str] = {}

    def add(self, refused: Mapping[int, str]) -> None:
        with self._lock:
            self._refused.update(refused)

    def take(self) -> dict[int, str]:
        """Returns the islands that were added since the last call."""
        with self._lock:
            taken, self._refused = self._refused, {}
            return taken


class RunLog:
    """Reads and writes the records of one run; refuses those that `seal` does not open."""

    def __init__(self, store: ObjectStore, seal: Seal) -> None:
        self.store = store
        self.seal = seal
        self.refused: dict[str, str] = {}
        """Paths of ignored records that do not belong to this run, with the reason."""
        self.refused_islands: dict[int, str] = {}
        """Islands whose records were refused although they hold the run's key, with the last reason."""
        self.newly_refused = Refusals()
        """Those of `refused_islands` that nobody has taken yet."""

    def create(self, path: str, record: Record) -> bool:
        """Writes a record unless the path has one; returns whether the path now holds this record."""
        return self.store.create(path, self._wrap(path, record))

    def put(self, path: str, record: Record, is_lasting: bool = True) -> None:
        """Writes a record, and replaces an existing one; see `ObjectStore.put`."""
        self.store.put(path, self._wrap(path, record), None, is_lasting)

    def read(self, path: str, kind: type[R], is_of_now: bool = False) -> R | None:
        """Returns a record, None if absent. A record that is too large is not downloaded; see also `Seal.open`.

        Raises `ForgedError` if it was not written for this path with the run's key, or is not a record of this kind.
        """
        try:
            data = self.store.get(path, MAX_RECORD_BYTES)
        except (TooLargeError, UnreadableError) as error:
            raise ForgedError(str(error)) from None
        return None if data is None else self._open(path, kind, data, is_of_now)

    def _open(self, path: str, kind: type[R], data: bytes, is_of_now: bool = False) -> R:
        try:
            return kind.model_validate_json(json.dumps(self.seal.open(path, data, is_of_now)))
        except ValidationError as error:
            problem = error.errors()[0]
            raise ForgedError(
                f"{path} is no {kind.__name__} of this version of hf_diloco "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}): install the same version everywhere"
            ) from None

    def read_or_refuse(self, path: str, kind: type[R]) -> R | None:
        """Like `read`, but warns once about a record that does not belong to this run, and returns None for it."""
        try:
            return self.read(path, kind)
        except ForgedError as error:
            self.refuse(path, error)
            return None

    def read_tagged(self, path: str, kind: type[R]) -> tuple[str, R | None] | None:
        """Like `read_or_refuse`, with the tag that `replace` needs; None if there is no object."""
        found = self.store.get_tagged(path, MAX_RECORD_BYTES)
        if found is None:
            return None
        tag, data = found
        try:
            if data is None:
                raise ForgedError(f"{self.store.url}: {path} has more than the {MAX_RECORD_BYTES} bytes it may have")
            return tag, self._open(path, kind, data)
        except ForgedError as error:
            self.refuse(path, error)
            return tag, None

    def replace(self, path: str, tag: str, record: Record) -> bool:
        """Replaces the version that `read_tagged` returned; returns False if the object has changed since."""
        return self.store.replace(path, tag, self._wrap(path, record))

    def read_all(self, paths: Sequence[str], kind: type[R]) -> dict[str, R]:
        """Reads several records in parallel; returns those that exist and are valid, by path."""
        found: dict[str, R] = {}
        for start in range(0, len(paths), _QUESTIONS_AT_ONCE):
            part = paths[start : start + _QUESTIONS_AT_ONCE]
            calls = [partial(self.read_or_refuse, path, kind) for path in part]
            records = [call() for call in calls] if self.store.is_near else ask_together(*calls)
            found |= {path: record for path, record in zip(part, records, strict=True) if record is not None}
        return found

    def refuse(self, path: str, error: ForgedError) -> None:
        """Warns, once, that an object is ignored from now on."""
        if isinstance(error, UnknownIdentityError):
            self.refuse_island(error)
        if path not in self.refused:
            logger.warning("refused an object in the store: %s", error)
        self.refused[path] = str(error)

    def refuse_island(self, error: ForgedError) -> None:
        """Remembers the island in whose name a refused record came."""
        if error.island is not None:
            self.refused_islands[error.island] = str(error)
            self.newly_refused.add({error.island: str(error)})

    def watch(
        self,
        prefixes: Sequence[str],
        clock: Clock,
        path: str = "",
        record: Record | None = None,
        awaited: Awaited | None = None,
    ) -> Watch:
        """Returns a `Watch` for records below some prefixes; first does `place`, in the same request if possible."""
        if record is None:
            return Watch(self.store, prefixes, clock, awaited=awaited)
        if self.store.tells_changes:
            place, create = partial(self.place, path, record), {path: self._wrap(path, record)}
            return Watch(self.store, prefixes, clock, create, place, awaited)
        self.place(path, record)
        return Watch(self.store, prefixes, clock)

    def place(self, path: str, record: Record) -> None:
        """Writes a record that only this process writes, unless it is there; replaces an invalid one."""
        if not self.create(path, record) and self.read_or_refuse(path, type(record)) is None:
            self.put(path, record)

    def decide(self, path: str, record: R) -> R:
        """Creates a record if absent; returns the record that was written first. Raises as `read`."""
        wrapped = self._wrap(path, record)
        try:
            found = self.store.decide(path, wrapped, MAX_RECORD_BYTES)
        except (TooLargeError, UnreadableError) as error:
            raise ForgedError(str(error)) from None
        return record if found == wrapped else self._open(path, type(record), found)

    def list(self, prefix: str) -> list[str]:
        """Lists the paths under a prefix, sorted."""
        return [path for path, _ in self.store.list(prefix)]

    def _wrap(self, path: str, record: Record) -> bytes:
        return self.seal.wrap(path, record.model_dump(mode="json"))
