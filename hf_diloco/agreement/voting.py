"""A round is committed by two islands that hold the same average, where there are two.

An island takes its own values from memory and not from the store, so it would not see that they are damaged there; and
one whose memory is bad would decide for all others if it came first. Two that agree have read every object between
them, and outvote a third.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from pydantic import Field

from hf_diloco.agreement.decisions import Decisions, is_outcome
from hf_diloco.agreement.log import Record, RunLog
from hf_diloco.agreement.members import Members
from hf_diloco.waiting import Wait

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.01, 0.5


class VoteRecord(Record):
    """An island holds an average.

    Attributes:
        island: which.
        mean: digest of the average.
    """

    island: int = Field(ge=0)
    mean: str


class Voting:
    """One island's part in votes; used by the island's leader only.

    Args:
        log: of the run.
        decisions: of the run.
        members: this island and the others.
        patience: seconds to wait for another island's vote.
        should_stop: polled while waiting; true ends the wait.
        clock: this machine's monotonic time in seconds.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        log: RunLog,
        decisions: Decisions,
        members: Members,
        patience: float,
        should_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._log = log
        self._decisions = decisions
        self._members = members
        self._patience = patience
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep

    def vote(
        self, folder: str, participants: Collection[int], mean: str, wait: Wait, is_unanimous: bool = False
    ) -> None:
        """Says that this island holds an average; returns when there is an outcome, or this island may write it.

        That is when another island agrees; when no participant is at it that could, and no two others agree on
        another average; or when the patience is over.

        Args:
            folder: of the attempt.
            participants: islands whose pseudo-gradients are in it.
            mean: digest of the average.
            wait: says for whom this waits.
            is_unanimous: wait for all who are at it.

        Raises:
            StoreError: the store does not answer.
        """
        own = self._members.island
        self._log.place(f"{folder}/votes/{own:05d}-{self._members.claim:06d}.json", VoteRecord(island=own, mean=mean))
        deadline = self._clock() + self._patience
        pause = _MIN_POLL_SECONDS
        while not self._is_settled(folder, participants, mean, is_unanimous):
            if self._should_stop() or self._clock() >= deadline:
                return
            wait.look(lambda: self._absent(folder, participants))
            self._sleep(pause)
            pause = min(_MAX_POLL_SECONDS, pause * 1.3)

    def _is_settled(self, folder: str, participants: Collection[int], mean: str, is_unanimous: bool) -> bool:
        paths = self._log.list(f"{folder}/")
        if any(map(is_outcome, paths)) and self._decisions.outcome(folder) is not None:
            return True
        votes = {}
        for path in paths:
            if path.startswith(f"{folder}/votes/"):
                found = self._log.read_or_refuse(path, VoteRecord)
                if found is not None and path.startswith(f"{folder}/votes/{found.island:05d}-"):
                    votes[found.island] = found.mean
        others = [other for island, other in votes.items() if island != self._members.island]
        at_it = {island for island, beat in self._members.alive().items() if beat.phase == "syncing"}
        have_all_voted = not (at_it & set(participants)) - votes.keys()
        if mean in others:
            return have_all_voted or not is_unanimous
        return have_all_voted and len(set(others)) == len(others)  # outvoted, it leaves the outcome to the others

    def _absent(self, folder: str, participants: Collection[int]) -> Collection[int]:
        """Participants without a vote; all others where each has voted, and another one than this island."""
        there = {
            path.removeprefix(f"{folder}/votes/").partition("-")[0] for path in self._log.list(f"{folder}/votes/")
        }
        others = set(participants) - {self._members.island}
        return {island for island in others if f"{island:05d}" not in there} or others
