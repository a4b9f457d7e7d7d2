"""Rounds among islands that come and go: offer, plan, average the planned offers, vote, outcome.

All values that a plan needs are in the store, so a round is carried out in the same way in time or late: average the
planned offers, check that the average is the agreed one, take the outer step. The difference is in the treatment of
this island's own progress since it last took part:

    all of it is in the round   consumed: the masters become the outer parameters
    part of it is               the rest stays, on top of the new outer parameters
    none of it is               it stays, on top of the new outer parameters, and goes into a later round
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hf_diloco.errors import DamagedTransferError, DiLoCoError, DivergedError, IslandLostError, PayloadError
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.membership.voting import Doubts
from hf_diloco.outer.fragment import Fragment
from hf_diloco.rounds.catch_up import Archive
from hf_diloco.rounds.engines import Engine, Offers
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution, Part, RoundPassed, Rounds, SyncClock, capture
from hf_diloco.store.log import Refusals
from hf_diloco.transport.base import AverageStats
from hf_diloco.utils.text import name_all

MAX_IN_A_ROW = 4
"""Consecutive attempts at a round. If all are aborted, the cause may persist: all islands miss the round and train on,
and do so again after each further aborted attempt."""


class ElasticRounds(Rounds):
    """Offers and carries out rounds. Every method is collective over the island's ranks.

    Attributes:
        archive: finished rounds, and this rank's side of the exchange.
        refused: islands whose contributions were left out of rounds of this process, with the last reason.
    """

    decider: Quorum

    def __init__(self, archive: Archive, incarnation: int) -> None:
        super().__init__(archive.outer, archive.island, archive.quorum)
        self.archive = archive
        self._is_direct = archive.is_direct
        self._engine_of = archive.engine_of
        self._offers = Offers(self.config.island, incarnation, self.island)
        self._doubts = Doubts(self.island.is_leader)
        self.refused = Refusals()
        self._links_at_look = ""
        self._lent: list[tuple[Fragment, torch.Tensor]] = []

    # Finding the next round

    def find(self, is_resuming: bool = False) -> Attempt | None:
        """Returns the next round, if it has a plan already. Skips a round with corrupt records; see `Archive.skip`.

        Args:
            is_resuming: this island's progress comes from a checkpoint, and is part of its earlier offers.
        """
        while True:
            number = self.outer.round + 1
            self._links_at_look = self._engine_of(number).links
            try:
                planned = self.island.on_leader(partial(self._find, number), Attempt)
                if planned:
                    self.check_state(planned)
                return planned
            except PayloadError as error:
                self.wait_for_uploads()
                self.archive.skip(number, error, is_resuming, is_resuming or self._offers.has_offered(number))

    def _find(self, number: int) -> Attempt | None:
        return self.decider.find(number, self.outer.outer_hash)

    def presume_open(self) -> None:
        """Calls `Quorum.presume_open` for the next round."""
        if self.island.is_leader:
            self.decider.presume_open(self.outer.round + 1)

    @property
    def goes_on(self) -> bool:
        """Whether this island can offer for the next round without reading the store first.

        It took the last round over connections that were open before, so the same processes are likely to take the
        next one; if others have planned that round without this island, it sees the plan after its offer. An island
        that had to upload the last average always reads the store, to check that the average is there.
        """
        number, last = self.outer.round + 1, self.archive.last
        links = self._engine_of(number).links if self._is_direct else ""
        if not links or links != self._links_at_look or last is None or self._offers.has_offered(number):
            return False
        planned, outcome = last
        return planned.round == self.outer.round and outcome.by != self.config.island

    def make_offer(self, own: Contribution) -> OfferRecord:
        return self._offers.make(own, self._engine_of(own.number), self.outer.outer_hash)

    def capture(self, clock: SyncClock) -> Contribution:
        """See `round.capture`; first waits for the scratch vector, and installs pending outer parameters."""
        self.wait_for_uploads()
        self.outer.install(self.outer.current)
        return capture(self.outer, clock)

    def rescue_average(self) -> None:
        """Calls `Archive.rescue_average` after this island's uploads of averages have ended."""
        if self._is_direct:
            self.wait_for_uploads()
            self.archive.rescue_average()

    def publish_and_leave(self) -> None:
        """Offers this island's progress for the next round without waiting for the round, because it leaves."""
        number = self.outer.round + 1
        if self._is_direct or self._offers.holds(number, self.outer.steps):
            return
        own = self.capture(SyncClock())
        own.complete(self.island)
        offer = self.make_offer(own)

        def leave() -> None:
            attempt = self.decider.current(number)
            if attempt.plan is None:
                self.decider.offer(attempt, offer)

        self.island.on_leader(leave)

    def wait_for_uploads(self) -> None:
        """Waits until no upload of an average is in flight; then its vector may be overwritten."""
        for engine in self.archive.engines:
            engine.wait_for_uploads()
        while self._lent:
            fragment, vector = self._lent.pop()
            fragment.take_back(vector)

    def close(self) -> None:
        """Closes all connections, after all uploads to the store have ended."""
        self.archive.snapshots.wait()
        self.wait_for_uploads()
        for engine in self.archive.engines:
            engine.close()

    # Carrying out

    def carry_out(self, own: Contribution) -> SyncReport:
        """See `Rounds.carry_out`; for a round behind the inner steps, with as many attempts as needed.

        Raises:
            RoundPassed: the round takes place, but without this contribution; use `follow` to carry it out.
            IslandLostError, StoreError: the round does not take place. Nothing was changed.
        """
        self.wait_for_uploads()
        self.rescue_average()
        mean = self._lend(own)  # another attempt needs the pseudo-gradient again
        while True:
            planned = self.agree(own)
            is_late = self._is_direct and planned.is_committed
            if is_late or not self._offers.is_taken(planned):
                raise RoundPassed(f"round {own.number} takes place without the offer of this island")
            try:
                report = self.attempt(planned, own, mean)
            except PayloadError as error:  # it was decided so long ago that its values are gone
                raise RoundPassed(str(error)) from None
            if report is not None:
                self.archive.write_snapshot_if_due()
                return report

    def follow(
        self, planned: Attempt, clock: SyncClock, is_resuming: bool = False, own: Contribution | None = None
    ) -> SyncReport | None:
        """Carries out a planned round, with this island or without it; returns None if the attempt failed.

        Args:
            clock: measures this synchronisation.
            is_resuming: this island's progress comes from a checkpoint, and is part of its earlier offers.
            own: its progress, if that was captured just now; saves reading the model again.
        """
        if own is None:
            self.wait_for_uploads()
            self.outer.install(self.outer.current)
        steps = self.outer.steps
        part = self._offers.part_in(planned, steps, is_resuming)
        try:
            if planned.is_committed:
                with clock.counts("waiting"):
                    is_there = self.island.on_leader(partial(self.archive.await_average, planned))
                if not is_there:
                    holders = name_all(planned.participants)
                    raise PayloadError(
                        f"the average of round {planned.round}, taken by {holders}, is not in the store"
                    )
            elif self._is_direct and not self._offers.is_all_taken(planned, steps):
                patience = self.config.exchange_timeout
                with clock.counts("waiting"):
                    outcome = self.island.on_leader(
                        lambda: self.decider.await_outcome(planned, patience), OutcomeRecord
                    )
                self._check_patience(planned, outcome)
                return None
            own = own or capture(self.outer, clock)
            own.complete(self.island, with_residual=part is Part.WHOLE)
            own.part = part
            # The average may overwrite progress that is consumed, but no other progress. Where rounds overlap with
            # training, the next one may need the scratch vector while this average is still being uploaded.
            if self._is_direct and self.config.overlaps:
                mean = self._lend(own)
            else:
                mean = own.delta if part is Part.WHOLE else torch.empty_like(own.delta)
            return self.attempt(planned, own, mean)
        except PayloadError as error:
            self.archive.skip_to_snapshot(planned, error, part, is_resuming)
            return None

    def _lend(self, own: Contribution) -> torch.Tensor:
        """Returns a second vector beside the pseudo-gradient, valid until `wait_for_uploads`."""
        mean = own.fragment.lend()
        self._lent.append((own.fragment, mean))
        return mean

    def average(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> AverageStats | None:
        """See `Rounds.average`; aborts the attempt if the values cannot be averaged.

        Raises:
            PayloadError: this island cannot average the values, but the round is committed.
        """
        engine = self._engine_of(planned.round)
        stats = AverageStats()
        try:
            self._average(engine, planned, own, mean, stats)
        except DiLoCoError as error:
            engine.close()
            if isinstance(error, PayloadError) and not planned.is_committed:
                self._on_unusable(planned, error)
            elif isinstance(error, IslandLostError | DamagedTransferError):
                self._on_lost(planned, error)
            else:
                raise
            return None
        stats.digest = self.outer.fragment_of(planned.round).partition.digest(mean, self.island)
        return stats

    def _average(
        self, engine: Engine, planned: Attempt, own: Contribution, mean: torch.Tensor, stats: AverageStats
    ) -> None:
        # After a disagreement, this island reads also its own values from the store.
        may_use_memory = self._is_direct or not self._doubts.has(planned.round)
        values = own.delta if may_use_memory and self._offers.is_all_taken(planned, own.steps) else None
        own.clock.traffic += self.island.on_all(lambda: engine.average(planned, mean, values, stats.observe))
        if self._is_direct and len(planned.offers) == 1 and not planned.is_committed:
            self.outer.fragment_of(planned.round).encode_alone(mean)
        if own.part is Part.SOME and (offer := planned.offer_by(self.config.island)):
            own.used = self.island.on_all(lambda: engine.values_of(offer))

    def apply_outcome(
        self, planned: Attempt, own: Contribution, mean: torch.Tensor, digest: str, outcome: OutcomeRecord
    ) -> bool:
        """See `Rounds.apply_outcome`; returns False if the attempt is aborted, or committed with another average.

        Raises:
            DivergedError: averages have differed repeatedly, by this island's fault or for an unknown reason.
        """
        engine = self._engine_of(planned.round)
        fault = self._doubts.judge(planned, digest, outcome)
        if fault:
            engine.close()
            raise self._diverged(planned, fault)
        if outcome.kind == "abort":
            if not outcome.is_split:  # else `judge` has said so
                self.say_again(planned.round, outcome.reason)
            engine.on_outcome(planned, outcome, None)
            self._offers.forget(outcome.unusable)
            self._check_patience(planned, outcome)
            return False
        if outcome.mean != digest:
            engine.close()
            return False
        self.archive.snapshots.wait()  # reads the state that changes now
        engine.on_outcome(planned, outcome, mean)
        self.refused.add({int(island): reason for island, reason in planned.agreed.left_out.items()})
        self.archive.complete(planned, outcome)
        if self.island.is_leader:
            self.decider.remember(planned)
        return True

    @contextmanager
    def progress(self, planned: Attempt, own: Contribution) -> Iterator[None]:
        """See `Rounds.progress`: the round consumes the progress, part of it, or none."""
        if own.is_begun:
            yield
            return
        fragment = own.fragment
        if own.part is Part.WHOLE:
            yield
            self.outer.drop_progress(fragment)
            return
        offer = planned.offer_by(self.config.island)
        steps = offer.steps if own.part is Part.SOME and offer else 0
        if steps and own.used is None:
            self.outer.shrink(fragment, steps)
        with self.outer.keeping_progress(fragment, own.used, steps):
            yield
        if steps and own.used is not None:  # offered before it stopped waiting and trained on
            fragment.count_down(steps)

    def _diverged(self, planned: Attempt, fault: str) -> DivergedError:
        """Returns the error for an average that this island cannot reproduce; it says whether its state is sound."""
        fragment = self.outer.fragment_of(planned.round)
        digest = fragment.digest
        fragment.make_digest(self.island)
        is_sound, fragment.digest = fragment.digest == digest, digest
        return DivergedError(
            f"round {planned.round}: {fault}: suspect memory, or a library or processor that differs. This island "
            "ends before it spoils the others; started again, it resumes from its checkpoint",
            is_sound,
        )

    def _on_unusable(self, planned: Attempt, error: PayloadError) -> None:
        """Aborts an undecided attempt because a participant's values are unusable."""
        named = [
            offer.island
            for offer in planned.offers
            if any(str(info.get("path")) == error.path for info in offer.objects)
        ]
        self.say_again(planned.round, error)
        outcome = self.abort(planned, named[:1], str(error))
        if outcome.kind == "abort":  # else others used and deleted it while this island hung
            self.refused.add(dict.fromkeys(named[:1], str(error)))
        self._offers.forget(outcome.unusable)
        self._check_patience(planned, outcome)

    def _on_lost(self, planned: Attempt, error: IslandLostError | DamagedTransferError) -> None:
        """Aborts an undecided attempt after a participant was lost or refused, or its transfer was corrupt."""
        self.say_again(planned.round, error)
        outcome = self.abort(planned, error.islands, str(error))
        if isinstance(error, DamagedTransferError):
            self.refused.add(dict.fromkeys(error.islands, str(error)))
        self._check_patience(planned, outcome)

    def _check_patience(self, planned: Attempt, outcome: OutcomeRecord) -> None:
        """Raises `IslandLostError`, so that training continues, if the last attempt for now was aborted."""
        num_attempts = planned.number + 1
        if outcome.kind == "abort" and not outcome.is_split and num_attempts >= MAX_IN_A_ROW:
            raise IslandLostError(f"{num_attempts} attempts failed, the last one because: {outcome.reason}")
