"""A session of fixed membership: all islands are there from the first round to the last, or the run ends.

    read masters -> pseudo-gradient -> arrive -> exchange -> vote -> (commit) outer step -> write masters

Among islands, a failed round changes nothing: the exchange works on a scratch vector, and parameters and outer state
are touched only after the round was committed.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_diloco.agreement.ledger import Ledger
from hf_diloco.agreement.records import (
    ArrivalRecord,
    JoinRecord,
    LayoutRecord,
    StateRecord,
    VoteRecord,
    parse_records,
    parse_some,
)
from hf_diloco.agreement.verdicts import states_are_equal, weigh, why_aborted
from hf_diloco.config import DiLoCoConfig
from hf_diloco.digests import combine_digests
from hf_diloco.errors import DiLoCoError, IslandLostError, RendezvousError
from hf_diloco.exchange.base import Exchange, Traffic
from hf_diloco.exchange.transport import Transport, open_transport
from hf_diloco.island import IslandGroup
from hf_diloco.measure import AverageStats, SyncReport, cosine_to_others
from hf_diloco.meeting import Facts, check_fingerprints, check_folders, find_common, make_fingerprint
from hf_diloco.sessions.base import BaseSession
from hf_diloco.shards.base import Shards
from hf_diloco.shards.partition import choose_partition, layout_of

logger = logging.getLogger("hf_diloco")

_FAREWELL_SECONDS = {"finished": 60.0, "early": 5.0}


class FixedSession(BaseSession):
    """One rank's part in a run of `config.num_islands` islands, whose leaders share a store and meet in every round.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        transport: how to reach the other islands; default: what `config.rendezvous` calls for.

    Raises:
        RendezvousError: the rendezvous cannot be reached.
        DuplicateIslandError: another process has this island's number.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        island: IslandGroup,
        should_stop: Callable[[], bool] = lambda: False,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(config, island)
        self._exchanges: list[Exchange] = []
        self._transport = self._connect(transport)
        self._ledger = Ledger(self._transport.store, config.island, config.num_islands, should_stop, self._find_broken)
        island.on_leader(self._ledger.claim)
        self._last_end = time.monotonic()

    def _connect(self, transport: Transport | None) -> Transport:
        """The leader first: what keeps it from connecting is then known to all ranks."""
        opened = [transport] if transport else []

        def open_once() -> None:
            if not opened:
                opened.append(open_transport(self.config, self.island.is_leader))

        self.island.on_leader(open_once)
        self.island.on_all(open_once)
        return opened[0]

    # Joining

    def common_checkpoint(self, output_dir: Path) -> Path | None:
        """This island's newest checkpoint of the newest round that all islands hold; None if none holds any.

        Raises:
            CheckpointError: the islands hold checkpoints, but of no common round.
        """
        with self._leave_on_error():
            path = self.island.on_leader(lambda: find_common(Path(output_dir), self._share))
        return Path(path) if path else None

    def join(self, shards: Shards, folder: Path, facts: Facts | None = None, checkpoint: Path | None = None) -> bool:
        with self._leave_on_error():
            records = self._meet(shards, folder, facts or {})
            layouts = [record.layout.model_dump() for record in records]
            partition = choose_partition(shards, self.island, layouts, self.outer.codec.block_values)
            self.outer.open(shards, partition)
            self.island.on_all(self._open_lanes)
            if checkpoint is not None:
                self.outer.restore(checkpoint)
            else:
                self.outer.begin()
            replaced = self._agree_on_start(resumed=checkpoint is not None)
        self._last_end = time.monotonic()
        return replaced

    def _meet(self, shards: Shards, folder: Path, facts: Facts) -> list[JoinRecord]:
        record = JoinRecord(
            host=socket.gethostname(),
            folder=os.path.realpath(folder),
            fingerprint=make_fingerprint(self.config, shards, facts),
            layout=LayoutRecord.model_validate(layout_of(shards, self.island)),
        )
        records = parse_records(JoinRecord, self.island.on_leader(lambda: self._share("join", record.model_dump())))
        check_fingerprints(records)
        check_folders(records)
        return records

    def _open_lanes(self) -> None:
        for lane in self.outer.partition.lanes:
            self._exchanges.append(self._transport.open(lane))

    def _agree_on_start(self, resumed: bool) -> bool:
        """All islands stand at one round with equal outer parameters, or island 0 sends its own to all."""
        mine = StateRecord(round=self.outer.round, digest=self.outer.outer_hash, resumed=resumed)
        raw = self.island.on_leader(lambda: self._share("state", mine.model_dump()))
        states = parse_records(StateRecord, raw)
        if states_are_equal(states):
            return False
        logger.info("islands start from different weights: island 0 sends its own to all")
        self.island.on_all(self._broadcast_start)
        self.outer.replace(self.outer.scratch)
        return True

    def _broadcast_start(self) -> None:
        parts = self.outer.partition.split(self.outer.scratch)
        for exchange, part in zip(self._exchanges, parts, strict=True):
            exchange.broadcast(part, source=0)

    def _find_broken(self) -> set[int]:
        return {island for exchange in self._exchanges for island in exchange.find_broken()}

    def _share(self, topic: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._ledger.share(topic, record, self.config.join_timeout)
        except IslandLostError as error:
            if not error.islands or (error.islands == (0,) and self.config.island):
                raise
            raise RendezvousError(
                f"islands {list(error.islands)} have not joined within {self.config.join_timeout:g} s (join_timeout): "
                f"start them, with the same num_islands ({self.config.num_islands}) and rendezvous "
                f"({self.config.rendezvous}) everywhere"
            ) from None

    # Rounds

    def sync(self) -> SyncReport:
        started = time.monotonic()
        delta, square = self.outer.pseudo_gradient()
        arrived = time.monotonic()
        weights = self._arrive(square)
        exchanging = time.monotonic()
        stats = AverageStats()
        traffic = self._average(delta, weights, stats)
        voting = time.monotonic()
        self._vote(stats)
        weight = self.outer.install(delta, took_part=weights[self.config.island] > 0)
        sent, received, dot, mean = self.island.sum(
            [traffic.bytes_sent, traffic.bytes_received, stats.dot, stats.mean]
        )
        report = SyncReport(
            round=self.outer.round,
            participants=[island for island, share in enumerate(weights) if share > 0],
            seconds_computing=started - self._last_end,
            seconds_waiting=exchanging - arrived,
            seconds_exchanging=voting - exchanging,
            seconds_applying=(arrived - started) + (time.monotonic() - voting),
            bytes_sent=int(sent),
            bytes_received=int(received),
            pseudo_gradient_norm=math.sqrt(square) if math.isfinite(square) else math.nan,
            cosine=cosine_to_others(dot, square, mean, weights[self.config.island] / sum(weights)),
            weight=weight,
            outer_hash=self.outer.outer_hash,
        )
        self._last_end = time.monotonic()
        return report

    @property
    def _next_round(self) -> int:
        return self.outer.round + 1

    def _arrive(self, square: float) -> list[float]:
        """Waits for all islands; returns each one's weight in the average."""
        finite = math.isfinite(square)
        record = ArrivalRecord(weight=self.outer.round_weight if finite else 0.0, digest=self.outer.outer_hash)
        raw = self.island.on_leader(
            lambda: self._ledger.arrive(self._next_round, record.model_dump(), self.config.sync_timeout)
        )
        weights = weigh(parse_records(ArrivalRecord, raw), self._next_round)
        left_out = [island for island, weight in enumerate(weights) if weight == 0]
        if left_out and self.island.is_leader:
            logger.warning(
                "round %d: the pseudo-gradient of islands %s is left out: it is not finite, or has no examples behind "
                "it; they continue from the others' average",
                self._next_round,
                left_out,
            )
        return weights

    def _average(self, delta: torch.Tensor, weights: Sequence[float], stats: AverageStats) -> Traffic:
        """Averages all lanes in place. A failure is told to the other islands, then raised on every rank."""

        def average_lanes() -> Traffic:
            traffic = Traffic()
            for exchange, part in zip(self._exchanges, self.outer.partition.split(delta), strict=True):
                stats.begin_lane()
                traffic += exchange.average(part, weights, self.outer.codec, stats.observe)
            return traffic

        try:
            return self.island.on_all(average_lanes)
        except DiLoCoError as failure:
            vote = VoteRecord(ok=False, reason=str(failure))
            self.island.on_leader(lambda: bool(self._settle(vote)))
            raise

    def _vote(self, stats: AverageStats) -> None:
        """Returns if the round is committed, which it is for all islands or for none."""
        digests = [digest.hexdigest() for digest in stats.digests]
        vote = VoteRecord(ok=True, digest=combine_digests(digests, self.outer.partition, self.island))
        committed, raw = self.island.on_leader(lambda: self._settle(vote))
        if not committed:
            raise why_aborted(parse_some(VoteRecord, raw), self._next_round, self.config.num_islands)

    def _settle(self, vote: VoteRecord) -> tuple[bool, dict[str, dict[str, Any]]]:
        return self._ledger.settle(self._next_round, vote.model_dump(), self.config.exchange_timeout)

    # Leaving

    def leave(self, finished: bool) -> None:
        """Says goodbye: nobody will wait for this island, and island 0 stays until all have said so."""

        def farewell() -> None:
            try:
                if not finished:
                    self._ledger.leave(self._next_round)
                patience = _FAREWELL_SECONDS["finished" if finished else "early"]
                goodbye = {"round": self.outer.round, "finished": finished}
                self._ledger.share("done", goodbye, patience, interruptible=False)
            except DiLoCoError as error:
                logger.info("left without the others' goodbye: %s", error)

        self.island.on_leader(farewell)
        self.has_left = True
        self.close()

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
