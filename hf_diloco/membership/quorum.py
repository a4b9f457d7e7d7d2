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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_diloco.errors import ExchangeError, ForgedError, IslandLostError, PayloadError, StopRequested, StoreError
from hf_diloco.membership.decisions import MAX_ATTEMPTS, Decisions, plan_path
from hf_diloco.membership.heartbeats import BeatRecord, Members
from hf_diloco.membership.outliers import UsualNorms
from hf_diloco.membership.round_records import Digest, OfferRecord, OutcomeRecord, Participant, PlanRecord
from hf_diloco.membership.verdicts import agree_on_rates
from hf_diloco.membership.voting import Verdict, Voting
from hf_diloco.store.log import RunLog
from hf_diloco.store.sight import Watch
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

MAX_ABORTED = 16
_TRIES = 2
_POLL_SECONDS = 0.25
_RETRY_SECONDS = 0.5
"""How long an attempt waits for those whom the last one lost: if it was the link, they are back at once."""


@dataclass(frozen=True)
class Rules:
    """When a round takes place.

    Attributes:
        min_islands: no round with fewer.
        grace: seconds to wait, once there are as many, for islands that are alive but late; and for another's vote.
        patience: seconds to wait for as many, if they live; then the island goes on training without the round.
        outlier_factor: a norm so many times the usual one is left out; None: never.
        needs_presence: only islands that wait for the round take part, and all of them vote: they exchange directly.
        num_fragments: that rounds are of in turn; each has usual norms of its own.
        linger: seconds to leave plan and outcome to the island that keeps the store: what it writes at once comes with
            the answer to what this one has written.
    """

    min_islands: int = 1
    grace: float = 30.0
    patience: float = 600.0
    outlier_factor: float | None = 10.0
    needs_presence: bool = False
    num_fragments: int = 1
    linger: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """One attempt of one round, with what has been written of it."""

    round: int
    number: int
    plan: PlanRecord | None = None
    outcome: OutcomeRecord | None = None
    unusable: tuple[str, ...] = ()
    """Authors of the offers that earlier attempts of the round could not use, one entry an attempt."""

    @property
    def path(self) -> str:
        return f"rounds/{self.round:08d}/{self.number:02d}"

    def bars(self, island: int, claim: int) -> bool:
        """Whether a process stays out of this round: twice its objects were of no use."""
        return self.unusable.count(author_of(island, claim)) >= _TRIES


def author_of(island: int, claim: int) -> str:
    """Names one process of one island."""
    return f"{island:05d}-{claim:06d}"


def _who(offer: str) -> str:
    return offer.rpartition("/")[2].rpartition("-")[0]


