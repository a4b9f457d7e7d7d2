"""The islands' common record of what was decided, kept in a store that all of them reach.

Every entry is a small JSON record under a key that is written once. A round has four kinds:

    round/R/arrived/I   island I has done its inner steps and waits: its weight, its state's hash
    round/R/plan        absent where all arrive; else "late I", "gone I", "leaves I", "finished I": whoever writes
                        first decides
    round/R/vote/I      island I holds the average (with its hash), or why it does not
    round/R/outcome     "commit", "abort" or "again": whoever writes first decides, all others read it

After "again" (the averages differ, or a transfer came damaged) all take the round once more, under `round/R+1`, and
then `round/R+2`.

The store may be far away. So `arrived` and `vote` go over the islands' open connections as well, which takes half a
round trip each; they are read in the store only where a connection has failed. With `outcome`, of which an island must
know that its value counts, a round takes two round trips, however many islands there are.

An island that holds all arrivals goes on, though another may leave at that moment: then the exchange fails, and the
plan says why. `outcome` rests on the store's *create if absent*, so a round never half-happens: an island that gives
up waiting writes "abort", and if "commit" was there first, reads that and commits. "commit" takes the votes of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch.distributed import DistStoreError

from hf_diloco.errors import IslandLostError, RendezvousError, StopRequested
from hf_diloco.store.torch_store import ValueStore
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.threads import call_behind
from hf_diloco.utils.waiting import Wait, WaitNotes

Record = dict[str, Any]
T = TypeVar("T")

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.001, 0.1  # a wait is seen to end within a tenth of its length
LOOK_SECONDS = 0.5
"""How often a wait looks for broken connections; what is broken twice running, and still silent, is gone."""
LATE, GONE, LEAVES, FINISHED = "late", "gone", "leaves", "finished"
COMMIT, AGAIN = "commit", "again"
MAX_TRIES = 3
"""Of one round whose averages differ or come damaged."""


class Links(Protocol):
    """Carries messages among the leaders; see `hf_diloco.transport.base.Exchange`."""

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool: ...

    def messages(self) -> dict[int, bytes]: ...


class _Watch:
    """Looks now and then for broken connections while something is waited for."""

    def __init__(self, find_broken: Callable[[], Collection[int]], clock: Clock) -> None:
        self._find_broken = find_broken
        self._clock = clock
        self._broken: set[int] = set()
        self._next_at = clock.now() + LOOK_SECONDS
        self.gone: set[int] = set()

    def look(self) -> None:
        if self._clock.now() < self._next_at:
            return
        before, self._broken = self._broken, set(self._find_broken())
        self.gone = before & self._broken
        self._next_at = self._clock.now() + LOOK_SECONDS


class Ledger:
    """One island's view of the record; used by the island's leader only.

    Args:
        store: reaches all islands; keys are created once and never changed.
        island: this island's number.
        num_islands: islands in the run.
        should_stop: polled while waiting; true makes a wait end with `StopRequested`.
        find_broken: names islands whose connections have broken; a round does not wait for those.
        where: islands meet, for messages.
        clock: by which it waits.
        links: of which the first carries messages; may be filled later. Without one, the store carries all.

    Attributes:
        is_lost: the store has not answered, and is not asked any more.
    """

    def __init__(
        self,
        store: ValueStore,
        island: int,
        num_islands: int,
        should_stop: Callable[[], bool] = lambda: False,
        find_broken: Callable[[], Collection[int]] = tuple,
        where: str | None = None,
        clock: Clock = REAL,
        links: Sequence[Links] = (),
    ) -> None:
        self._store = store
        self.island = island
        self.num_islands = num_islands
        self._should_stop = should_stop
        self._find_broken = find_broken
        self._where = where
        self._clock = clock
        self._links = links
        self._news = clock.event()
        self._notes = WaitNotes(island, clock=clock)
        self.is_lost = False
        self._tries: dict[int, int] = {}

    def share(self, topic: str, record: Mapping[str, Any], timeout: float, interruptible: bool = True) -> list[Record]:
        """Posts this island's record under `topic` and returns those of all islands, in order.

        Raises:
            IslandLostError: some island posted none within `timeout` seconds; names them.
            StopRequested: this island was asked to stop meanwhile.
        """
        self._post(f"{topic}/{self.island}", record)
        wait = self._notes.begin(timeout, where=self._where)
        found = self._collect(topic, {self.island: dict(record)}, timeout, wait, interruptible)
        missing = self._absent(found)
        if missing:
            raise IslandLostError(f"islands {missing} are missing after {timeout:g} s", missing)
        return [found[island] for island in range(self.num_islands)]

    def arrive(self, round_number: int, record: Mapping[str, Any], timeout: float) -> list[Record]:
        """Announces that this island is ready for the round; returns all islands' records once all are.

        Raises:
            IslandLostError: an island did not arrive within `timeout` seconds, is gone, or has left the run.
            StopRequested: this island was asked to stop before it knew that all had arrived.
        """
        topic = self._topic(round_number)
        wait = self._notes.begin(timeout, f"round {round_number}")
        watch = _Watch(self._find_broken, self._clock)
        links = self._announce(f"{topic}/arrived", record)
        try:
            found = self._collect(
                f"{topic}/arrived", {self.island: dict(record)}, timeout, wait, True, links, f"{topic}/plan", watch
            )
        except StopRequested:
            self._decide(f"{topic}/plan", f"{LEAVES} {self.island}")
            raise
        missing = self._absent(found)
        if missing:
            kind = GONE if watch.gone.intersection(missing) else LATE
            missing = sorted(watch.gone.intersection(missing)) or missing
            plan = self._decide(f"{topic}/plan", " ".join([kind, *map(str, missing)]))
            raise self._no_round(round_number, plan, timeout)
        self._forget(round_number - 1)
        return [found[island] for island in range(self.num_islands)]

    def _forget(self, round_number: int) -> None:
        """Deletes this island's records of a round that all islands have behind them, as all have come to the next."""
        topics = [self._topic_of(round_number, number) for number in range(self.tries(round_number) + 1)]
        keys = [f"{topic}/{kind}/{self.island}" for topic in topics for kind in ("arrived", "vote")]
        if self.island == 0:
            keys += [f"{topic}/outcome" for topic in topics]
        call_behind(lambda: self._guard(lambda: self._store.forget(keys)), IslandLostError)

    def check_plan(self, round_number: int, timeout: float, silent: Collection[int] | None = None) -> None:
        """After a round that failed: whether an island had given it up while this one went on.

        Args:
            round_number: of the round.
            timeout: seconds for which all would have been waited for.
            silent: who had no vote; others that gave up did so later, and the round had failed already.

        Raises:
            IslandLostError: it had; says who, and why.
            StopRequested: it had, and this island was asked to stop as well.
        """
        key = f"{self._topic(round_number)}/plan"
        if not self._has(key):
            return
        plan = self._decide(key, LATE)
        if silent is not None and not set(_islands_of(plan)) <= set(silent):
            return
        if self._should_stop():
            raise StopRequested
        raise self._no_round(round_number, plan, timeout)

    def _no_round(self, round_number: int, plan: str, timeout: float) -> IslandLostError:
        kind, islands = (plan.split() or [""])[0], _islands_of(plan)
        again = "start all islands again: the run resumes from the newest round that all hold"
        if kind == LATE:
            return IslandLostError(
                f"{_names(islands)} did not reach round {round_number} within sync_timeout ({timeout:g} s). If it is "
                f"only slow, raise sync_timeout or give it fewer inner steps' worth of work; if it is gone, {again}",
                islands,
            )
        if kind == GONE:
            return IslandLostError(
                f"{_names(islands)} lost before round {round_number}: the connection broke; {again}", islands
            )
        if kind == FINISHED:
            return IslandLostError(
                f"{_names(islands)} ended after round {round_number - 1}, having taken all its steps, and this island "
                "has more to take: give all islands the same number of steps (max_steps, or as many turns of the "
                f"loop), and {again}",
                islands,
            )
        return IslandLostError(
            f"{_names(islands)} left the run before round {round_number}: it was asked to stop, or lost another "
            f"island; {again}",
            islands,
        )

    def settle(self, round_number: int, vote: Mapping[str, Any], timeout: float) -> tuple[bool, dict[str, Record]]:
        """Votes on the round and returns whether it was committed, with the votes seen, by island.

        A vote is a record with `ok` (bool) and `digest` (the average's). The round is committed if all islands
        voted `ok`, with one digest, in time. An island whose connection broke before it voted is not waited for.
        If all voted and their digests differ, or some did not get their average and say `again`, the round is aborted
        for all to take it once more, at most `MAX_TRIES` times in all: `tries` then goes up.
        """
        topic = self._topic(round_number)
        wait = self._notes.begin(timeout, f"round {round_number}, vote")
        watch = _Watch(self._find_broken, self._clock)
        links = self._announce(f"{topic}/vote", vote)
        votes = {self.island: dict(vote)}
        if not _is_failure(vote):
            votes = self._collect(f"{topic}/vote", votes, timeout, wait, False, links, f"{topic}/outcome", watch)
        outcome = self._decide(f"{topic}/outcome", self._verdict(round_number, votes))
        if outcome == AGAIN:
            self._tries[round_number] = self.tries(round_number) + 1
        elif outcome != COMMIT:
            votes |= self._read(f"{topic}/vote", self._absent(votes))
        return outcome == COMMIT, {str(island): votes[island] for island in sorted(votes)}

    def _verdict(self, round_number: int, votes: Mapping[int, Record]) -> str:
        """The outcome that this island is for."""
        if len(votes) == self.num_islands and not any(map(_is_failure, votes.values())):
            digests = {str(vote.get("digest")) for vote in votes.values()}
            if all(vote.get("ok") is True for vote in votes.values()) and len(digests) == 1:
                return COMMIT
            if self.tries(round_number) + 1 < MAX_TRIES:
                return AGAIN
        return f"abort by island {self.island}"

    def tries(self, round_number: int) -> int:
        """How often a round was aborted for all to take it again."""
        return self._tries.get(round_number, 0)

    def _topic(self, round_number: int) -> str:
        return self._topic_of(round_number, self.tries(round_number))

    @staticmethod
    def _topic_of(round_number: int, number: int) -> str:
        return f"round/{round_number}+{number}" if number else f"round/{round_number}"

    def leave(self, next_round: int, finished: bool = False) -> None:
        """Tells the others that this island takes no part in `next_round`, so that nobody waits for it.

        Args:
            next_round: the first round without it.
            finished: it has done all that it was to do.
        """
        self._decide(f"{self._topic(next_round)}/plan", f"{FINISHED if finished else LEAVES} {self.island}")

    def _decide(self, key: str, value: str) -> str:
        """Create if absent: returns the value that was written first."""
        return self._guard(lambda: self._store.compare_set(key, "", value)).decode(errors="replace")

    def _post(self, key: str, record: Mapping[str, Any]) -> None:
        self._guard(lambda: self._store.set(key, json.dumps(dict(record))))

    def _announce(self, topic: str, record: Mapping[str, Any]) -> Links | None:
        """Posts this island's record under `topic`; returns the links that carry it, and the others', as well.

        Nobody waits for the store to take what links carry: it is read there only where one of them fails.
        """
        key = f"{topic}/{self.island}"
        links = self._links[0] if self._links else None
        message = json.dumps({"topic": topic, "record": dict(record)}).encode()
        if links and links.send_message(message, self._news.set):
            call_behind(lambda: self._post(key, record), IslandLostError)  # which is met where the store is needed
            return links
        self._post(key, record)
        return None

    def _absent(self, found: Mapping[int, Record]) -> list[int]:
        return [island for island in range(self.num_islands) if island not in found]

    def _read(self, topic: str, islands: Sequence[int]) -> dict[int, Record]:
        """The records of those `islands` whose records are in the store."""
        keys = {f"{topic}/{island}": island for island in islands}
        found = self._guard(lambda: self._store.find_all(list(keys)))
        return {keys[key]: self._parse(key, raw) for key, raw in found.items()}

    def _hear(self, topic: str, links: Links) -> dict[int, Record]:
        """The records that have come over the links."""
        heard = {}
        for island, message in links.messages().items():
            said = self._parse(f"{topic}/{island}", message) if message else {}
            if said.get("topic") == topic and isinstance(said.get("record"), dict):
                heard[island] = said["record"]
        return heard

    @staticmethod
    def _parse(key: str, raw: bytes) -> Record:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):  # also what is nested without end
            record = None
        if not isinstance(record, dict):
            raise RendezvousError(f"the record {key} is not JSON of this package: is something else on the port?")
        return record

    def _collect(
        self,
        topic: str,
        found: dict[int, Record],
        timeout: float,
        wait: Wait,
        interruptible: bool = True,
        links: Links | None = None,
        unless: str | None = None,
        watch: _Watch | None = None,
    ) -> dict[int, Record]:
        """Waits for the records of all islands under `topic`; returns `found` and those that have come in time.

        Now and then it looks in the store what is there: it ends where `unless` is, or where `watch` sees that some
        of the absent are gone.
        """
        begun = self._clock.now()
        look_at = begun + LOOK_SECONDS
        while True:
            if watch:
                watch.look()  # before records are read: what an island said before it went counts
            found |= self._hear(topic, links) if links else self._read(topic, range(self.num_islands))
            absent = self._absent(found)
            if not absent:
                return found
            if interruptible and self._should_stop():
                raise StopRequested
            waited = self._clock.now() - begun
            if waited >= timeout or begun + waited >= look_at or (watch and watch.gone):
                if unless and self._has(unless):
                    return found
                found |= self._read(topic, absent)
                absent = self._absent(found)
                if not absent or waited >= timeout or (watch and watch.gone.intersection(absent)):
                    return found
                wait.look(absent)
                look_at = self._clock.now() + LOOK_SECONDS
            self._pause(waited, timeout - waited, links)

    def _pause(self, waited: float, left: float, links: Links | None) -> None:
        if links:
            self._news.wait(max(0.0, min(left, _MAX_POLL_SECONDS)))
            self._news.clear()
        else:
            self._clock.sleep(max(0.0, min(left, max(_MIN_POLL_SECONDS, min(_MAX_POLL_SECONDS, waited / 10)))))

    def _has(self, key: str) -> bool:
        return self._guard(lambda: self._store.check([key]))

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            if self.is_lost:  # it may take long to say so again
                raise DistStoreError("no answer the last time")
            return call()
        except DistStoreError as error:
            self.is_lost = True
            raise store_lost(error) from None


def store_lost(error: Exception) -> IslandLostError:
    """The error for a store that does not answer."""
    reason = (str(error).strip().splitlines() or ["no answer"])[0]
    return IslandLostError(
        f"the rendezvous, which island 0 keeps, does not answer ({reason}): island 0 has ended or cannot be reached. "
        "Start all islands again: the run resumes from the newest round that all hold",
        [0],
    )


def _is_failure(vote: Mapping[str, Any]) -> bool:
    """Whether an island cannot have the round's average, not even if the round is taken again."""
    return vote.get("ok") is not True and vote.get("again") is not True


def _islands_of(plan: str) -> list[int]:
    """Whom a plan names."""
    return [int(number) for number in plan.split()[1:] if number.isdecimal()]


def _names(islands: list[int]) -> str:
    return ("island " if len(islands) == 1 else "islands ") + (", ".join(map(str, islands)) or "unknown")
