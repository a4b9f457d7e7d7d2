"""Decides rounds that need all islands: whether all are there, and whether the round happened.

Records and attempts are those of islands that come and go (`membership.quorum`), with these differences:

    offer     is also sent over the islands' open connections, which takes half a round trip; it is read from the
              store, which may be far away, only if a connection has failed
    plan      follows from the offers of all, so no island waits for it or reads it: island 0 writes it for tools that
              show the run
    vote      is sent like an offer, and gives the reason if an island holds no average
    outcome   "commit" takes equal votes of all. "abort" is written by the first island that sees that these will not
              come: an island is late, gone, leaves, has finished, or could not compute the average

An abort ends the run on all islands, and gives the reason. Only if all have voted, and their averages differ or
transfers were corrupt, do they repeat the round in its next attempt.

An island that has all offers proceeds, even if another leaves at that moment: then the exchange fails, and the outcome
gives the reason. A round never half-happens: an island that gives up waiting writes "abort", and if "commit" was there
first, it reads that and commits. An island must learn whether its outcome counts; with that, a round takes two round
trips, however many islands there are.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hf_diloco.errors import WAS_STOPPED, DiLoCoError, DivergedError, IslandLostError, PayloadError, StopRequested
from hf_diloco.membership.all_gather import RESUMES, AllGather, InRound, Links, hear
from hf_diloco.membership.decisions import Decisions, outcome_path, plan_path
from hf_diloco.membership.round_records import (
    ABSTENTION,
    Attempt,
    Digest,
    OfferRecord,
    OutcomeRecord,
    PlanRecord,
    VoteRecord,
    make_plan,
    offer_path,
    vote_path,
)
from hf_diloco.store.log import RunLog
from hf_diloco.store.long_poll import looking_once
from hf_diloco.utils.text import name_all, numbers, plural
from hf_diloco.utils.threads import call_behind

logger = logging.getLogger("hf_diloco")

MAX_TRIES = 3
"""Limit on the attempts of one round, if averages differ or transfers are corrupt."""
KEPT_ATTEMPTS = 64
"""Number of attempts whose plans and outcomes stay in the store, which is in island 0's memory."""

_OTHERS_GO_ON = (
    "and others have more steps to take: give all islands the same number of steps (max_steps, or as many turns of "
    "the loop), and let nothing end one of them alone"
)
_FAILED = "its training ended in an error, or was interrupted: its own output says more"


