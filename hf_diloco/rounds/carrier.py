"""Carrying out a round among islands that are all there: arrive, average, vote, and the outer step if all agree."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import DamagedTransferError, DiLoCoError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.ledger import Ledger
from hf_diloco.membership.records import ArrivalRecord, VoteRecord, parse_records, parse_some
from hf_diloco.membership.verdicts import agree_on_rates, weigh, why_aborted
from hf_diloco.outer.digests import combine_digests
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.flights import Flight
from hf_diloco.rounds.measure import cosine_to_others
from hf_diloco.rounds.round_plan import RoundRepeated
from hf_diloco.transport.base import Exchange, Traffic

logger = logging.getLogger("hf_diloco")


class Carrier:
    """Carries out one round at a time, on whichever thread. A round that fails changes nothing.

    Args:
        config: the outer loop's settings.
        outer: this rank's outer state.
        ledger: where the islands' leaders meet.
        exchanges: of this rank's lanes, in their order; may be filled later.
    """

    def __init__(self, config: DiLoCoConfig, outer: OuterState, ledger: Ledger, exchanges: Sequence[Exchange]) -> None:
        self.config = config
        self.outer = outer
        self._ledger = ledger
        self._exchanges = exchanges

    def carry_out(self, flight: Flight, island: IslandGroup) -> None:
        """Averages over the islands, and takes the outer step if all agree.

        Args:
            flight: the round; gets the figures.
            island: the ranks of this island; a group of its own for every thread.

        Raises:
            RoundRepeated: all islands are to take the round again, from fresh captures.
            DiLoCoError: it does not take place. The exchanges are closed: those who yet wait for this island see it.
        """
        try:
            self._carry_out(flight, island)
        except RoundRepeated:
            raise
        except DiLoCoError:
            for exchange in list(self._exchanges):
                exchange.close()
            raise

    def _carry_out(self, flight: Flight, island: IslandGroup) -> None:
        arrived = time.monotonic()
        for exchange, part in zip(self._exchanges, flight.fragment.partition.split(flight.delta), strict=True):
            exchange.prepare(part, self.outer.codec)
        flight.weights, rates = self._arrive(flight, island)
        flight.participants = [number for number, weight in enumerate(flight.weights) if weight > 0]
        exchanging = time.monotonic()
        flight.traffic = self._average(flight, island)
        stepping = time.monotonic()
        self._vote(flight, island)
        own_weight = flight.weights[self.config.island]
        flight.fragment.step(flight.delta, took_part=own_weight > 0, rates=rates)
        self.outer.update_digest(flight.fragment, island)
        self.outer.round = flight.number
        flight.outer_hash = self.outer.outer_hash
        sums = [flight.traffic.bytes_sent, flight.traffic.bytes_received, flight.stats.dot, flight.stats.mean]
        sent, received, dot, mean = island.sum(sums)
        flight.traffic = Traffic(int(sent), int(received))
        if not self.outer.codec.needs_feedback:  # else too little of it is in the average
            flight.cosine = cosine_to_others(dot, flight.square, mean, own_weight / sum(flight.weights))
        flight.seconds_waiting = exchanging - arrived
        flight.seconds_exchanging = stepping - exchanging
        flight.seconds_stepping = time.monotonic() - stepping

    def _arrive(self, flight: Flight, island: IslandGroup) -> tuple[list[float], list[float]]:
        """Waits for all islands; returns each one's weight in the average, and the inner learning rates agreed on."""
        finite = math.isfinite(flight.square)
        record = ArrivalRecord(
            weight=flight.weight if finite else 0.0, digest=self.outer.outer_hash, rates=flight.rates
        )
        raw = island.on_leader(
            lambda: self._ledger.arrive(flight.number, record.model_dump(), self.config.sync_timeout)
        )
        records = parse_records(ArrivalRecord, raw)
        weights = weigh(records, flight.number)
        left_out = [number for number, weight in enumerate(weights) if weight == 0]
        if left_out and island.is_leader:
            logger.warning(
                "round %d: the pseudo-gradient of islands %s is left out: it is not finite, or has no examples behind "
                "it; they continue from the others' average",
                flight.number,
                left_out,
            )
        return weights, agree_on_rates([record.rates for record in records if record.weight > 0])

    def _average(self, flight: Flight, island: IslandGroup) -> Traffic:
        """Averages all lanes in place. A failure is told to the other islands, then raised on every rank."""

        def average_lanes() -> Traffic:
            traffic = Traffic()
            damage: DamagedTransferError | None = None
            parts = flight.fragment.partition.split(flight.delta)
            for exchange, part in zip(self._exchanges, parts, strict=True):
                flight.stats.begin_lane()
                try:
                    traffic += exchange.average(part, flight.weights, self.outer.codec, flight.stats.observe)
                except DamagedTransferError as error:  # the others wait for the lanes that are left
                    damage = error
            if damage is not None:
                raise damage
            return traffic

        try:
            return island.on_all(average_lanes)
        except DiLoCoError as failure:
            is_damage = isinstance(failure, DamagedTransferError)
            vote = VoteRecord(ok=False, reason=str(failure), again=is_damage)
            _, _, is_repeated = island.on_leader(lambda: self._settle(flight, vote))
            if is_repeated:
                raise _repeated(flight, str(failure), island) from None
            island.on_leader(lambda: self._ledger.check_plan(flight.number, self.config.sync_timeout))
            raise

    def _vote(self, flight: Flight, island: IslandGroup) -> None:
        """Returns if the round is committed, which it is for all islands or for none."""
        digests = [digest.hexdigest() for digest in flight.stats.digests]
        vote = VoteRecord(ok=True, digest=combine_digests(digests, flight.fragment.partition, island))
        committed, raw, is_repeated = island.on_leader(lambda: self._settle(flight, vote))
        if committed:
            return
        votes = parse_some(VoteRecord, raw)
        if is_repeated:
            reasons = {f"island {number}: {other.reason}" for number, other in votes.items() if not other.ok}
            raise _repeated(flight, "; ".join(sorted(reasons)) or "the islands computed different averages", island)
        raise why_aborted(votes, flight.number, self.config.num_islands)

    def _settle(self, flight: Flight, vote: VoteRecord) -> tuple[bool, dict[str, dict[str, Any]], bool]:
        """Whether the round is committed, the votes, and whether all take it again."""
        before = self._ledger.tries(flight.number)
        committed, votes = self._ledger.settle(flight.number, vote.model_dump(), self.config.exchange_timeout)
        return committed, votes, self._ledger.tries(flight.number) > before


def _repeated(flight: Flight, reason: str, island: IslandGroup) -> RoundRepeated:
    if island.is_leader:
        logger.warning("round %d is taken again: %s", flight.number, reason)
    return RoundRepeated(f"round {flight.number} is taken again: {reason}")
