"""One rank's part in carrying out rounds: putting its pseudo-gradient into the store, and taking the outer steps.

What a plan names lies in the store, so a round is carried out in the same way in time or late: average what the plan
names, see that the average is the one agreed on, take the outer step. What differs is what becomes of this island's
own progress since it last took part:

    it is in the round          used up: the masters become the outer parameters
    part of it is               the rest stays, on top of the new outer parameters
    none of it is               it stays, on top of the new outer parameters, and comes to a later round
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import DamagedTransferError, DiLoCoError, DivergedError, IslandLostError, PayloadError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.quorum import Attempt, Council
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord
from hf_diloco.outer.digests import digest_vector
from hf_diloco.outer.fragment import Fragment
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.catch_up import Recovery
from hf_diloco.rounds.contributions import Contribution, Offers
from hf_diloco.rounds.doubts import Doubts
from hf_diloco.rounds.engines import Engine
from hf_diloco.rounds.flights import Flight
from hf_diloco.rounds.measure import CosineSums, SyncReport, cosine_to_others
from hf_diloco.rounds.round_plan import Part, PlannedRound, RoundPassed, SyncClock
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.utils.clock import REAL, Clock

logger = logging.getLogger("hf_diloco")


class Rounds:
    """Offers and carries out rounds. Every method is collective over the island's ranks.

    Args:
        config: the outer loop's settings.
        outer: this rank's outer state.
        island: the ranks of this island; a group that nothing else uses while a thread carries out rounds.
        engines: how values get from island to island, one a fragment.
        snapshots: of the run.
        council: decides rounds; on the island's leader only.
        claim: of this process.
        clock: by which it waits.

    Attributes:
        recovery: where a round cannot be carried out.
        last: that this process has completed, and how it was decided.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        outer: OuterState,
        island: IslandGroup,
        engines: Sequence[Engine],
        snapshots: Snapshots,
        council: Council | None,
        claim: int,
        clock: Clock = REAL,
    ) -> None:
        self.config = config
        self.outer = outer
        self.island = island
        self._engines = engines
        self._snapshots = snapshots
        self._council = council
        self.recovery = Recovery(config, outer, island, engines, snapshots, clock)
        self._offers = Offers(config, outer, island, engines, claim)
        self._doubts = Doubts(island.is_leader)
        self.last: tuple[PlannedRound, OutcomeRecord] | None = None
        self._lent: list[tuple[Fragment, torch.Tensor]] = []
        self._open: Attempt | None = None  # had no plan when `find` looked; others may have written one since

    # Which round

    def find(self, is_resuming: bool = False) -> PlannedRound | None:
        """The next round, if it has a plan already. One whose records are damaged is passed over; see `Recovery.skip`.

        Args:
            is_resuming: this island's progress comes from a checkpoint, and is part of what it had offered.
        """

        def find() -> dict[str, Any] | None:
            council = self._need_council()
            while (attempt := council.current(number)).plan:
                if planned := self._with_offers(attempt):
                    return planned.dump()
            self._open = attempt
            return None

        while True:
            number = self.outer.round + 1
            try:
                raw = self.island.on_leader(find)
            except PayloadError as error:
                self.recovery.skip(number, error, is_resuming, is_resuming or self._offers.has_offered(number))
            else:
                return PlannedRound.load(raw) if raw else None

    def convene(self, offer: OfferRecord) -> PlannedRound:
        """Offers, and waits for the plan."""

        def convene() -> dict[str, Any]:
            council = self._need_council()
            while True:
                known, self._open = self._open, None
                attempt = known if known and known.round == offer_round else council.current(offer_round)
                if attempt.plan is None:
                    attempt = council.convene(attempt, offer)
                if planned := self._with_offers(attempt):
                    return planned.dump()

        offer_round = self.outer.round + 1
        try:
            return PlannedRound.load(self.island.on_leader(convene))
        except PayloadError as error:  # committed meanwhile, and damaged: `find` passes over it
            raise IslandLostError(str(error)) from None

    def _with_offers(self, attempt: Attempt) -> PlannedRound | None:
        offers = self._need_council().offers_of(attempt)
        if attempt.plan is None or offers is None:
            return None
        return PlannedRound(attempt.round, attempt.number, attempt.plan, attempt.outcome, offers)

    def capture(self) -> Contribution:
        """This island's progress since the last round; lies in the outer state's scratch vector."""
        self.rest()
        self.outer.land(self.outer.current)
        delta, square = self.outer.pseudo_gradient()
        number, steps = self.outer.round + 1, self.outer.steps
        weight = self._offers.weigh(number, steps, self.outer.weight)
        return Contribution(number, delta, square, steps, weight, self.outer.rates)

    def publish(self, own: Contribution, clock: SyncClock) -> OfferRecord:
        """Has the others find it, unless they do already."""
        return self._offers.make(own, clock)

    def bequeath(self) -> None:
        """Offers this island's progress to the next round without waiting for it: it leaves."""
        number = self.outer.round + 1
        if self._engine_of(number).needs_presence or self._offers.holds(number, self.outer.steps):
            return
        offer = self.publish(self.capture(), SyncClock())

        def hand_over() -> None:
            council = self._need_council()
            attempt = council.current(number)
            if attempt.plan is None:
                council.offer(attempt, offer)

        self.island.on_leader(hand_over)

    def rest(self) -> None:
        """Returns when no average is on its way into the store: it may be overwritten."""
        for engine in self._engines:
            engine.rest()
        while self._lent:
            fragment, vector = self._lent.pop()
            fragment.take_back(vector)

    def _engine_of(self, number: int) -> Engine:
        return self._engines[self.outer.number_of(number)]

    # Carrying out

    def carry_out(
        self,
        planned: PlannedRound,
        clock: SyncClock,
        is_resuming: bool = False,
        captured: Contribution | None = None,
    ) -> SyncReport | None:
        """Averages what the plan names, settles the attempt, and takes the outer step; None if it was aborted.

        Args:
            planned: the attempt.
            clock: what this synchronisation takes.
            is_resuming: this island's progress comes from a checkpoint, and is part of what it had offered.
            captured: its progress, if that was captured just now: the model need not be read again.
        """
        self._check_state(planned)
        self.rest()
        self.outer.land(self.outer.current)
        part = self._part_in(planned, is_resuming)
        own = planned.place_of(self.config.island)
        is_here = own is not None and self._holds_all(planned.offers[own])
        engine = self._engine_of(planned.number)
        if engine.needs_presence and planned.outcome is None and not is_here:
            self._await_outcome(planned)
            return None
        if planned.is_committed and not self.island.on_leader(lambda: self.recovery.await_average(planned)):
            gone = PayloadError(f"the average of round {planned.number} is not in the store")
            self.recovery.pass_over(planned, gone, part, is_resuming)
            return None
        if captured is not None and part is Part.WHOLE:
            delta, square = captured.delta, captured.square
        else:
            delta, square = self.outer.pseudo_gradient(with_residual=part is Part.WHOLE)
        # The average may replace progress that is used up; other progress must outlast it.
        mean = delta if part is Part.WHOLE else torch.empty_like(delta)
        used: list[torch.Tensor | None] = [None]
        sums = CosineSums()

        def average() -> None:
            self._average(planned, mean, own, delta if self._may_use_memory(planned, is_here) else None, clock, sums)
            used[0] = self._used_of(planned, own) if part is Part.SOME else None

        try:
            if not self._try(planned, average):
                return None
        except PayloadError as error:
            self.recovery.pass_over(planned, error, part, is_resuming)
            return None
        outcome = self._settle(planned, mean, clock)
        if outcome is None:
            return None
        weight = self._offers.weigh(planned.number, self.outer.steps, self.outer.weight)
        self._install(planned, mean, part, used[0])
        self._complete(planned, outcome, mean)
        return self._report(planned, clock, sums, square, weight, own)

    def carry_flight(self, flight: Flight) -> PlannedRound:
        """Carries out a round behind the inner steps, in as many attempts as it takes.

        Raises:
            RoundPassed: it takes place, but not with what is under way here: `carry_out` knows what to do.
            IslandLostError, StoreError: it does not take place. Nothing was changed.
        """
        clock = SyncClock()
        self.rest()
        weight = self._offers.weigh(flight.number, flight.steps, flight.weight_of_steps)
        own = Contribution(flight.number, flight.delta, flight.square, flight.steps, weight, flight.rates)
        mean = flight.fragment.lend()  # another attempt needs the pseudo-gradient again
        self._lent.append((flight.fragment, mean))
        while True:
            sums = CosineSums()
            planned = self._plan_flight(own, clock)
            place = planned.place_of(self.config.island)
            delta = flight.delta if self._may_use_memory(planned, True) else None
            average = partial(self._average, planned, mean, place, delta, clock, sums)
            try:
                outcome = self._settle(planned, mean, clock) if self._try(planned, average) else None
            except PayloadError as error:  # it was decided so long ago that nothing is left of it
                raise RoundPassed(str(error)) from None
            if outcome is not None:
                break
        flight.fragment.step(mean, rates=planned.plan.rates)
        self.outer.update_digest(flight.fragment, self.island)
        self.outer.round = flight.number
        self._complete(planned, outcome, mean)
        flight.note(self._report(planned, clock, sums, flight.square, weight, place))
        return planned

    def _may_use_memory(self, planned: PlannedRound, is_here: bool) -> bool:
        """Whether this island's own values are in memory, and not to be read again because islands disagree."""
        return is_here and (self._engine_of(planned.number).needs_presence or not self._doubts.has(planned.number))

    def _plan_flight(self, own: Contribution, clock: SyncClock) -> PlannedRound:
        """Offers, and returns the plan, if it takes just this offer."""
        offer = self._offers.make(own, clock)
        planned = clock.wait(lambda: self.convene(offer))
        self._check_state(planned)
        place = planned.place_of(self.config.island)
        is_late = self._engine_of(own.number).needs_presence and planned.is_committed
        if place is None or is_late or not self._offers.is_newest(planned.offers[place]):
            raise RoundPassed(f"round {own.number} takes place without what this island has for it")
        return planned

    def _average(
        self,
        planned: PlannedRound,
        mean: torch.Tensor,
        own: int | None,
        own_values: torch.Tensor | None,
        clock: SyncClock,
        sums: CosineSums,
    ) -> None:
        engine = self._engine_of(planned.number)
        clock.traffic += self.island.on_all(lambda: engine.average(planned, mean, own, own_values, sums.observe))
        if engine.needs_presence and len(planned.offers) == 1 and not planned.is_committed:
            self.outer.fragment_of(planned.number).encode_alone(mean)

    def _try(self, planned: PlannedRound, average: Callable[[], None]) -> bool:
        """Whether the average could be made; if not, the others are told.

        Raises:
            PayloadError: it could not, and they have made it.
        """
        try:
            average()
            return True
        except PayloadError as error:
            self._engine_of(planned.number).close()
            if planned.is_committed:
                raise
            self._on_unusable(planned, error)
        except (IslandLostError, DamagedTransferError) as error:
            self._engine_of(planned.number).close()
            self._on_lost(planned, error)
        except DiLoCoError:
            self._engine_of(planned.number).close()
            raise
        return False

    def _settle(self, planned: PlannedRound, mean: torch.Tensor, clock: SyncClock) -> OutcomeRecord | None:
        """Votes for an average; None if the attempt is to be looked at again: it is aborted, or has another average.

        Raises:
            DivergedError: that has happened before, and is this island's fault, or nobody's that could be named.
        """
        digest = digest_vector(mean, self.outer.fragment_of(planned.number).partition, self.island)
        outcome = planned.outcome or clock.wait(lambda: self._commit(planned, digest))
        fault = self._doubts.judge(planned, digest, outcome)
        if fault:
            self._engine_of(planned.number).close()
            raise self._diverged(planned, fault)
        if outcome.kind == "abort":
            self._engine_of(planned.number).settled(planned, outcome, None)
            self._offers.forget(outcome.unusable)
            return None
        if outcome.mean != digest:
            self._engine_of(planned.number).close()
            return None
        clock.averaged()
        self._snapshots.wait()  # which reads what changes now
        return outcome

    def _complete(self, planned: PlannedRound, outcome: OutcomeRecord, mean: torch.Tensor) -> None:
        self._engine_of(planned.number).settled(planned, outcome, mean)
        self.last = planned, outcome
        self.island.on_leader(lambda: self._need_council().remember(planned.number, planned.plan))

    def _part_in(self, planned: PlannedRound, is_resuming: bool) -> Part:
        """How much of this island's progress a round uses up."""
        own = planned.place_of(self.config.island)
        if own is None:
            return Part.WHOLE if str(self.config.island) in planned.plan.left_out else Part.NONE
        is_of_another_process = not self._offers.is_own(planned.offers[own])  # whose steps this one has made again
        is_all = is_resuming or is_of_another_process or self._holds_all(planned.offers[own])
        return Part.WHOLE if is_all else Part.SOME

    def _holds_all(self, offer: OfferRecord) -> bool:
        """Whether an offer holds just the progress that this island has made."""
        return self._offers.is_newest(offer) and self._offers.holds(self.outer.round + 1, self.outer.steps)

    def _check_state(self, planned: PlannedRound) -> None:
        if planned.plan.state != self.outer.outer_hash:
            raise DivergedError(
                f"round {planned.number}: this island's outer parameters ({self.outer.outer_hash[:12]}) are not those "
                f"that all agreed on ({planned.plan.state[:12]}): suspect memory or a changed library. It ends before "
                "it spoils the others; started again, it resumes from its last checkpoint"
            )

    def _diverged(self, planned: PlannedRound, fault: str) -> DivergedError:
        """The error for a round of which this island does not find the average; its state may be worth keeping."""
        fragment = self.outer.fragment_of(planned.number)
        digest = fragment.digest
        fragment.make_digest(self.island)
        is_sound, fragment.digest = fragment.digest == digest, digest
        what_now = "started again, it resumes from its checkpoint"
        return DivergedError(
            f"round {planned.number}: {fault}: suspect memory, or a library or processor that differs. This island "
            f"ends before it spoils the others; {what_now}",
            is_sound,
        )

    def _commit(self, planned: PlannedRound, digest: str) -> OutcomeRecord:
        attempt = Attempt(planned.number, planned.attempt, planned.plan)
        raw = self.island.on_leader(lambda: self._need_council().commit(attempt, digest).model_dump())
        return OutcomeRecord.model_validate(raw)

    def _on_unusable(self, planned: PlannedRound, error: PayloadError) -> None:
        """Before the round is decided: aborts the attempt."""
        named = [
            participant.offer
            for participant, offer in zip(planned.plan.participants, planned.offers, strict=True)
            if any(info.get("path") == error.path for info in offer.objects)
        ]
        if not named:
            raise error
        if self.island.is_leader:
            logger.warning("round %d is tried again: %s", planned.number, error)
        attempt = Attempt(planned.number, planned.attempt, planned.plan)
        raw = self.island.on_leader(lambda: self._need_council().abort(attempt, named[0], str(error)).model_dump())
        self._offers.forget(OutcomeRecord.model_validate(raw).unusable)

    def _on_lost(self, planned: PlannedRound, error: IslandLostError | DamagedTransferError) -> None:
        """A participant did not answer, or what it sent came damaged: aborts, unless others have completed it."""
        if self.island.is_leader:
            logger.warning("round %d is tried again: %s", planned.number, error)
        places = [place for place in map(planned.place_of, error.islands) if place is not None]
        offer = planned.plan.participants[places[0]].offer if places else ""
        attempt = Attempt(planned.number, planned.attempt, planned.plan)
        self.island.on_leader(lambda: self._need_council().abort(attempt, offer, str(error)).model_dump())

    def _await_outcome(self, planned: PlannedRound) -> None:
        """Returns when an attempt that this island has no part in is decided.

        Raises:
            IslandLostError: that takes too long.
        """
        attempt = Attempt(planned.number, planned.attempt, planned.plan)
        self.island.on_leader(
            lambda: self._need_council().await_outcome(attempt, planned.offers, self.config.exchange_timeout)
        )

    def is_average_missing(self) -> bool:
        """Whether nobody can catch up with the last round, and it is on this island, of those left, to change that.

        Asked on the leader only.
        """
        if self.last is None or not self._engines[0].needs_presence:
            return False
        planned, outcome = self.last
        alive = self._need_council().processes()
        left = {offer.island for offer in planned.offers if alive.get(offer.island) == offer.claim}
        if self.config.island != (outcome.by if outcome.by in left else min(left, default=-1)):
            return False
        return not self._engine_of(planned.number).has_average(planned)

    def _install(self, planned: PlannedRound, mean: torch.Tensor, part: Part, used: torch.Tensor | None) -> None:
        """Takes the outer step; this island's progress is used up, partly used, or stays its own."""
        own = planned.place_of(self.config.island)
        if part is Part.WHOLE:
            self.outer.install(mean, took_part=own is not None, rates=planned.plan.rates)
            return
        fragment = self.outer.current
        steps = planned.offers[own].steps if part is Part.SOME and own is not None else 0
        if steps and used is None:
            self.outer.shrink(fragment, steps)
        self.outer.install_beside(mean, used, steps, planned.plan.rates)
        if steps and used is not None:  # it had offered that before it gave up waiting and trained on
            fragment.count_down(steps)

    def _used_of(self, planned: PlannedRound, own: int | None) -> torch.Tensor | None:
        """The part of this island's progress that a round uses."""
        assert own is not None
        return self.island.on_all(lambda: self._engine_of(planned.number).values_of(planned.offers[own]))

    def _report(
        self, planned: PlannedRound, clock: SyncClock, sums: CosineSums, square: float, weight: float, own: int | None
    ) -> SyncReport:
        traffic = clock.traffic
        sent, received, dot, mean = self.island.sum([traffic.bytes_sent, traffic.bytes_received, sums.dot, sums.mean])
        weights = [participant.weight for participant in planned.plan.participants]
        return SyncReport(
            round=planned.number,
            participants=[participant.island for participant in planned.plan.participants],
            seconds_computing=clock.computing,
            seconds_waiting=clock.waiting,
            seconds_exchanging=clock.exchanging,
            seconds_applying=clock.applying,
            bytes_sent=int(sent),
            bytes_received=int(received),
            pseudo_gradient_norm=math.sqrt(square) if math.isfinite(square) else math.nan,
            cosine=None
            if own is None or self.outer.codec.needs_feedback
            else cosine_to_others(dot, square, mean, weights[own] / sum(weights)),
            weight=weight,
            outer_hash=self.outer.outer_hash,
            fragment=self.outer.number_of(planned.number),
        )

    def _need_council(self) -> Council:
        assert self._council is not None, "only the leader asks"
        return self._council
