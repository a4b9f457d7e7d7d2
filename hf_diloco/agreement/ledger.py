"""The islands' common record of what was decided, kept in a store that all of them reach.

Every entry is a small JSON record under a key that is written once. A round has four kinds:

    round/R/arrived/I   island I has done its inner steps and waits: its weight, its state's hash
    round/R/plan        "go" once all have arrived, or "late I", "gone I", "leaves I", "finished I": whoever writes
                        first decides
    round/R/vote/I      island I holds the average (with its hash), or why it does not
    round/R/held/H/I    island I holds the average of hash H: who holds the same need not read its vote
    round/R/outcome     "commit", "abort" or "again": whoever writes first decides, all others read it

After "again" (the averages differ, or a transfer came damaged) all take the round once more, under `round/R~1`, and
then `round/R~2`.

The store may be far away. What a round asks of it is asked for all islands at once: with many of them it takes as many
round trips as with two.

`plan` and `outcome` rest on the store's *create if absent*, so a round never half-happens: an island that gives up
waiting writes "abort", and if "commit" was there first, reads that and commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch.distributed import Store

from hf_diloco.agreement.patience import call_within
from hf_diloco.clock import REAL, Clock
from hf_diloco.errors import DuplicateIslandError, IslandLostError, RendezvousError, StopRequested
from hf_diloco.waiting import Wait, WaitNotes

Record = dict[str, Any]
T = TypeVar("T")

MAX_RECORD_BYTES = 4 << 20
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.001, 0.1  # a wait is seen to end within a tenth of its length
ANSWER_SECONDS = 60.0
"""After so long without an answer the store counts as lost: a machine that has stopped closes no connection."""
LOOK_SECONDS = 0.5
"""How often a wait looks for broken connections; what is broken twice running, and still silent, is gone."""
GO, LATE, GONE, LEAVES, FINISHED = "go", "late", "gone", "leaves", "finished"
COMMIT, AGAIN = "commit", "again"
MAX_TRIES = 3
"""Of one round whose averages differ or come damaged."""


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
    """

    def __init__(
        self,
        store: Store,
        island: int,
        num_islands: int,
        should_stop: Callable[[], bool] = lambda: False,
        find_broken: Callable[[], Collection[int]] = tuple,
        where: str | None = None,
        clock: Clock = REAL,
    ) -> None:
        self._store = store
        self.island = island
        self.num_islands = num_islands
        self._should_stop = should_stop
        self._find_broken = find_broken
        self._where = where
        self._clock = clock
        self._notes = WaitNotes(island, clock=clock)
        self._is_lost = False
        self._tries: dict[int, int] = {}

    def claim(self) -> None:
        """Takes this island's number.

        Raises:
            DuplicateIslandError: another process has it.
        """
        if self._guard(lambda: self._store.add(f"claim/{self.island}", 1)) > 1:
            raise DuplicateIslandError(
                f"another process has already joined this run as island {self.island}: give every island its own "
                "number (island, --island or HF_DILOCO_ISLAND)"
            )

    def share(self, topic: str, record: Mapping[str, Any], timeout: float, interruptible: bool = True) -> list[Record]:
        """Posts this island's record under `topic` and returns those of all islands, in order.

        Raises:
            IslandLostError: some island posted none within `timeout` seconds; names them.
            StopRequested: this island was asked to stop meanwhile.
        """
        self._post(f"{topic}/{self.island}", record)
        keys = [f"{topic}/{island}" for island in range(self.num_islands)]
        wait = self._notes.begin(timeout, where=self._where)
        missing = self._await(keys, timeout, wait, interruptible)
        if missing:
            raise IslandLostError(f"islands {missing} are missing after {timeout:g} s", missing)
        return self._read(keys)

    def arrive(self, round_number: int, record: Mapping[str, Any], timeout: float) -> list[Record]:
        """Announces that this island is ready for the round; returns all islands' records once all are.

        Raises:
            IslandLostError: an island did not arrive within `timeout` seconds, is gone, or has left the run.
            StopRequested: this island was asked to stop before all had arrived.
        """
        topic = self._topic(round_number)
        self._post(f"{topic}/arrived/{self.island}", record)
        keys = [f"{topic}/arrived/{island}" for island in range(self.num_islands)]
        watch = _Watch(self._find_broken, self._clock)
        wait = self._notes.begin(timeout, f"round {round_number}")
        try:
            missing = self._await(keys, timeout, wait, unless=[[f"{topic}/plan"]], watch=watch)
        except StopRequested:
            if self._decide(f"{topic}/plan", f"{LEAVES} {self.island}") != GO:
                raise
            # All had arrived: it is too late to leave.
            missing = self._await(keys, timeout, wait, interruptible=False, watch=watch)
        missing = missing or []
        kind = GONE if watch.gone.intersection(missing) else LATE
        plan = self._decide(f"{topic}/plan", " ".join([kind, *map(str, missing)]) if missing else GO)
        if plan != GO:
            raise self._no_round(round_number, plan, timeout)
        return self._read(keys)

    def _no_round(self, round_number: int, plan: str, timeout: float) -> IslandLostError:
        kind, *numbers = plan.split() or [""]
        islands = [int(number) for number in numbers if number.isdecimal()]
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
        If all voted and their digests differ, or one did not get its average and says `again`, the round is aborted
        for all to take it once more, at most `MAX_TRIES` times in all: `tries` then goes up.
        """
        topic = self._topic(round_number)
        held = [f"{topic}/held/{vote['digest']}/{island}" for island in range(self.num_islands)]
        if vote["ok"]:  # before the vote: whose vote is there has said what it holds
            self._guard(lambda: self._store.set(held[self.island], ""))
        self._post(f"{topic}/vote/{self.island}", vote)
        agreed = vote["ok"] and self._await_agreement(round_number, held, timeout)
        if agreed and self._decide(f"{topic}/outcome", COMMIT) == COMMIT:
            return True, {str(island): dict(vote) for island in range(self.num_islands)}
        votes = self._votes(topic)
        is_vain = vote.get("again", False) if not vote["ok"] else len(votes) == self.num_islands
        may_repeat = is_vain and self.tries(round_number) + 1 < MAX_TRIES
        may_repeat = may_repeat and all(record.get("ok") or record.get("again") for record in votes.values())
        outcome = self._decide(f"{topic}/outcome", AGAIN if may_repeat else f"abort by island {self.island}")
        if outcome == AGAIN:
            self._tries[round_number] = self.tries(round_number) + 1
        return outcome == COMMIT, votes

    def _await_agreement(self, round_number: int, held: list[str], timeout: float) -> bool:
        """Whether all islands hold the average that this one holds, and say so by the keys `held`."""
        topic = self._topic(round_number)
        wait = self._notes.begin(timeout, f"round {round_number}, vote")
        all_votes = [f"{topic}/vote/{island}" for island in range(self.num_islands)]
        missing = self._await(
            held,
            timeout,
            wait,
            interruptible=False,
            unless=[[f"{topic}/outcome"], all_votes],
            watch=_Watch(self._find_broken, self._clock),
        )
        return missing == [] or (missing is None and self._has(held))  # the last may have come in between

    def _votes(self, topic: str) -> dict[str, Record]:
        keys = {str(island): f"{topic}/vote/{island}" for island in range(self.num_islands)}
        there = {island: key for island, key in keys.items() if self._has([key])}
        return dict(zip(there, self._read(list(there.values())), strict=True))

    def tries(self, round_number: int) -> int:
        """How often a round was aborted for all to take it again."""
        return self._tries.get(round_number, 0)

    def _topic(self, round_number: int) -> str:
        number = self.tries(round_number)
        return f"round/{round_number}~{number}" if number else f"round/{round_number}"

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

    def _read(self, keys: list[str]) -> list[Record]:
        """Records that are there."""
        found = self._guard(lambda: self._store.multi_get(keys)) if keys else []
        return [self._parse(key, raw) for key, raw in zip(keys, found, strict=True)]

    @staticmethod
    def _parse(key: str, raw: bytes) -> Record:
        if len(raw) > MAX_RECORD_BYTES:
            raise RendezvousError(f"the record {key} has {len(raw)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):  # also what is nested without end
            record = None
        if not isinstance(record, dict):
            raise RendezvousError(f"the record {key} is not JSON of this package: is something else on the port?")
        return record

    def _await(
        self,
        keys: list[str],
        timeout: float,
        wait: Wait,
        interruptible: bool = True,
        unless: Collection[list[str]] = (),
        watch: _Watch | None = None,
    ) -> list[int] | None:
        """Waits until all `keys` are there; returns the islands whose key is absent at the deadline.

        Now and then it looks who is absent. Where `watch` sees that some of those are gone, it returns them before.
        Where all keys of one of `unless` are there, it returns None.
        """
        deadline, look_at = self._clock.now() + timeout, self._clock.now() + LOOK_SECONDS
        while True:
            if watch:
                watch.look()  # before the keys are read: what an island wrote before it went counts
            if interruptible and self._should_stop():
                raise StopRequested
            if self._has(keys):
                return []
            left = deadline - self._clock.now()
            if left <= 0 or self._clock.now() >= look_at or (watch and watch.gone):
                if any(map(self._has, unless)):
                    return None
                absent = [island for island, key in enumerate(keys) if not self._has([key])]
                gone = watch.gone.intersection(absent) if watch else set()
                if not absent or gone or left <= 0:
                    return sorted(gone) or absent
                wait.look(absent)
                look_at = self._clock.now() + LOOK_SECONDS
            waited = timeout - left
            self._clock.sleep(min(left, max(_MIN_POLL_SECONDS, min(_MAX_POLL_SECONDS, waited / 10))))

    def _has(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._guard(lambda: self._store.check(keys))

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            if self._is_lost:
                raise TimeoutError("no answer the last time")
            return call_within(ANSWER_SECONDS, call)
        except (RuntimeError, TimeoutError) as error:
            self._is_lost = isinstance(error, TimeoutError)
            reason = (str(error).strip().splitlines() or ["no answer"])[0]
            raise IslandLostError(
                f"the rendezvous, which island 0 keeps, does not answer ({reason}): island 0 has ended or cannot be "
                "reached. Start all islands again: the run resumes from the newest round that all hold",
                [0],
            ) from None


def _names(islands: list[int]) -> str:
    return ("island " if len(islands) == 1 else "islands ") + (", ".join(map(str, islands)) or "unknown")