class Council:
    """One island's part in deciding rounds; used by the island's leader only.

    Args:
        log: of the run.
        members: this island and the others.
        rules: when a round takes place.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        clock: by which it waits.
        is_awaited: polled while waiting; true ends the grace for those who are late.
    """

    def __init__(
        self,
        log: RunLog,
        members: Members,
        rules: Rules,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Clock = REAL,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._log = log
        self._members = members
        self._rules = rules
        self._should_stop = should_stop
        self._clock = clock
        self._is_awaited = is_awaited
        self._usual_norms = UsualNorms(rules.num_fragments, rules.outlier_factor)
        self._last_participants: frozenset[int] = frozenset()
        self._offers: dict[str, OfferRecord] = {}
        self._notes = WaitNotes(members.island, clock=clock)
        self._decisions = Decisions(log, members.island, clock)
        self._voting = Voting(log, self._decisions, members, rules.grace, should_stop, clock, rules.linger)

    def current(self, round_number: int) -> Attempt:
        """The attempt of a round that counts: the committed one, or the first that has no outcome.

        Raises:
            ExchangeError: too many attempts were aborted.
            PayloadError: the round is committed, but its plan can no longer be read.
            StoreError: the store does not answer, or holds too much rubbish.
        """
        unusable: tuple[str, ...] = ()
        for number in range(MAX_ATTEMPTS):
            attempt = Attempt(round_number, number, unusable=unusable)
            try:
                plan = self._decisions.plan(attempt.path)
            except ForgedError as error:
                self._void(attempt, error)
                continue
            if plan is None:
                return attempt
            outcome = self._decisions.outcome(attempt.path)
            if outcome is None or outcome.kind == "commit":
                return Attempt(round_number, number, plan, outcome, unusable)
            unusable += (_who(outcome.unusable),)
            if len(unusable) == MAX_ABORTED:
                raise ExchangeError(
                    f"round {round_number} was aborted {MAX_ABORTED} times, the last time because: {outcome.reason}. "
                    "Look at the islands named there and at the store, then start all islands again"
                )
        raise StoreError(
            f"{MAX_ATTEMPTS} attempts of round {round_number} have plans that cannot be read: keep others away from "
            "the store, and see `hf-diloco store check`"
        )

    def _void(self, attempt: Attempt, error: ForgedError) -> None:
        """Sees to it that an attempt whose plan cannot be read is passed over by all islands."""
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
            PayloadError, StoreError: as `current`.
        """
        watch, once = self._watch(attempt, offer), [self._members.check_claim]
        started = self._clock.now()
        wait = self._notes.begin(self._rules.patience, f"round {attempt.round}")
        quorum_at: float | None = None
        while True:
            try:
                plan, offers, alive, *_ = watch.ask(
                    partial(self._decisions.plan, attempt.path),
                    partial(self._offers_to, attempt, offer.state),
                    self._members.alive,
                    *once,
                )
            except ForgedError:
                attempt = self.current(attempt.round)  # the next one, or one that others have come to
                watch = self._watch(attempt, offer)
                continue
            once = []
            if plan is not None:
                return Attempt(attempt.round, attempt.number, plan, attempt.outcome, attempt.unusable)
            if self._should_stop():
                raise StopRequested
            if self._rules.needs_presence:
                offers = {island: made for island, made in offers.items() if self._waits(island, made[1], alive)}
            if len(offers) >= self._rules.min_islands:
                quorum_at = self._clock.now() if quorum_at is None else quorum_at
                waited = self._clock.now() - quorum_at
                late = self._awaited(attempt, alive, waited) - offers.keys()
                if not late or waited >= self._rules.grace or self._is_awaited():
                    wish = self._plan(attempt, offers, offer.state)
                    with contextlib.suppress(ForgedError):  # else the loop sees to it
                        plan = self._decisions.decide_plan(attempt.path, wish)
                        if late and plan == wish:
                            logger.warning("round %d takes place without %s", attempt.round, self._notes.names(late))
                        return Attempt(attempt.round, attempt.number, plan, unusable=attempt.unusable)
                    continue
            elif len(offers.keys() | alive.keys()) < self._rules.min_islands:
                raise self._no_quorum(attempt, offers, "the others give no sign of life")
            elif self._clock.now() - started >= self._rules.patience:
                within = f"within {self._rules.patience:g} s (sync_timeout)"
                raise self._no_quorum(attempt, offers, f"no more came {within}")
            wait.look((self._awaited(attempt, alive, 0.0) or alive.keys()) - offers.keys())

    def _watch(self, attempt: Attempt, offer: OfferRecord) -> Watch:
        """Offers, and says what to ask until there is a plan."""
        prefixes = [attempt.path, "beats", f"claims/{self._members.island}"]
        awaited, linger = plan_path(attempt.path), self._rules.linger
        return self._log.watch(prefixes, self._clock, _offer_path(attempt, offer), offer, awaited, linger)

    def _no_quorum(self, attempt: Attempt, offers: Mapping[int, Any], reason: str) -> IslandLostError:
        return IslandLostError(
            f"round {attempt.round} needs {self._rules.min_islands} islands (min_islands), has {sorted(offers)}, and "
            f"{reason}"
        )

    def offer(self, attempt: Attempt, offer: OfferRecord) -> None:
        """Announces this island's pseudo-gradient, without waiting for anybody."""
        self._log.place(_offer_path(attempt, offer), offer)

    def offers_of(self, attempt: Attempt) -> list[OfferRecord] | None:
        """The offers that an attempt's plan takes, in its order.

        Returns:
            None if one is gone or cannot be read, and the attempt is therefore aborted: look for the current one.

        Raises:
            PayloadError: the same, but the round is committed.
            StoreError: the store does not answer.
        """
        assert attempt.plan is not None
        offers = []
        for participant in attempt.plan.participants:
            path = participant.offer
            offer = self._offers.get(path) or self._log.read_or_refuse(path, OfferRecord)
            if offer is None or offer.island != participant.island:
                reason = f"{path}, which the plan of round {attempt.round} names, is gone or cannot be read"
                if (attempt.outcome or self.abort(attempt, path, reason)).kind == "commit":
                    raise PayloadError(reason, path)
                return None
            offers.append(offer)
        return offers

    def commit(self, attempt: Attempt, mean: Digest) -> OutcomeRecord:
        """Votes for an average, and commits it if more than half of those who vote agree; returns what was decided.

        Raises:
            StoreError: see `Decisions.decide`.
        """
        assert attempt.plan is not None
        participants = {participant.island for participant in attempt.plan.participants}
        wait = self._notes.begin(self._rules.grace, f"round {attempt.round}, vote")
        verdict = self._voting.vote(attempt.path, participants, mean, wait, is_unanimous=self._rules.needs_presence)
        if verdict is Verdict.AGREED:
            return self._decisions.decide(
                attempt.path, OutcomeRecord(by=self._members.island, kind="commit", mean=mean)
            )
        reason = (
            "its participants hold different averages, or none has voted"
            if verdict is Verdict.SPLIT
            else "those who agree on another average are gone"
        )
        return self._decisions.outcome(attempt.path) or self._decisions.decide(
            attempt.path,
            OutcomeRecord(by=self._members.island, kind="abort", is_split=verdict is Verdict.SPLIT, reason=reason),
        )

    def abort(self, attempt: Attempt, offer: str, reason: str) -> OutcomeRecord:
        """Says that an offer's objects cannot be used; returns what was decided, which may be otherwise."""
        record = OutcomeRecord(by=self._members.island, kind="abort", unusable=offer, reason=reason)
        return self._decisions.decide(attempt.path, record)

    def processes(self) -> dict[int, int]:
        """Islands that take part or are about to, each with the claim of its process."""
        return {island: self._members.claim_of(island) for island in self._members.alive()}

    def await_outcome(self, attempt: Attempt, offers: Sequence[OfferRecord], patience: float) -> None:
        """Returns when an attempt that other islands carry out is decided; one that nobody does is aborted.

        Raises:
            IslandLostError: it is not decided within `patience` seconds.
            StopRequested: this island was asked to stop.
            StoreError: the store does not answer.
        """
        deadline = self._clock.now() + patience
        wait = self._notes.begin(patience, f"round {attempt.round}, which others carry out")
        seen_at = self._clock.now()
        while self._decisions.outcome(attempt.path) is None:
            alive = self._members.alive()
            others = [offer for offer in offers if offer.island != self._members.island]
            if any(self._waits(offer.island, offer, alive) for offer in others):
                seen_at = self._clock.now()
            if self._should_stop():
                raise StopRequested
            if self._clock.now() - seen_at >= self._rules.grace:
                self.abort(attempt, "", "its participants are gone")
                return
            if self._clock.now() >= deadline:
                raise IslandLostError(f"round {attempt.round} is not decided after {patience:g} s")
            wait.look([offer.island for offer in others])
            self._clock.sleep(_POLL_SECONDS)

    def remember(self, round_number: int, plan: PlanRecord) -> None:
        """Takes a committed round as the last one, and its norms as usual ones."""
        self._last_participants = frozenset(participant.island for participant in plan.participants)
        self._usual_norms.remember(round_number, [participant.norm for participant in plan.participants])
        self._offers.clear()

    # Who takes part

    def _offers_to(self, attempt: Attempt, state: Digest) -> dict[int, tuple[str, OfferRecord]]:
        """The newest usable offer of each island, with its path."""
        found: dict[int, tuple[str, OfferRecord]] = {}
        paths = self._log.list(f"{attempt.path}/offers/")  # sorted: an island's newest offer comes last
        read = self._log.read_all((path for path in paths if path not in self._offers), OfferRecord)
        self._offers |= {path: offer for path, offer in read.items() if path == _offer_path(attempt, offer)}
        for path in paths:
            offer = self._offers.get(path)
            if offer is None:
                continue
            if offer.state == state and not attempt.bars(offer.island, offer.claim):
                found[offer.island] = path, offer
        return found

    def _waits(self, island: int, offer: OfferRecord, alive: Mapping[int, BeatRecord]) -> bool:
        if island == self._members.island:
            return offer.claim == self._members.claim
        is_here = island in alive and alive[island].phase == "syncing"
        return is_here and self._members.claim_of(island) == offer.claim

    def _awaited(self, attempt: Attempt, alive: Mapping[int, BeatRecord], waited: float) -> set[int]:
        """Islands that are alive and hold the state before this round, after so many seconds of waiting for them.

        Whoever was in the last round counts as holding it, though its next sign of life may still be on its way. An
        island that joins counts from when it stands where the others do, unless it lets the round pass. Who must be
        there and was lost in the last attempt counts for a moment only: if it hangs, that has cost enough time. One
        that has missed the last round and synchronises counts for a moment too: it carries that out, and comes.
        """
        is_moment = waited < _RETRY_SECONDS
        lost = attempt.unusable[-1:] if self._rules.needs_presence and not is_moment else ()
        return {
            island
            for island, beat in alive.items()
            if (
                beat.round >= attempt.round - 1
                or island in self._last_participants
                or (is_moment and beat.phase == "syncing" and beat.round == attempt.round - 2)
            )
            and beat.phase != "passing"
            and not attempt.bars(island, self._members.claim_of(island))
            and author_of(island, self._members.claim_of(island)) not in lost
        }

    def _plan(self, attempt: Attempt, offers: Mapping[int, tuple[str, OfferRecord]], state: Digest) -> PlanRecord:
        participants, left_out = [], {}
        smallest = min((offer.norm for _, offer in offers.values() if offer.norm is not None), default=0.0)
        for island, (path, offer) in sorted(offers.items()):
            reason = self._usual_norms.why_not(attempt.round, offer, smallest)
            if reason:
                left_out[str(island)] = reason
            else:
                assert offer.norm is not None
                participants.append(Participant(offer=path, island=island, weight=offer.weight, norm=offer.norm))
        if not participants:
            raise ExchangeError(
                f"round {attempt.round}: no island has a pseudo-gradient that counts ({left_out}): lower the inner "
                "learning rate and resume from an earlier checkpoint"
            )
        taking_part = [offer.rates for island, (_, offer) in sorted(offers.items()) if str(island) not in left_out]
        return PlanRecord(
            by=self._members.island,
            state=state,
            participants=participants,
            left_out=left_out,
            rates=agree_on_rates(taking_part),
        )


def _offer_path(attempt: Attempt, offer: OfferRecord) -> str:
    return f"{attempt.path}/offers/{author_of(offer.island, offer.claim)}-{offer.serial:06d}.json"
