"""Decides rounds among islands that come and go: who takes part, and whether the round happened.

A round R is tried in attempts A = 0, 1, ... until one is committed:

    offer     island I has put its pseudo-gradient into the store: weight, norm, digest of the outer state that it
              starts from
    plan      create if absent: the offers to average. Written by the first island that sees offers of all live
              islands; or of a quorum, once the grace for the others is over
    vote      island I holds the average, with its digest: more than half of the voters commit, see `voting`
    outcome   create if absent: "commit" with the digest of the average, or "abort": the voters disagree, or the
              objects of an offer are unusable; its island may republish them for the next attempt

All objects that a plan names are in the store already, so no peer is needed to carry it out: any island, even one that
comes late or was absent, computes the same average from the same bytes and takes the same outer step. That is how an
island catches up, and why the death of a participant costs the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hf_diloco.errors import ForgedError, IslandLostError, PayloadError, StopRequested, StoreError
from hf_diloco.membership.candidates import Candidates, Rules, find_fault
from hf_diloco.membership.decisions import MAX_ATTEMPTS, Decisions, plan_path
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.round_records import (
    ABSTENTION,
    Attempt,
    Digest,
    OfferRecord,
    OutcomeRecord,
    VoteRecord,
    missing_path,
    offer_path,
)
from hf_diloco.membership.run import check_run
from hf_diloco.membership.voting import Voting
from hf_diloco.store.long_poll import Watch
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

_POLL_SECONDS = 0.25


@dataclass(eq=False, repr=False)
class Quorum:
    """One island's part in deciding rounds; used by the island's leader only.

    All methods raise `StoreError` if the store does not answer.

    Attributes:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        is_awaited: polled while waiting; true ends the grace for late islands.
    """

    members: Members
    rules: Rules
    should_stop: Callable[[], bool] = lambda: False
    clock: Clock = REAL
    is_awaited: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._log = log = self.members.log
        self._candidates = Candidates(self.members, self.rules)
        self._notes = WaitNotes(self.members.island, clock=self.clock)
        self._decisions = Decisions(log, self.members.island, self.clock)
        self._voting = Voting(
            self.members, self._decisions, self._candidates, self.rules, self.should_stop, self.clock
        )
        self._latest = Attempt(0, 0)
        self._open: Attempt | None = None  # had no plan when last read; a peer may have written one since
        self._doubtful: frozenset[str] = frozenset()
        self._is_loss_known = False
        self._missing = ""  # path of the last record by which this process reported a missing average

    def current(self, round_number: int) -> Attempt:
        """Returns the attempt of a round that counts: the committed one, or the first without an outcome.

        Raises:
            PayloadError: the round is committed, but its plan can no longer be read.
            ExchangeError: another run has replaced this one; see `check_run`.
            StoreError: also if the round has no attempt left.
        """
        attempt, reason = Attempt(round_number, 0, doubtful=self._doubtful), ""
        for number in range(MAX_ATTEMPTS):
            self._latest = attempt = replace(attempt, number=number)
            folder = attempt.path
            try:
                plan = self._decisions.plan(folder)
            except ForgedError as error:
                reason = str(error)
                self._void(attempt, error)
                continue
            if plan is None:
                return attempt
            outcome = self._decisions.outcome(folder)
            if outcome and outcome.kind == "commit" and self.rules.needs_presence:
                outcome = self._decisions.revoked(folder) or outcome
            if outcome is None or outcome.kind == "commit":
                return replace(attempt, plan=plan, outcome=outcome)
            reason = outcome.reason
            attempt = replace(attempt, unusable=(*attempt.unusable, _author_in(outcome.unusable)))
        raise StoreError(
            f"all {MAX_ATTEMPTS} attempts of round {round_number} failed, the last one because: {reason}. "
            "Look at the islands named there, and at the store (`hf-diloco store check`); then stop all islands, and "
            "start them with an empty prefix: they go on from their checkpoints in a new run"
        )

    def find(self, round_number: int, state: Digest) -> Attempt | None:
        """Returns a round, which others may have completed long ago, with plan and offers; None if it has no plan.

        Raises:
            PayloadError: as `current`; or the others have completed the round, and its records are gone, so that it
                must not be planned again.
        """
        while True:
            is_over = self.members.is_over(round_number)  # first: the plan precedes that heartbeat
            attempt = self.current(round_number)
            if attempt.plan is None:
                if is_over:
                    raise PayloadError(
                        f"other islands have completed round {round_number}, but it is not in the store"
                    )
                self._open = attempt
                return None
            if planned := self.with_offers(attempt, state):
                return planned

    def presume_open(self, round_number: int) -> None:
        """Assumes that a round has no plan yet, which saves `agree` a read of the store."""
        self._open = Attempt(round_number, 0)

    def agree(self, round_number: int, offer: OfferRecord) -> Attempt:
        """Offers, and waits for the plan; returns the attempt with its plan and offers.

        Raises: as `convene`, but `IslandLostError` instead of `PayloadError`: `find` handles a corrupt round.
        """
        try:
            while True:
                known, self._open = self._open, None
                attempt = known if known and known.round == round_number else self.current(round_number)
                if attempt.plan is None:
                    attempt = self.convene(attempt, offer)
                if planned := self.with_offers(attempt, offer.state):
                    return planned
        except PayloadError as error:
            raise IslandLostError(str(error)) from None

    def _void(self, attempt: Attempt, error: ForgedError) -> None:
        """Aborts an attempt whose plan cannot be read, so that all islands skip it."""
        check_run(self._log)
        self._voting.withdraw(attempt.path)
        if self._decisions.void(attempt.path, f"its plan cannot be read: {error}").kind == "commit":
            raise PayloadError(
                f"round {attempt.round} is committed, but its plan can no longer be read ({error})",
                f"{attempt.path}/plan.json",
            )

    def convene(self, attempt: Attempt, offer: OfferRecord) -> Attempt:
        """Offers, and waits for the plan; returns the attempt with its plan.

        The plan need not include this island: its offer may have come too late, or not count.

        Raises:
            IslandLostError: no quorum within `Rules.patience` seconds, or too few live islands.
            DuplicateIslandError: another process has claimed this island's number.
            StopRequested: this island was asked to stop; the others may use its offer.
            PayloadError, ExchangeError: as `current`.
        """
        watch, once = self._watch(attempt, offer), [self._check_place]
        started = self.clock.now()
        wait = self._notes.begin(self.rules.patience, f"round {attempt.round}")
        quorum_at: float | None = None
        while True:
            try:
                plan, offers, alive, *_ = watch.ask(
                    partial(self._decisions.plan, attempt.path),
                    partial(self._candidates.offers_to, attempt, offer.state),
                    self.members.alive,
                    *once,
                )
            except ForgedError:
                attempt = self.current(attempt.round)  # the next one, or a later one
                watch = self._watch(attempt, offer)
                continue
            once = []
            if plan is not None:
                return replace(attempt, plan=plan)
            if self.should_stop():
                raise StopRequested
            offers = self._candidates.present(offers, alive)
            needed = self._candidates.needed(offers)
            if len(offers) >= needed:
                quorum_at = self.clock.now() if quorum_at is None else quorum_at
                waited = self.clock.now() - quorum_at
                late = self._candidates.awaited(attempt, alive, waited) - offers.keys()
                if not late or waited >= self.rules.grace or self.is_awaited():
                    wish = self._candidates.plan(attempt, offers)
                    with contextlib.suppress(ForgedError):  # the next pass of the loop handles it
                        plan = self._decisions.decide_plan(attempt.path, wish)
                        if late and plan == wish:
                            logger.warning("round %d takes place without %s", attempt.round, self._notes.names(late))
                        return replace(attempt, plan=plan)
                    continue
            elif len(offers.keys() | alive.keys()) < needed:
                raise self._no_quorum(attempt, offers, "the others send no heartbeats")
            elif self.clock.now() - started >= self.rules.patience:
                within = f"within {self.rules.patience:g} s (sync_timeout)"
                raise self._no_quorum(attempt, offers, f"no more came {within}")
            wait.look((self._candidates.awaited(attempt, alive, 0.0) or alive.keys()) - offers.keys())

    def _check_place(self) -> None:
        """Checks that this process still owns its number, and that the store still holds the same run."""
        if not self.members.check_incarnation():  # the store has lost the claim, and perhaps all records
            lost = check_run(self._log)
            if lost and not self._is_loss_known:
                logger.warning("%s", lost)
            self._is_loss_known = bool(lost)

    def _watch(self, attempt: Attempt, offer: OfferRecord) -> Watch:
        """Offers, and returns the watch to poll until there is a plan."""
        prefixes = [attempt.path, "heartbeats", f"incarnations/{self.members.island}"]
        awaited = self.rules.awaits(plan_path(attempt.path))
        offer = offer.model_copy(update={"heartbeat": self.members.num_heartbeats})
        return self._log.watch(prefixes, self.clock, offer_path(attempt, offer), offer, awaited)

    def _no_quorum(self, attempt: Attempt, offers: Mapping[int, Any], reason: str) -> IslandLostError:
        return IslandLostError(
            f"round {attempt.round} needs {self.rules.min_islands} islands (min_islands), has {sorted(offers)}, and "
            f"{reason}"
        )

    def offer(self, attempt: Attempt, offer: OfferRecord) -> None:
        """Publishes an offer of this island, without waiting for a plan."""
        self._log.place(offer_path(attempt, offer), offer)

    def with_offers(self, attempt: Attempt, state: Digest) -> Attempt | None:
        """Checks the plan of an attempt, and reads its offers.

        Returns:
            The attempt with its offers. None if the plan or one of its offers is invalid, so that the attempt is now
            aborted: look again.

        Raises:
            PayloadError: the plan or an offer is invalid, but the round is committed.
        """
        assert attempt.plan is not None
        offers = [self._candidates.read(participant.offer) for participant in attempt.plan.participants]
        fault = find_fault(attempt.path, attempt.plan, offers, state, self.rules.min_islands)
        if fault is None:
            return replace(attempt, offers=tuple(offer for offer in offers if offer is not None))
        if not fault.offer:
            self._log.refuse_island(ForgedError(fault.reason, attempt.plan.by))
        if (attempt.outcome or self.abort(attempt, fault.offer, fault.reason)).kind == "commit":
            raise PayloadError(fault.reason, fault.offer)
        return None

    def commit(self, attempt: Attempt, mean: Digest) -> OutcomeRecord:
        """Votes for an average, and commits it if more than half of the voters agree; repeats the vote if the votes
        contradict a commit of another average.

        Returns:
            The outcome that counts.

        Raises:
            IslandLostError: another average is committed, and too many votes are still missing.
        """
        outcome = attempt.outcome or self._vote(attempt, mean)
        voters = {offer.island for offer in attempt.offers}
        while outcome.kind == "commit" and outcome.mean != mean:
            if not self._voting.refuse_commit(attempt.path, voters, outcome.mean):
                break
            outcome = self._vote(attempt, mean)
        return outcome

    def _vote(self, attempt: Attempt, mean: Digest) -> OutcomeRecord:
        wait = self._notes.begin(self.rules.grace, f"round {attempt.round}, vote")
        return self._voting.vote(attempt.path, attempt.offers, mean, wait)

    def abort(self, attempt: Attempt, offer: str, reason: str) -> OutcomeRecord:
        """Aborts an attempt because an offer's objects are unusable; returns the outcome that counts."""
        record = OutcomeRecord(by=self.members.island, kind="abort", unusable=offer, reason=reason)
        return self._decisions.decide(attempt.path, record)

    def revoke(self, attempt: Attempt) -> bool:
        """Revokes a committed round whose average is not in the store, if no island holds the average any more.

        Every participant that lacks the average writes a record: it has restarted from before the round, or has not
        seen the commit. Once all have written theirs, no island can hold the state of a later round either. Later
        rounds are revoked first, so that none is left over if this island is killed.

        Returns:
            Whether the round is repeated.
        """
        own = missing_path(attempt.path, self.members.island, self.members.incarnation)
        if own != self._missing and any(offer.island == self.members.island for offer in attempt.offers):
            self._log.place(own, VoteRecord(island=self.members.island, mean=ABSTENTION))
            self._missing = own
        said = self._log.read_all(self._log.list(f"{attempt.path}/missing/"), VoteRecord)
        for offer in attempt.offers:
            first = missing_path(attempt.path, offer.island, offer.incarnation)
            of_island = first[: first.rindex("-")]
            if not any(path.startswith(of_island) and path >= first for path in said):
                return False
        later: list[Attempt] = []
        try:
            while (following := self.current(attempt.round + 1 + len(later))).plan is not None:
                later.append(following)
            if self.current(attempt.round).number != attempt.number:  # revoked by a peer, which may have gone on since
                return True
        except PayloadError:  # a record of one of them is corrupt
            return False
        reason = f"no island that took part in round {attempt.round} still holds its average"
        logger.warning("retrying round %d: %s", attempt.round, reason)
        for one in (*reversed(later), attempt):
            if (one.outcome or self.abort(one, "", reason)).kind == "commit":
                self._decisions.revoke(one.path, reason)
        return True

    def processes(self) -> dict[int, int]:
        """Returns the live islands, each with the incarnation of its process."""
        return {island: self.members.incarnation_of(island) for island in self.members.alive()}

    def await_outcome(self, attempt: Attempt, patience: float) -> OutcomeRecord:
        """Waits for the outcome of an attempt that other islands carry out; aborts it if none of them does.

        If this island is a participant, which no longer holds its offered values, the others cannot succeed without
        it, unless only votes are missing. So after the grace it aborts. It does not extend the grace for live
        participants, because several may be in the same position, and must not wait for each other.

        Raises:
            IslandLostError: the attempt is not decided within `patience` seconds.
            StopRequested: this island was asked to stop.
        """
        deadline = self.clock.now() + patience
        wait = self._notes.begin(patience, f"round {attempt.round}, which others carry out")
        seen_at, grace = self.clock.now(), min(self.rules.grace, patience)
        others = [offer for offer in attempt.offers if offer.island != self.members.island]
        takes_part = len(others) < len(attempt.offers)
        no_longer = f"island {self.members.island} no longer holds its offer"
        reason = no_longer if takes_part else "its participants are gone"
        while (outcome := self._decisions.outcome(attempt.path)) is None:
            alive = self.members.alive()
            if not takes_part and any(self._candidates.waits(offer, alive) for offer in others):
                seen_at = self.clock.now()
            if self.should_stop():
                raise StopRequested
            if self.clock.now() - seen_at >= grace:
                return self.abort(attempt, "", reason)
            if self.clock.now() >= deadline:
                raise IslandLostError(f"round {attempt.round} is not decided after {patience:g} s")
            wait.look([offer.island for offer in others])
            self.clock.sleep(_POLL_SECONDS)
        return outcome

    def remember(self, planned: Attempt) -> None:
        """See `Candidates.remember`. Islands that were barred from the round are on probation in the next one."""
        self._candidates.remember(planned.round, planned.agreed)
        self._doubtful = self._latest.barred if self._latest.round == planned.round else frozenset()


def _author_in(offer: str) -> str:
    """Returns the author of an offer, from its path; see `round_records.offer_path`."""
    return offer.rpartition("/")[2].rpartition("-")[0]
