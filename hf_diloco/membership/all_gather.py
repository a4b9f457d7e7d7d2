"""An all-gather of records through the store: each island posts one, and waits for those of all others.

    TOPIC/I     record of island I before or after rounds ("join", "state", "done")

The waits within a round use the same code; see `membership.unanimity`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import (
    CheckpointError,
    DivergedError,
    IslandLostError,
    RendezvousError,
    StopRequested,
    StoreError,
)
from hf_diloco.membership.round_records import OfferRecord, VoteRecord
from hf_diloco.store.failures import KEEPER_GONE
from hf_diloco.store.tcp_store import who_did_not_fit
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import Wait, WaitNotes

Said = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)
InRound = TypeVar("InRound", OfferRecord, VoteRecord)

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.001, 0.1  # polls add at most a tenth to a wait
LOOK_SECONDS = 0.5
"""Poll interval of the store for records that should arrive over links."""
_WATCH_SECONDS = 0.5
"""Interval of checks for broken links."""
RESUMES = "the run resumes from the newest round that all hold"


class Links(Protocol):
    """Carries messages among the leaders, and detects lost ones; see `hf_diloco.transport.base.Exchange`."""

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool: ...

    def messages(self) -> dict[int, bytes]: ...

    def find_broken(self) -> Collection[int]: ...


class _Watch:
    """Checks periodically for broken connections; an island whose link is broken in two checks in a row is gone."""

    def __init__(self, links: Sequence[Links], clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._broken: set[int] = set()
        self._next_at = clock.now() + _WATCH_SECONDS
        self.gone: set[int] = set()

    def look(self) -> set[int]:
        if self._clock.now() >= self._next_at:
            before, self._broken = self._broken, {island for one in self._links for island in one.find_broken()}
            self.gone = before & self._broken
            self._next_at = self._clock.now() + _WATCH_SECONDS
        return self.gone


@dataclass(eq=False, repr=False)
class AllGather:
    """One island's part in the all-gather; used by the island's leader only.

    Attributes:
        should_stop: polled while waiting; true makes a wait end with `StopRequested`.
        where: the rendezvous, for log messages.
        news: event that is set when a message may have arrived.
        is_lost: the store has failed to answer once, and is not used any more.
    """

    store: ValueStore
    island: int
    num_islands: int
    should_stop: Callable[[], bool] = lambda: False
    where: str | None = None
    clock: Clock = REAL

    def __post_init__(self) -> None:
        self.notes = WaitNotes(self.island, clock=self.clock)
        self.news = self.clock.event()
        self.is_lost = False
        self._has_met = False

    def share(
        self,
        topic: str,
        record: Mapping[str, Any],
        timeout: float,
        interruptible: bool = True,
        absent: Collection[int] = (),
    ) -> list[Said]:
        """Posts this island's record under `topic` and returns those of all islands, in order.

        Does not wait for the islands in `absent`, and returns an empty record for them.

        Raises:
            IslandLostError: islands posted no record within `timeout` seconds; names them.
            StopRequested: this island was asked to stop meanwhile.
        """

        def read(absent: Collection[int]) -> dict[int, Said]:
            raw = self.store.find_all([f"{topic}/{island}" for island in absent])
            return {island: parse(key, raw[key]) for island in absent if (key := f"{topic}/{island}") in raw}

        found: dict[int, Said] = {island: {} for island in absent}  # its own is read back from the store
        why = partial(who_did_not_fit, self.store.log.store)
        wait = self.notes.begin(timeout, where=self.where, why=(lambda: "") if self._has_met else why)
        self.guard(lambda: self.store.set(f"{topic}/{self.island}", json.dumps(dict(record))))
        missing, _ = self.collect(found, read, timeout, wait, interruptible)
        if missing:
            raise IslandLostError(f"islands {missing} are missing after {timeout:g} s", missing)
        self._has_met = True
        return [found[island] for island in range(self.num_islands)]

    def tell(self, links: Links, topic: str, record: BaseModel) -> bool:
        """Sends an island's record over links, for `hear`; returns False if these carry nothing."""
        message = json.dumps({"topic": topic, "record": record.model_dump()}).encode()
        return links.send_message(message, self.news.set)

    def collect(
        self,
        found: dict[int, T],
        look: Callable[[Collection[int]], Mapping[int, T] | None],
        timeout: float,
        wait: Wait,
        interruptible: bool = True,
        hear: Callable[[], Mapping[int, T]] | None = None,
        links: Sequence[Links] = (),
    ) -> tuple[list[int], list[int]]:
        """Waits for a record of every island; returns the islands without one, and those of them that are gone.

        Args:
            found: known records, by island; new ones are added to it.
            look: reads the records of some islands from the store; returns None to end the wait.
            timeout: in seconds.
            interruptible: whether `should_stop` ends the wait.
            hear: returns the records received over links, if these carry them; the store is then read less often.
            links: detect islands that are gone; the wait ends if one of these has no record.

        Raises:
            StopRequested: this island was asked to stop before all records were there.
        """
        begun, watch = self.clock.now(), _Watch(links, self.clock)
        look_at = begun + LOOK_SECONDS * bool(hear)
        while True:
            gone = watch.look()  # before reading: a record that an island sent before it was lost counts
            found |= hear() if hear else {}
            absent = self._absent(found)
            waited = self.clock.now() - begun
            if absent and (waited >= timeout or begun + waited >= look_at or gone.intersection(absent)):
                said = self.guard(partial(look, absent))
                found |= said or {}
                absent = self._absent(found)
                if said is None or waited >= timeout or gone.intersection(absent):
                    return absent, sorted(gone.intersection(absent))
                look_at = self.clock.now() + (LOOK_SECONDS if hear else _pause(waited))
            if not absent:
                return [], []
            if interruptible and self.should_stop():
                raise StopRequested
            wait.look(absent)
            if hear:
                self.news.wait(min(timeout - waited, _MAX_POLL_SECONDS))
                self.news.clear()
            else:
                self.clock.sleep(min(timeout - waited, _pause(waited)))

    def _absent(self, found: Mapping[int, object]) -> list[int]:
        return [island for island in range(self.num_islands) if island not in found]

    def guard(self, call: Callable[[], T]) -> T:
        """Returns the result of a call to the store. After one failure it makes no further calls.

        Raises:
            IslandLostError: the store does not answer, or has failed before.
        """
        try:
            if self.is_lost:  # another timeout may take long
                raise StoreError("no answer the last time")
            return call()
        except StoreError as error:
            self.is_lost = True
            raise store_lost(error) from None


