"""Rounds that need all islands: whether all are there, and whether the round happened.

Records and attempts are those of islands that come and go (`membership.quorum`). What "all" makes of them:

    offer     goes over the islands' open connections as well, which takes half a round trip; in the store, which may
              be far away, it is read only where a connection has failed
    plan      follows from the offers of all, so nobody waits for it or reads it: island 0 writes it for people
    vote      travels as an offer does, and says why an island holds no average
    outcome   "commit" takes equal votes of all. "abort" is written by whoever first sees that these will not come:
              an island is late, gone, leaves, has finished, or could not make the average

An abort ends the run on all islands, and says why. Only where all have voted, and their averages differ or values came
damaged, do they take the round again, in its next attempt.

An island that holds all offers goes on, though another may leave at that moment: then the exchange fails, and the
outcome says why. A round never half-happens: whoever gives up waiting writes "abort", and if "commit" was there first,
reads that and commits. An island must know that its outcome counts: with that, a round takes two round trips, however
many islands there are.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hf_diloco.errors import DiLoCoError, DivergedError, IslandLostError, PayloadError, StopRequested
from hf_diloco.membership.all_gather import RESUMES, AllGather, InRound, Links, hear, make_message
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
from hf_diloco.store.question import looking_once
from hf_diloco.utils.text import name_all, numbers, plural
from hf_diloco.utils.threads import call_behind

logger = logging.getLogger("hf_diloco")

MAX_TRIES = 3
"""Attempts of one round whose averages differ or come damaged."""
KEPT_ATTEMPTS = 64
"""Of which plans and outcomes stay in the store, which is in island 0's memory."""

_OTHERS_GO_ON = (
    "and others have more steps to take: give all islands the same number of steps (max_steps, or as many turns of "
    "the loop), and let nothing end one of them alone"
)


@dataclass(eq=False, repr=False)
class Unanimity:
    """One island's part in deciding rounds; used by the island's leader only.

    Attributes:
        all_gather: of all islands.
        patience: seconds to wait for all offers.
        vote_patience: seconds to wait for all votes.
        links: who is gone there is not waited for. The first carries messages; without one, the store does. They may
            be filled later.
    """

    all_gather: AllGather
    log: RunLog
    patience: float
    vote_patience: float
    links: Sequence[Links] = ()

    def __post_init__(self) -> None:
        self._island = self.all_gather.island
        self._decisions = Decisions(self.log, self.all_gather.island, self.all_gather.clock)
        self._next = Attempt(0, 0)  # of a round that is taken again
        self._said: list[str] = []
        self._planned: deque[str] = deque()

    def current(self, round_number: int) -> Attempt:
        """The attempt of a round that comes next."""
        return self._next if self._next.round == round_number else Attempt(round_number, 0)

    def agree(self, round_number: int, offer: OfferRecord) -> Attempt:
        """Offers, and waits for the offers of all islands; returns the attempt with its plan and the offers it takes.

        Raises:
            IslandLostError: an island did not come in time, is gone, has left the run, or ends before others do.
            StopRequested: this island was asked to stop before it knew that all had come.
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
            f"{name_all(missing)} did not reach round {round_number} within sync_timeout ({self.patience:g} s): raise"
            " that, or give it fewer inner steps' worth of work, if it is only slow"
        )

    def _plan(self, attempt: Attempt, offers: Mapping[int, OfferRecord]) -> PlanRecord:
        ended = [island for island, offer in sorted(offers.items()) if offer.is_last]
        if 0 < len(ended) < len(offers):  # the others would not average what these bring beside
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
        """Votes for an average, and waits for what is decided: it is committed, or the votes are split.

        Raises:
            IslandLostError: neither; an island could not make the average, or is lost.
            StopRequested: likewise, and this island was asked to stop.
        """
        outcome = self._vote(attempt, VoteRecord(island=self._island, mean=mean))
        if outcome.mean != mean and not outcome.is_split:
            raise self._end(outcome)
        return outcome

    def abort(self, attempt: Attempt, offer: str, reason: str) -> OutcomeRecord:
        """Says why this island holds no average; returns what is decided.

        Args:
            offer: whose values came damaged, so that the round may be taken again; "" if there is another reason.

        Raises:
            IslandLostError: another island had given the round up, or left; says why.
            StopRequested: likewise, and this island was asked to stop.
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
        if outcome.is_split:
            self._next = Attempt(attempt.round, attempt.number + 1)
        return outcome

    def leave(self, round_number: int, finished: bool = False) -> None:
        """Tells the others that this island takes no part in a round, so that nobody waits for it.

        Args:
            round_number: the first one without it.
            finished: it has done all that it was to do.
        """
        reason = (
            f"ended after round {round_number - 1}, {_OTHERS_GO_ON}"
            if finished
            else f"left the run before round {round_number}: it was asked to stop, or lost another island"
        )
        self._give_up(self.current(round_number), [self._island], f"island {self._island} {reason}")

    def _give_up(self, attempt: Attempt, lost: Sequence[int], reason: str) -> OutcomeRecord:
        return self._decide(attempt, OutcomeRecord(by=self._island, kind="abort", lost=list(lost), reason=reason))

    def _decide(self, attempt: Attempt, wish: OutcomeRecord) -> OutcomeRecord:
        try:
            return self.all_gather.guard(partial(self._decisions.decide, attempt.path, wish))
        except PayloadError as damage:
            raise IslandLostError(f"{damage}; start all islands again: {RESUMES}") from None

    def _end(self, outcome: OutcomeRecord) -> DiLoCoError:
        """The error for a round that is not taken again."""
        if outcome.lost and self.all_gather.should_stop():
            return StopRequested()
        reason = outcome.reason or f"island {outcome.by} says that all hold another average"
        return IslandLostError(f"{reason}; start all islands again: {RESUMES}", outcome.lost)

    # What all say

    def _gather(
        self, attempt: Attempt, own: InRound, what: str, patience: float, may_stop: bool = False
    ) -> tuple[dict[int, InRound], list[int], list[int]]:
        """Says something to all islands, and waits for what they say, unless the attempt is decided before.

        Nobody waits for the store to take what links carry: it is read there only where one of them fails.

        Returns:
            What they say; who says nothing; and who of those is gone.
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
        if links and links.send_message(make_message(folder, own), self.all_gather.news.set):
            call_behind(put, IslandLostError)  # which is met where the store is needed
        else:
            links = None
            put()
        wait = self.all_gather.notes.begin(patience, what)
        found, heard = {self._island: own}, partial(hear, links, folder, kind) if links else None
        missing, gone = self.all_gather.collect(found, look, patience, wait, may_stop, heard, self.links)
        return found, missing, gone

    def _tidy(self, attempt: Attempt) -> None:
        """What this island said in earlier attempts goes, as all have come to this one. Island 0, which keeps the
        store, also writes the plan, and forgets decisions of long ago."""
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
    """The outcome that an island is for.

    Args:
        num_islands: that have a vote.
    """
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
    """How averages differ, and who stands against a majority."""
    usual, count = Counter(vote.mean for vote in votes.values()).most_common(1)[0]
    wrong = [island for island, vote in votes.items() if vote.mean != usual] if 2 * count > len(votes) else []
    of = f" of {plural('island', len(wrong))} {numbers(wrong)}" if wrong else ""
    means = ", ".join(f"island {island}: {vote.mean[:12]}" for island, vote in sorted(votes.items()))
    return f"the islands computed different averages ({means}): suspect memory{of}, or what differs between machines"
