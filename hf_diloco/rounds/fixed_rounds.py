"""Rounds among islands that are all there: whoever has arrived waits for the others, and one lost ends the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DamagedTransferError, DiLoCoError, DivergedError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition
from hf_diloco.membership.round_records import OfferRecord
from hf_diloco.membership.unanimity import MAX_TRIES, Unanimity
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.round import Contribution, LaneStats, RoundRepeated, Rounds, SyncReport
from hf_diloco.rounds.round_plan import PlannedRound, Plans
from hf_diloco.transport.base import Exchange, Traffic


class FixedRounds(Rounds):
    """Offer, average, vote.

    Args:
        config, outer, island: see `Rounds`.
        unanimity: decides rounds; on the island's leader only.
        exchanges: of this rank's lanes, in their order; may be filled later.

    Attributes:
        buffers: of the inner optimizer that are averaged in each round for which training waits.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        outer: OuterState,
        island: IslandGroup,
        unanimity: Unanimity | None,
        exchanges: Sequence[Exchange],
    ) -> None:
        super().__init__(config, outer, island, Plans(outer, island, unanimity))
        self._exchanges = exchanges
        self.buffers: list[Partition] = []

    def carry_out(self, own: Contribution) -> SyncReport:
        """See `Rounds.carry_out`; the average takes the place of `own.delta`.

        Raises:
            RoundRepeated: all islands are to take the round again, from fresh captures.
            DiLoCoError: it does not take place. The exchanges are closed: those who yet wait for this island see it.
        """
        try:
            report = self.attempt(self.agree(own), own, own.delta)
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

    def make_offer(self, own: Contribution) -> OfferRecord:
        """See `Rounds.make_offer`."""
        for exchange, part in self._lanes(own.fragment.partition, own.delta):
            exchange.prepare(part, self.outer.codec)
        return own.offer(self.config.island, 1, own.number, self.outer.outer_hash)

    def average(self, plan: PlannedRound, own: Contribution, mean: torch.Tensor) -> LaneStats | None:
        """Averages all lanes in place. A failure is told to the other islands, then raised on every rank."""
        stats = LaneStats()
        partition = own.fragment.partition
        try:
            own.clock.traffic += self.island.on_all(partial(self._average_lanes, plan, partition, mean, stats))
        except DiLoCoError as failure:
            # Whoever sent it, also one that is left out: all take the round again.
            blamed = plan.participants if isinstance(failure, DamagedTransferError) else ()
            if self.plans.abort(plan, blamed, str(failure)).is_split:
                self.say_again(own.number, failure)
                return None
            raise
        stats.digest = partition.combine_digests(stats.digests, self.island)
        return stats

    def _average_lanes(
        self, plan: PlannedRound, partition: Partition, mean: torch.Tensor, stats: LaneStats
    ) -> Traffic:
        traffic = Traffic()
        damage: DamagedTransferError | None = None
        for exchange, part in self._lanes(partition, mean):
            stats.begin_lane()
            try:
                traffic += exchange.average(part, self._weights(plan), self.outer.codec, stats.observe)
            except DamagedTransferError as error:  # the others wait for the lanes that are left
                damage = error
        if damage is not None:
            raise damage
        return traffic

    def _weights(self, plan: PlannedRound) -> list[float]:
        """Those of all islands; 0 for who is left out."""
        weights = plan.participants
        return [weights.get(island, 0.0) for island in range(self.config.num_islands)]

    def commit(self, plan: PlannedRound, own: Contribution, mean: torch.Tensor, digest: str) -> bool:
        """See `Rounds.commit`.

        Raises:
            DivergedError: the islands' averages differ, and have before.
        """
        with own.clock.counts("waiting"):
            outcome = self.plans.commit(plan, digest)
        if outcome.kind == "commit":
            return True
        if plan.attempt + 1 >= MAX_TRIES:
            raise DivergedError(
                f"round {plan.number} was aborted again and again: {outcome.reason}. Each writes a checkpoint of its "
                "state before the round; start all islands again",
                is_state_sound=True,
            )
        self.say_again(plan.number, outcome.reason)
        return False

    @contextmanager
    def progress(self, plan: PlannedRound, own: Contribution) -> Iterator[None]:
        """See `Rounds.progress`: it is used up, also that of who is left out."""
        yield
        if own.is_begun:
            return
        self.outer.drop_progress(own.fragment)
        if self.buffers:
            self._average_buffers(plan, own)
        self.outer.rest(own.fragment)

    def _average_buffers(self, plan: PlannedRound, own: Contribution) -> None:
        """Each of the inner optimizer's buffers becomes its mean over the islands that took part."""
        vector = own.fragment.scratch
        for partition in self.buffers:
            partition.gather(vector)
            own.clock.traffic += self.island.on_all(
                partial(self.average_exactly, partition, vector, self._weights(plan))
            )
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