@dataclass(eq=False, repr=False)
class Unanimity:
    """One island's part in deciding rounds; used by the island's leader only.

    Attributes:
        all_gather: of all islands.
        patience: seconds to wait for all offers.
        vote_patience: seconds to wait for all votes.
        links: detect islands that are gone. The first link carries messages; without links, the store does. May be
            filled later.
        gone: islands that were lost, which no wait should include.
    """

    all_gather: AllGather
    log: RunLog
    patience: float
    vote_patience: float
    links: Sequence[Links] = ()

    def __post_init__(self) -> None:
        self._island = self.all_gather.island
        self._decisions = Decisions(self.log, self.all_gather.island, self.all_gather.clock)
        self.gone: set[int] = set()
        self._next = Attempt(0, 0)  # of a round that is repeated
        self._said: list[str] = []
        self._planned: deque[str] = deque()

    def current(self, round_number: int) -> Attempt:
        """Returns the next attempt of a round."""
        return self._next if self._next.round == round_number else Attempt(round_number, 0)

    def agree(self, round_number: int, offer: OfferRecord) -> Attempt:
        """Offers, and waits for the offers of all islands; returns the attempt with its plan and offers.

        Raises:
            IslandLostError: an island did not come in time, is gone, has left the run, or ends before others do.
            StopRequested: this island was asked to stop before it had all offers.
            DivergedError: the islands start the round from different outer parameters.
            ExchangeError: no island has a pseudo-gradient that counts.
        """
        attempt = self.current(round_number)
        try:
            offers, missing, gone = self._gather(attempt, offer, f"round {round_number}", self.patience, may_stop=True)
        except StopRequested:
            self.leave(round_number)
            raise
        if missing:
            raise self._end(self._give_up(attempt, gone or missing, self._why_not_here(round_number, missing, gone)))
        plan = self._plan(attempt, offers)
        attempt = replace(attempt, plan=plan, offers=tuple(offers[one.island] for one in plan.participants))
        self._tidy(attempt)
        return attempt

    def _why_not_here(self, round_number: int, missing: Collection[int], gone: Collection[int]) -> str:
        if gone:
            return f"{name_all(gone)} lost before round {round_number}: the connection broke"
        return (
            f"{name_all(missing)} did not reach round {round_number} within sync_timeout ({self.patience:g} s): if it "
            "is only slow, raise that, or give it less work between rounds"
        )

    def _plan(self, attempt: Attempt, offers: Mapping[int, OfferRecord]) -> PlanRecord:
        ended = [island for island, offer in sorted(offers.items()) if offer.is_last]
        if 0 < len(ended) < len(offers):  # the others would not average the further vectors
            raise IslandLostError(
                f"{name_all(ended)} ended with round {attempt.round}, {_OTHERS_GO_ON}; start all islands again: "
                f"{RESUMES}",
                ended,
            )
        if len({offer.state for offer in offers.values()}) > 1:
            states = ", ".join(f"island {island}: {offer.state[:12]}" for island, offer in sorted(offers.items()))
            raise DivergedError(
                f"before round {attempt.round} the islands hold different outer parameters ({states}): this should be "
                "impossible; suspect memory or a changed library, and resume from the last checkpoint"
            )
        plan = make_plan(attempt, 0, offers)
        for island, reason in plan.left_out.items():
            what = f"round {attempt.round}: the pseudo-gradient of island {island} is left out"
            logger.warning("%s (%s): the island continues from the others' average", what, reason)
        return plan

    def commit(self, attempt: Attempt, mean: Digest) -> OutcomeRecord:
        """Votes for an average, and returns the outcome: a commit, or an abort because the votes are split.

        Raises:
            IslandLostError: any other abort; an island could not compute the average, or is lost.
            StopRequested: the same, and this island was asked to stop.
        """
        outcome = self._vote(attempt, VoteRecord(island=self._island, mean=mean))
        if outcome.mean != mean and not outcome.is_split:
            raise self._end(outcome)
        return outcome

    def abort(self, attempt: Attempt, offer: str, reason: str) -> OutcomeRecord:
        """Votes that this island holds no average, with the reason; returns the outcome.

        Args:
            offer: path of the offer whose values were corrupt, so that the round may be repeated; "" for another
                reason.

        Raises:
            IslandLostError: another island had given up the round, or left; gives the reason.
            StopRequested: the same, and this island was asked to stop.
        """
        again = bool(offer) and attempt.number + 1 < MAX_TRIES
        outcome = self._vote(attempt, VoteRecord(island=self._island, mean=ABSTENTION, reason=reason, again=again))
        if outcome.lost and self._island not in outcome.lost:
            raise self._end(outcome)
        return outcome

    def _vote(self, attempt: Attempt, vote: VoteRecord) -> OutcomeRecord:
        patience = self.vote_patience if vote.mean or vote.again else 0.0
        votes, *_ = self._gather(attempt, vote, f"round {attempt.round}, vote", patience)
        outcome = self._decide(attempt, verdict(self._island, votes, self.all_gather.num_islands, attempt.round))
        if outcome.kind == "commit" or outcome.is_split:  # all have voted: nobody is lost
            self.gone.clear()
        if outcome.is_split:
            self._next = Attempt(attempt.round, attempt.number + 1)
        return outcome

    def leave(self, round_number: int, finished: bool = False, failed: bool = False) -> None:
        """Announces that this island takes no part in a round, so that no island waits for it.

        Args:
            round_number: the first round without it.
            finished: the island has taken all its steps.
            failed: the island ends because of an error, not because it was asked to stop.
        """
        reason = f"left the run before round {round_number}: {_FAILED if failed else WAS_STOPPED}"
        if finished:
            reason = f"ended after round {round_number - 1}, {_OTHERS_GO_ON}"
        self._give_up(self.current(round_number), [self._island], f"island {self._island} {reason}")

    def _give_up(self, attempt: Attempt, lost: Sequence[int], reason: str) -> OutcomeRecord:
        return self._decide(attempt, OutcomeRecord(by=self._island, kind="abort", lost=list(lost), reason=reason))

    def _decide(self, attempt: Attempt, wish: OutcomeRecord) -> OutcomeRecord:
        try:
            return self.all_gather.guard(partial(self._decisions.decide, attempt.path, wish))
        except PayloadError as damage:
            raise IslandLostError(f"{damage}; start all islands again: {RESUMES}") from None

    def _end(self, outcome: OutcomeRecord) -> DiLoCoError:
        """Returns the error for a round that is not repeated."""
        if outcome.lost and self.all_gather.should_stop():
            return StopRequested()
        reason = outcome.reason or f"island {outcome.by} says that all hold another average"
        return IslandLostError(f"{reason}; start all islands again: {RESUMES}", outcome.lost)

    # Exchanging records

    def _gather(
        self, attempt: Attempt, own: InRound, what: str, patience: float, may_stop: bool = False
    ) -> tuple[dict[int, InRound], list[int], list[int]]:
        """Sends a record to all islands, and waits for theirs, unless the attempt is decided before.

        If links carry the record, this does not wait for the store to take it: peers read it there only if a link
        fails.

        Returns:
            The records by island; the islands without one; and those of them that are gone.
        """
        path, kind = _path_of(attempt, own), type(own)
        folder = path.rpartition("/")[0]

        def look(absent: Collection[int]) -> dict[int, InRound] | None:
            with looking_once(self.log.store, [attempt.path]):
                records = self.log.read_all(self.log.list(f"{folder}/"), kind)
                said = {record.island: record for path, record in records.items() if path == _path_of(attempt, record)}
                is_over = not said.keys() >= set(absent) and self._decisions.outcome(attempt.path) is not None
            return None if is_over else said

        self._said.append(path)
        put = partial(self.all_gather.guard, partial(self.log.put, path, own))
        links = self.links[0] if self.links else None
        if links and self.all_gather.tell(links, folder, own):
            call_behind(put, IslandLostError)  # raised when the store is needed
        else:
            links = None
            put()
        wait = self.all_gather.notes.begin(patience, what)
        found, heard = {self._island: own}, partial(hear, links, folder, kind) if links else None
        missing, gone = self.all_gather.collect(found, look, patience, wait, may_stop, heard, self.links)
        self.gone.update(gone)
        return found, missing, gone

    def _tidy(self, attempt: Attempt) -> None:
        """Deletes this island's records of earlier attempts, because all islands have reached this one. Island 0,
        which keeps the store, also writes the plan, and deletes old decisions."""
        plan, gone, self._said = attempt.plan, self._said[:-1], self._said[-1:]
        if self._island == 0:
            self._planned.append(attempt.path)
            old = [self._planned.popleft()] if len(self._planned) > KEPT_ATTEMPTS else []
            gone += [path_of(one) for one in old for path_of in (plan_path, outcome_path)]

        def write() -> None:
            if plan and self._island == 0:
                self.log.put(plan_path(attempt.path), plan)
            self.log.store.delete(gone)

        call_behind(partial(self.all_gather.guard, write), IslandLostError)


