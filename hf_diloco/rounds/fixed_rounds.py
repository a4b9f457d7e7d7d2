"""Rounds of fixed membership: every round waits for all islands, and the loss of one ends the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import DamagedTransferError, DiLoCoError, DivergedError, IslandLostError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.membership.unanimity import MAX_TRIES, Unanimity
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution, FurtherVector, RoundRepeated, Rounds
from hf_diloco.transport.base import Exchange, LaneStats


class FixedRounds(Rounds):
    """Carries out rounds in which all islands take part.

    Args:
        outer, island, unanimity: see `Rounds`.
        exchanges: of this rank's lanes, in their order; may be filled later.

    Attributes:
        buffers: of the inner optimizer, averaged with the pseudo-gradient in each round for which training waits.
    """

    decider: Unanimity

    def __init__(
        self,
        outer: OuterState,
        island: IslandGroup,
        unanimity: Unanimity | None,
        exchanges: Sequence[Exchange],
    ) -> None:
        super().__init__(outer, island, unanimity)
        self._exchanges = exchanges
        self.buffers: list[Partition] = []

    def carry_out(self, own: Contribution) -> SyncReport:
        """See `Rounds.carry_out`; the average replaces `own.delta` in place.

        Raises:
            RoundRepeated: all islands repeat the round, from fresh captures.
            DiLoCoError: the round does not take place. The exchanges are closed, so that waiting peers notice.
        """
        try:
            report = self.attempt(self.agree(own), own, own.delta)
        except DiLoCoError:
            for exchange in list(self._exchanges):
                exchange.close()
            raise
        if report is None:
            raise RoundRepeated(f"retrying round {own.number}")
        self._expect(own.number + 1)
        return report

    def _expect(self, number: int) -> None:
        """Lets the peers' first messages of round `number` arrive before this island is ready for it."""
        sizes = self.outer.fragment_of(number).partition.lane_sizes
        for exchange, size in zip(self._exchanges, sizes, strict=False):  # none if the session is closing
            exchange.expect(size, self.outer.codec)

    def make_offer(self, own: Contribution) -> OfferRecord:
        for exchange, part in self._lanes(own.fragment.partition, own.delta):
            exchange.prepare(part, self.outer.codec)
        return own.offer(self.config.island, 1, own.number, self.outer.outer_hash)

    def average(self, planned: Attempt, own: Contribution, mean: torch.Tensor) -> LaneStats | None:
        """Averages all lanes in place, then the further vectors. Reports a failure to the other islands, then raises
        it on every rank."""
        if not own.is_begun:
            own.further_vectors = [FurtherVector(partition, partial(_read, partition)) for partition in self.buffers]
        try:
            stats, damage = self._average(planned, own, own.fragment.partition, mean, self.outer.codec)
            for one in own.further_vectors:  # even after damage: peers wait for it
                one.values = one.read()
                of_one, later = self._average(planned, own, one.partition, one.values, CODECS["fp32"])
                stats.digest, damage = stats.digest + of_one.digest, damage or later
            if damage:
                raise damage
        except DiLoCoError as failure:
            if self.island.is_leader and isinstance(failure, IslandLostError):
                self.decider.gone.update(failure.islands)
            # Whichever island sent the damage, even one that is left out: all repeat the round.
            blamed = planned.participants if isinstance(failure, DamagedTransferError) else ()
            if self.abort(planned, blamed, str(failure)).is_split:
                self.say_again(own.number, failure)
                return None
            raise
        return stats

    def _average(
        self, planned: Attempt, own: Contribution, partition: Partition, values: torch.Tensor, codec: Codec
    ) -> tuple[LaneStats, DamagedTransferError | None]:
        """Averages this rank's part of a vector in place.

        Returns:
            The measurements, and the error if any rank of the island received a corrupt transfer.
        """
        stats, damage = LaneStats(), None
        taken = planned.participants
        weights = [taken.get(island, 0.0) for island in range(self.config.num_islands)]  # 0: left out

        def average_lanes() -> None:
            damage: DamagedTransferError | None = None
            for exchange, part in self._lanes(partition, values):
                stats.begin_lane()
                try:
                    own.clock.traffic += exchange.average(part, weights, codec, stats.observe)
                except DamagedTransferError as error:  # peers wait for the remaining lanes
                    damage = error
            if damage is not None:
                raise damage

        try:
            self.island.on_all(average_lanes)
        except DamagedTransferError as error:
            damage = error
        stats.digest = partition.combine_digests(stats.digests, self.island)
        return stats, damage

    def apply_outcome(
        self, planned: Attempt, own: Contribution, mean: torch.Tensor, digest: str, outcome: OutcomeRecord
    ) -> bool:
        """See `Rounds.apply_outcome`.

        Raises:
            DivergedError: the islands' averages differ or were corrupt in all `MAX_TRIES` attempts.
        """
        if outcome.kind == "commit":
            return True
        if planned.number + 1 >= MAX_TRIES:
            raise DivergedError(
                f"round {planned.round} was aborted again and again: {outcome.reason}. Each island writes a "
                "checkpoint of its state before the round; start all islands again",
                is_state_sound=True,
            )
        self.say_again(planned.round, outcome.reason)
        return False

    @contextmanager
    def progress(self, planned: Attempt, own: Contribution) -> Iterator[None]:
        """See `Rounds.progress`: the round consumes all progress, also of islands that are left out of the average."""
        yield
        if own.is_begun:
            return
        self.outer.drop_progress(own.fragment)
        for one in own.further_vectors:
            one.partition.scatter(one.values)
        self.outer.release_scratch(own.fragment)

    def broadcast_parameters(self) -> None:
        """Broadcasts island 0's outer parameters to all islands."""
        for fragment in self.outer.fragments:
            for exchange, part in self._lanes(fragment.partition, fragment.method.parameters):
                exchange.broadcast(part, source=0)

    def _lanes(self, partition: Partition, vector: torch.Tensor) -> Iterator[tuple[Exchange, torch.Tensor]]:
        return zip(self._exchanges, partition.split(vector), strict=True)


def _read(partition: Partition) -> torch.Tensor:
    values = torch.empty(partition.numel)
    partition.gather(values)
    return values