def _pause(waited: float) -> float:
    return min(_MAX_POLL_SECONDS, max(_MIN_POLL_SECONDS, waited / 10))


def parse(what: str, raw: bytes) -> Said:
    """Parses a record of an island.

    Raises:
        RendezvousError: it is not a JSON object.
    """
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):  # the latter for very deep nesting
        record = None
    if not isinstance(record, dict):
        raise RendezvousError(f"the record {what} is not JSON of this package: is something else on the port?")
    return record


def hear(links: Links, topic: str, kind: type[InRound]) -> dict[int, InRound]:
    """Returns the records received over links under a topic, by island. Ignores records in another island's name.

    Raises:
        RendezvousError: a message is invalid, or of another version of this package.
    """
    heard = {island: parse(f"{topic}/{island}", message) for island, message in links.messages().items() if message}
    said = {island: one.get("record") for island, one in heard.items() if one.get("topic") == topic}
    records = parse_some(kind, {island: one for island, one in said.items() if isinstance(one, dict)})
    return {island: record for island, record in records.items() if record.island == island}


def store_lost(error: Exception) -> IslandLostError:
    """Returns the error for a store that does not answer."""
    reason = (str(error).strip().splitlines() or ["no answer"])[0].removesuffix(f": {KEEPER_GONE}")
    return IslandLostError(
        f"the rendezvous, which island 0 keeps, does not answer ({reason}): island 0 has ended or cannot be reached. "
        f"Start all islands again: {RESUMES}",
        [0],
    )


# Records of islands of fixed membership before rounds. All islands see the same records, and reach the same verdict.


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointsRecord(_Record):
    """The rounds of which an island holds complete checkpoints, with the digests of their outer parameters."""

    rounds: dict[int, list[str]]


class SoundRecord(_Record):
    """Whether all files of an island's checkpoint to resume from are intact."""

    sound: bool


class LayoutRecord(_Record):
    """The layout of an island's masters: a digest of each rank's segments, and whether each rank holds all masters."""

    ranks: list[str] = Field(min_length=1)
    replicated: bool


class JoinRecord(_Record):
    """Where an island runs and what it trains.

    Attributes:
        host: its leader's host name.
        folder: the folder it writes to, on that host.
        fingerprint: facts that must be equal on all islands.
        layout: see `hf_diloco.inner.partition.layout_of`.
    """

    host: str
    folder: str
    fingerprint: dict[str, str | int | float | bool | None]
    layout: LayoutRecord


class StateRecord(_Record):
    """The state of an island: rounds completed, digest of its outer parameters, whether it is from a checkpoint."""

    round: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{1,64}$")
    resumed: bool


def parse_records(kind: type[R], raw: Sequence[dict[str, Any]]) -> list[R]:
    """Validates the records of all islands; see `parse_some`."""
    return list(parse_some(kind, dict(enumerate(raw))).values())


def parse_some(kind: type[R], raw: Mapping[int, dict[str, Any]]) -> dict[int, R]:
    """Validates the records of some islands, by number.

    Raises:
        RendezvousError: a record is not of this kind; names the island.
    """
    parsed = {}
    for island, record in raw.items():
        try:
            parsed[island] = kind.model_validate(record)
        except ValidationError as error:
            problem = error.errors()[0]
            raise RendezvousError(
                f"island {island} sent a {kind.__name__} that this version of hf_diloco does not understand "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}): install the same version on all islands"
            ) from None
    return parsed


def states_are_equal(states: Sequence[StateRecord]) -> bool:
    """Whether all islands hold the same outer parameters already; on a fresh start they need not.

    Raises:
        CheckpointError: they are at different rounds.
        DivergedError: they resume at the same round, but from different parameters.
    """
    if len({(state.round, state.resumed) for state in states}) > 1:
        standing = ", ".join(
            f"island {island}: {f'round {s.round} of a checkpoint' if s.resumed else 'a fresh start'}"
            for island, s in enumerate(states)
        )
        raise CheckpointError(
            f"the islands are not at the same round ({standing}): resume all from checkpoints of one round. "
            "common_checkpoint() of the callback or the loop finds them"
        )
    equal = len({state.digest for state in states}) == 1
    if states[0].resumed and not equal:
        digests = ", ".join(f"island {island}: {state.digest[:12]}" for island, state in enumerate(states))
        raise DivergedError(
            f"the islands' checkpoints of round {states[0].round} hold different outer parameters "
            f"({digests}): they belong to different runs, or a disk returned wrong data. common_checkpoint() of the "
            "callback or the loop finds those that go together"
        )
    return equal