def _path_of(attempt: Attempt, record: OfferRecord | VoteRecord) -> str:
    if isinstance(record, VoteRecord):
        return vote_path(attempt.path, record.island)
    return offer_path(attempt, record)


def verdict(by: int, votes: Mapping[int, VoteRecord], num_islands: int, round_number: int) -> OutcomeRecord:
    """Returns the outcome that follows from the votes, for island `by` to write."""
    abort = partial(OutcomeRecord, by=by, kind="abort")
    silent = [island for island in range(num_islands) if island not in votes]
    reasons = "; ".join(f"island {island}: {vote.reason}" for island, vote in sorted(votes.items()) if not vote.mean)
    if not silent and all(vote.mean or vote.again for vote in votes.values()):
        means = {vote.mean for vote in votes.values()}
        if len(means) == 1 and not reasons:
            return OutcomeRecord(by=by, kind="commit", mean=means.pop())
        return abort(is_split=True, reason=reasons or _differ(votes))
    cause = reasons or f"islands {silent} did not vote, being lost or late"
    return abort(lost=[] if reasons else silent, reason=f"round {round_number} was aborted; {cause}")


def _differ(votes: Mapping[int, VoteRecord]) -> str:
    """Describes how averages differ, and which islands differ from a majority."""
    usual, count = Counter(vote.mean for vote in votes.values()).most_common(1)[0]
    wrong = [island for island, vote in votes.items() if vote.mean != usual] if 2 * count > len(votes) else []
    of = f" of {plural('island', len(wrong))} {numbers(wrong)}" if wrong else ""
    means = ", ".join(f"island {island}: {vote.mean[:12]}" for island, vote in sorted(votes.items()))
    return f"the islands computed different averages ({means}): suspect memory{of}, or what differs between machines"
