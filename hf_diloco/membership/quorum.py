"""Rounds among islands that come and go: who takes part, and whether it happened.

A round R is tried in attempts A = 0, 1, ... until one is committed:

    offer     island I has put its pseudo-gradient into the store, and says so: weight, norm, digest of the outer
              state that it starts from
    plan      create if absent: whose pseudo-gradients are averaged. Written by whoever first sees that all islands
              that are alive have offered; or a quorum has, and the grace for the others is over
    vote      island I holds the average, with its digest: more than half of those who vote commit, see `voting`
    outcome   create if absent: "commit" with the digest of the average, or "abort": those who voted disagree, or there
              is an offer whose objects could not be used; its island may put them anew for the next attempt

What a plan names lies in the store already, so carrying it out needs nobody: any island, also one that comes late or
was not there at all, computes the same average from the same bytes and takes the same outer step. That is how an
island catches up, and why a participant that dies costs nobody anything.
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
from hf_diloco.store.question import Watch
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

_POLL_SECONDS = 0.25


@dataclass(eq=False, repr=False)
class Quorum:
    """One island's part in deciding rounds; used by the island's leader only.

    All of it raises `StoreError` where the store does not answer.

    Attributes:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        is_awaited: polled while waiting; true ends the grace for those who are late.
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
        self._open: Attempt | None = None  # had no plan when it was looked for; since then others may have written one
        self._doubtful: frozenset[str] = frozenset()
        self._missing = ""  # the last attempt of which this process has said that it misses the average

    def current(self, round_number: int) -> Attempt:
        """The attempt of a round that counts: the committed one, or the first that has no outcome.

        Raises:
            PayloadError: the round is committed, but its plan can no longer be read.
            ExchangeError: another run has taken the place of this one; see `check_run`.
            StoreError: the store does not answer; or the round has no attempt left.
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
            f"all {MAX_ATTEMPTS} attempts of round {round_number} came to nothing, the last one because: {reason}. "
            "Look at the islands named there, and at the store (`hf-diloco store check`); then stop all islands, and "
            "start them with an empty prefix: they go on from their checkpoints in a new run"
        )

    def find(self, round_number: int, state: Digest) -> Attempt | None:
        """A round that others may have taken long ago, as planned and with its offers; None if it has no plan.

        Args:
            state: digest of this island's outer parameters before it.

        Raises:
            PayloadError: as `current`; or they have, and nothing of it is in the store any more. It must not be
                planned a second time.
            StoreError: as `current`.
        """
        while True:
            is_over = self.members.is_over(round_number)  # its plan is older than the sign of life that says so
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
        """Takes it that nobody has planned a round yet: `agree` then asks no more than it must."""
        self._open = Attempt(round_number, 0)

    def agree(self, round_number: int, offer: OfferRecord) -> Attempt:
        """Offers, and waits until it is decided who takes part; returns the attempt with its plan and its offers.

        Raises: as `convene`, but `IslandLostError` for `PayloadError`: `find` says more of a round that is damaged.
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
        """Sees to it that an attempt whose plan cannot be read is passed over by all islands."""
        check_run(self._log)
        self._voting.withdraw(attempt.path)
        if self._decisions.void(attempt.path, f"its plan cannot be read: {error}").kind == "commit":
            raise PayloadError(
                f"round {attempt.round} is committed, but its plan can no longer be read ({error})",
                f"{attempt.path}/plan.json",
            )

    def convene(self, attempt: Attempt, offer: OfferRecord) -> Attempt:
        """Offers, and waits until it is decided who takes part; returns the attempt with its plan.

        The plan need not name this island: it may have come too late, or not count.

        Raises:
            IslandLostError: no quorum within `Rules.patience` seconds, or not so many islands alive.
            DuplicateIslandError: another process has taken this island's number.
            StopRequested: this island was asked to stop; the others may use what it has offered.
            PayloadError, ExchangeError, StoreError: as `current`.
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
                attempt = self.current(attempt.round)  # the next one, or one that others have come to
                watch = self._watch(attempt, offer)
                continue
            once = []
            if plan is not None:
                return replace(attempt, plan=plan)
            if self.should_stop():
                raise StopRequested
            offers = self._candidates.present(offers, alive)
            if len(offers) >= self.rules.min_islands:
                quorum_at = self.clock.now() if quorum_at is None else quorum_at
                waited = self.clock.now() - quorum_at
                late = self._candidates.awaited(attempt, alive, waited) - offers.keys()
                if not late or waited >= self.rules.grace or self.is_awaited():
                    wish = self._candidates.plan(attempt, offers)
                    with contextlib.suppress(ForgedError):  # else the loop sees to it
                        plan = self._decisions.decide_plan(attempt.path, wish)
                        if late and plan == wish:
                            logger.warning("round %d takes place without %s", attempt.round, self._notes.names(late))
                        return replace(attempt, plan=plan)
                    continue
            elif len(offers.keys() | alive.keys()) < self.rules.min_islands:
                raise self._no_quorum(attempt, offers, "the others give no sign of life")
            elif self.clock.now() - started >= self.rules.patience:
                within = f"within {self.rules.patience:g} s (sync_timeout)"
                raise self._no_quorum(attempt, offers, f"no more came {within}")
            wait.look((self._candidates.awaited(attempt, alive, 0.0) or alive.keys()) - offers.keys())

    def _check_place(self) -> None:
        """Sees to it that this process is who it was when it joined, in the run that it joined."""
        if not self.members.check_incarnation():  # the store has lost it, and all else perhaps
            check_run(self._log)

    def _watch(self, attempt: Attempt, offer: OfferRecord) -> Watch:
        """Offers, and says what to ask until there is a plan."""
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
        """Announces this island's pseudo-gradient, without waiting for anybody."""
        self._log.place(offer_path(attempt, offer), offer)

    def with_offers(self, attempt: Attempt, state: Digest) -> Attempt | None:
        """An attempt with the offers that its plan takes; `state` is that of this island before the round.

        Returns:
            None if one cannot be read, or the plan does not count, and the attempt is therefore aborted: look again.

        Raises:
            PayloadError: the same, but the round is committed.
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
        """Votes for an average of its offers, and commits it if more than half of those who vote agree.

        Returns:
            What was decided.
        """
        wait = self._notes.begin(self.rules.grace, f"round {attempt.round}, vote")
        return self._voting.vote(attempt.path, attempt.offers, mean, wait)

    def refuse_commit(self, attempt: Attempt, mean: Digest) -> bool:
        """See `Voting.refuse_commit`."""
        return self._voting.refuse_commit(attempt.path, attempt.plan.islands if attempt.plan else (), mean)

    def abort(self, attempt: Attempt, offer: str, reason: str) -> OutcomeRecord:
        """Says that an offer's objects cannot be used; returns what was decided, which may be otherwise."""
        record = OutcomeRecord(by=self.members.island, kind="abort", unusable=offer, reason=reason)
        return self._decisions.decide(attempt.path, record)

    def revoke(self, attempt: Attempt) -> bool:
        """Has a committed round whose average is not in the store taken again, if nobody holds it any more.

        Every participant that misses the average says so: it has come back from before the round, or has not heard of
        the commit. Once all have, nobody can have come to later rounds either. These go first, so that none is left if
        this island is killed.

        Returns:
            Whether the round is taken again.
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
            if self.current(attempt.round).number != attempt.number:  # others were faster, and may have gone on since
                return True
        except PayloadError:  # a record of one of them is damaged
            return False
        reason = f"no island that took round {attempt.round} holds its average any more"
        logger.warning("round %d is taken again: %s", attempt.round, reason)
        for one in (*reversed(later), attempt):
            if (one.outcome or self.abort(one, "", reason)).kind == "commit":
                self._decisions.revoke(one.path, reason)
        return True

    def processes(self) -> dict[int, int]:
        """Islands that take part or are about to, each with the incarnation of its process."""
        return {island: self.members.incarnation_of(island) for island in self.members.alive()}

    def await_outcome(self, attempt: Attempt, patience: float) -> OutcomeRecord:
        """Returns how an attempt that other islands carry out is decided; one that nobody does is aborted.

        They cannot without this one, if it is a participant: it no longer holds what it has offered, so at most votes
        are missing. Several participants may be in the same position, and must not wait for each other.

        Raises:
            IslandLostError: it is not decided within `patience` seconds.
            StopRequested: this island was asked to stop.
        """
        deadline = self.clock.now() + patience
        wait = self._notes.begin(patience, f"round {attempt.round}, which others carry out")
        seen_at, grace = self.clock.now(), min(self.rules.grace, patience)
        others = [offer for offer in attempt.offers if offer.island != self.members.island]
        takes_part = len(others) < len(attempt.offers)
        reason = "its participants are gone"
        if takes_part:
            reason = f"island {self.members.island} no longer holds what it has offered"
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
        """See `Candidates.remember`. Who had to stay out of the round is on probation in the next one."""
        self._candidates.remember(planned.round, planned.agreed)
        self._doubtful = self._latest.barred if self._latest.round == planned.round else frozenset()


def _author_in(offer: str) -> str:
    """Who made an offer, by its path; see `candidates.offer_path`."""
    return offer.rpartition("/")[2].rpartition("-")[0]
