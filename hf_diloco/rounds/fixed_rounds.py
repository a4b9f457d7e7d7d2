"""Rounds among islands that are all there: whoever has arrived waits for the others, and one lost ends the run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import DamagedTransferError, DiLoCoError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition
from hf_diloco.membership.history import RunHistory
from hf_diloco.membership.ledger import Ledger
from hf_diloco.membership.records import (
    ArrivalRecord,
    VoteRecord,
    agree_on_rates,
    parse_records,
    parse_some,
    weigh,
    why_aborted,
)
from hf_diloco.membership.round_records import Attempt, Participant, PlanRecord
from hf_diloco.outer.digests import combine_digests
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measure import LaneStats, SyncReport
from hf_diloco.rounds.round import Contribution, RoundRepeated, Rounds
from hf_diloco.transport.base import Exchange, Traffic

logger = logging.getLogger("hf_diloco")

_LEFT_OUT = "not finite, or no examples behind it"


@dataclass(frozen=True)
class ArrivedRound:
    """A round at which all islands have arrived.

    Attributes:
        number: of the round.
        arrivals: what each island has said.
        weights: of all islands; 0 for those that are left out.
        rates: the inner learning rates agreed on.
    """

    number: int
    arrivals: list[ArrivalRecord]
    weights: list[float]
    rates: list[float]

    @property
    def participants(self) -> dict[int, float]:
        """The islands that are not left out, with their weights."""
        return {island: weight for island, weight in enumerate(self.weights) if weight > 0}

    def describe(self) -> PlanRecord:
        """What is kept of it."""
        participants = [
            Participant(offer="", island=island, weight=weight, norm=self.arrivals[island].norm)
            for island, weight in self.participants.items()
        ]
        left_out = {str(island): _LEFT_OUT for island, weight in enumerate(self.weights) if not weight}
        return PlanRecord(
            by=0, state=self.arrivals[0].digest, participants=participants, left_out=left_out, rates=self.rates
        )


class FixedRounds(Rounds[ArrivedRound]):
    """Arrive, average, vote.

    Args:
        config, outer, island: see `Rounds`.
        ledger: where the islands' leaders meet.
        exchanges: of this rank's lanes, in their order; may be filled later.
        history: is told of each round, on island 0's leader.

    Attributes:
        buffers: of the inner optimizer that are averaged in each round for which training waits.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        outer: OuterState,
        island: IslandGroup,
        ledger: Ledger,
        exchanges: Sequence[Exchange],
        history: RunHistory | None = None,
    ) -> None:
        super().__init__(config, outer, island)
        self._ledger = ledger
        self._history = history
        self._exchanges = exchanges
        self.buffers: list[Partition] = []

    def carry_out(self, own: Contribution) -> SyncReport:
        """See `Rounds.carry_out`; the average takes the place of `own.delta`.

        Raises:
            RoundRepeated: all islands are to take the round again, from fresh captures.
            DiLoCoError: it does not take place. The exchanges are closed: those who yet wait for this island see it.
        """
        try:
            with own.clock.counts("waiting"):
                arrived = self._arrive(own)
            report = self.attempt(arrived, own, own.delta)
        except DiLoCoError:
            for exchange in list(self._exchanges):
                exchange.close()
            raise
        if report is None:
            raise RoundRepeated(f"round {own.number} is taken again")
        self._expect(own.number + 1)
        return report

    def _expect(self, number: int) -> None:
        """Lets what the others send first in a round come as soon as they have it."""
        sizes = self.outer.fragment_of(number).partition.lane_sizes
        for exchange, size in zip(self._exchanges, sizes, strict=False):  # none if the session is closing
            exchange.expect(size, self.outer.codec)

    def _arrive(self, own: Contribution) -> ArrivedRound:
        """Waits for all islands."""
        for exchange, part in self._lanes(own.fragment.partition, own.delta):
            exchange.prepare(part, self.outer.codec)
        record = ArrivalRecord(
            weight=own.weight if own.is_finite else 0.0,
            norm=own.norm if own.is_finite else 0.0,
            digest=self.outer.outer_hash,
            rates=list(own.rates),
        )
        raw = self.island.on_leader(
            lambda: self._ledger.arrive(own.number, record.model_dump(), self.config.sync_timeout)
        )
        records = parse_records(ArrivalRecord, raw)
        weights = weigh(records, own.number)
        left_out = [number for number, weight in enumerate(weights) if weight == 0]
        if left_out and self.island.is_leader:
            logger.warning(
                "round %d: the pseudo-gradient of islands %s is left out: it is not finite, or has no examples behind "
                "it; they continue from the others' average",
                own.number,
                left_out,
            )
        rates = agree_on_rates([record.rates for record in records if record.weight > 0])
        return ArrivedRound(own.number, records, weights, rates)

    def average(self, plan: ArrivedRound, own: Contribution, mean: torch.Tensor) -> LaneStats | None:
        """Averages all lanes in place. A failure is told to the other islands, then raised on every rank."""
        stats = LaneStats()
        partition = own.fragment.partition
        try:
            own.clock.traffic += self.island.on_all(partial(self._average_lanes, plan, partition, mean, stats))
        except DiLoCoError as failure:
            is_damage = isinstance(failure, DamagedTransferError)
            vote = VoteRecord(ok=False, reason=str(failure), again=is_damage)
            _, _, is_repeated = self.island.on_leader(lambda: self._settle(own.number, vote))
            if is_repeated:
                self._say_again(own.number, str(failure))
                return None
            self._check_plan(own.number)
            raise
        stats.digest = combine_digests(stats.digests, partition, self.island)
        return stats

    def _average_lanes(
        self, plan: ArrivedRound, partition: Partition, mean: torch.Tensor, stats: LaneStats
    ) -> Traffic:
        traffic = Traffic()
        damage: DamagedTransferError | None = None
        for exchange, part in self._lanes(partition, mean):
            stats.begin_lane()
            try:
                traffic += exchange.average(part, plan.weights, self.outer.codec, stats.observe)
            except DamagedTransferError as error:  # the others wait for the lanes that are left
                damage = error
        if damage is not None:
            raise damage
        return traffic

    def commit(self, plan: ArrivedRound, own: Contribution, mean: torch.Tensor, digest: str) -> bool:
        """See `Rounds.commit`; a round that is neither committed nor to be tried again is an error on all islands."""
        vote = VoteRecord(ok=True, digest=digest)
        with own.clock.counts("waiting"):
            committed, raw, is_repeated = self.island.on_leader(lambda: self._settle(plan.number, vote))
        if committed:
            if self._history:
                attempt = Attempt(plan.number, self._ledger.tries(plan.number))
                self._history.note(attempt.path, plan.describe(), digest)
            return True
        votes = parse_some(VoteRecord, raw)
        if not is_repeated:
            self._check_plan(plan.number, set(range(self.config.num_islands)) - votes.keys())
            raise why_aborted(votes, plan.number, self.config.num_islands)
        reasons = {f"island {number}: {other.reason}" for number, other in votes.items() if not other.ok}
        self._say_again(plan.number, "; ".join(sorted(reasons)) or "the islands computed different averages")
        return False

    def _settle(self, number: int, vote: VoteRecord) -> tuple[bool, dict[str, dict[str, Any]], bool]:
        """Whether the round is committed, the votes, and whether all take it again."""
        before = self._ledger.tries(number)
        committed, votes = self._ledger.settle(number, vote.model_dump(), self.config.exchange_timeout)
        return committed, votes, self._ledger.tries(number) > before

    def _check_plan(self, number: int, silent: Collection[int] | None = None) -> None:
        """Raises what is known of a round that failed: its values may all have come from an island that then left."""
        self.island.on_leader(lambda: self._ledger.check_plan(number, self.config.sync_timeout, silent))

    def _say_again(self, number: int, reason: str) -> None:
        if self.island.is_leader:
            logger.warning("round %d is taken again: %s", number, reason)

    @contextmanager
    def progress(self, plan: ArrivedRound, own: Contribution) -> Iterator[None]:
        """See `Rounds.progress`: it is used up, also that of who is left out."""
        yield
        if own.is_begun:
            return
        self.outer.drop_progress(own.fragment)
        if self.buffers:
            self._average_buffers(plan, own)
        self.outer.rest(own.fragment)

    def _average_buffers(self, plan: ArrivedRound, own: Contribution) -> None:
        """Each of the inner optimizer's buffers becomes its mean over the islands that took part."""
        vector = own.fragment.scratch
        for partition in self.buffers:
            partition.gather(vector)
            own.clock.traffic += self.island.on_all(partial(self.average_exactly, partition, vector, plan.weights))
            partition.scatter(vector)

    def average_exactly(self, partition: Partition, vector: torch.Tensor, weights: Sequence[float]) -> Traffic:
        """Averages a vector of this rank's over the islands in fp32, outside of any round."""
        traffic = Traffic()
        for exchange, part in self._lanes(partition, vector):
            traffic += exchange.average(part, weights, CODECS["fp32"])
        return traffic

    def broadcast(self, partition: Partition, vector: torch.Tensor) -> None:
        """Gives all islands island 0's values of a vector of this rank's."""
        for exchange, part in self._lanes(partition, vector):
            exchange.broadcast(part, source=0)

    def _lanes(self, partition: Partition, vector: torch.Tensor) -> Iterator[tuple[Exchange, torch.Tensor]]:
        return zip(self._exchanges, partition.split(vector), strict=True)
