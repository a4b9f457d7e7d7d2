"""A session of fixed membership: all islands are there from the first round to the last, or the run ends.

    capture: read masters -> pseudo-gradient
    carry out: arrive -> exchange -> vote -> (commit) outer step
    land: write masters

With `fragment_sync_delay`, a thread carries the round out behind the inner steps, and it lands as many steps after its
capture. Rounds are carried out in their order.

Among islands, a failed round changes nothing: the exchange works on a scratch vector, and parameters and outer state
are touched only after the round was committed.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from hf_diloco.fragment import Fragment
from hf_diloco.island import IslandGroup
from hf_diloco.measure import SyncReport, cosine_to_others
from hf_diloco.meeting import Facts, check_fingerprints, check_folders, find_common, make_fingerprint
from hf_diloco.sessions.base import BaseSession
from hf_diloco.sessions.flights import Flight, Flights
from hf_diloco.shards.base import Shards
from hf_diloco.shards.fragments import FragmentShards, cut_into_fragments, describe_fragments
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
        self._flights: Flights | None = None
        self._failure: DiLoCoError | None = None
        self._is_closing = False
        if config.fragment_sync_delay:  # the thread's talk inside the island must not mix with the training's
            self._flights = Flights()
            self._aside = IslandGroup(timeout=config.longest_wait)
        self._transport = self._connect(transport)
        self._ledger = Ledger(
            self._transport.store,
            config.island,
            config.num_islands,
            lambda: self._is_closing or should_stop(),
            self._find_broken,
        )
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
            block_values = self.outer.codec.block_values
            self.outer.open(
                shards,
                [(part, choose_partition(part, self.island, layouts, block_values)) for part in self._cut(shards)],
            )
            self.island.on_all(self._open_lanes)
            if checkpoint is not None:
                self.outer.restore(checkpoint)
            else:
                self.outer.begin()
            replaced = self._agree_on_start(resumed=checkpoint is not None)
        self._last_end = time.monotonic()
        return replaced

    def _cut(self, shards: Shards) -> list[Shards]:
        if not self.config.is_streaming:
            return [shards]
        config = self.config
        names = cut_into_fragments(shards.sizes, config.num_fragments, config.fragment_order, config.fragment_patterns)
        if self.island.is_leader and len(names) > 1:
            logger.info("%s", describe_fragments(names, shards.sizes))
        return [FragmentShards(shards, part) for part in names]

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
        for fragment in self.outer.fragments:
            fragment.write_masters()
            self.outer.update_digest(fragment)
        return True

    def _broadcast_start(self) -> None:
        for fragment in self.outer.fragments:
            parts = fragment.partition.split(fragment.strategy.parameters)
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

    def is_due(self, is_last: bool = False) -> bool:
        if self._failure or self.outer.is_due or self._landing() is not None:
            return True
        return is_last and self.config.is_streaming and not self.outer.on_boundary

    def advance(self, is_last: bool = False) -> list[SyncReport]:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        reports = []
        while (fragment := self._landing(at_once=is_last)) is not None:
            reports += self._land(fragment)
        if is_last and self.config.is_streaming:
            while self.outer.steps:
                reports.append(self.sync())
        elif self.outer.is_due and self._flights is not None:
            self._take_off(self._flights)
        elif self.outer.is_due:
            reports.append(self.sync())
        return reports

    def settle(self) -> list[SyncReport]:
        reports = []
        try:
            while self._flights:
                reports.append(self._collect(self._flights))
        except DiLoCoError as error:
            self._failure = error
        return reports

    def sync(self) -> SyncReport:
        flight = self._capture()
        try:
            self._carry_out(flight, self.island)
        except DiLoCoError:
            flight.give_back()
            self.outer.num_begun -= 1
            raise
        landing = time.monotonic()
        flight.fragment.write_masters()
        self.outer.rest(flight.fragment)
        self._last_end = time.monotonic()
        return self._report(flight, self._last_end - landing)

    # A round's way

    def _capture(self) -> Flight:
        """Takes the pseudo-gradient of the fragment whose round is next; its next inner steps begin."""
        started = time.monotonic()
        fragment = self.outer.current
        delta, square = fragment.pseudo_gradient()
        self.outer.num_begun += 1
        flight = Flight(
            number=self.outer.num_begun,
            fragment=fragment,
            delta=delta,
            square=square,
            weight=1.0 if self.config.weight_by == "uniform" else fragment.weight,
            steps=fragment.steps,
            weight_of_steps=fragment.weight,
            due_at=fragment.due_at,
            seconds_computing=started - self._last_end,
            seconds_capturing=time.monotonic() - started,
        )
        fragment.start_anew(self.config.sync_every)
        return flight

    def _take_off(self, flights: Flights) -> None:
        flight = self._capture()
        flight.fragment.install_in = self.config.fragment_sync_delay
        flights.start(flight, lambda flight: self._carry_out(flight, self._aside))
        self._last_end = time.monotonic()

    def _landing(self, at_once: bool = False) -> Fragment | None:
        """The fragment whose masters are to take the outer parameters of its last round; the oldest if several."""
        waiting = [fragment for fragment in self.outer.fragments if fragment.install_in is not None]
        first = min(waiting, key=lambda fragment: fragment.install_in or 0, default=None)
        is_time = first is not None and first.install_in is not None and (at_once or first.install_in <= 0)
        return first if is_time else None

    def _land(self, fragment: Fragment) -> list[SyncReport]:
        """Waits for the round of `fragment`, if it is under way still, and has the masters take its result."""
        reports = []
        if self._flights and self._flights.oldest and self._flights.oldest.fragment is fragment:
            reports.append(self._collect(self._flights))
        fragment.write_masters(self.config.fragment_update_alpha)
        fragment.install_in = None
        self.outer.rest(fragment)
        self._last_end = time.monotonic()
        return reports

    def _collect(self, flights: Flights) -> SyncReport:
        """Waits for the oldest round under way."""
        try:
            flight, stalled = flights.land()
        except DiLoCoError:
            for fragment in self.outer.fragments:
                self.outer.rest(fragment)
            self.outer.num_begun = self.outer.round
            raise
        hidden = max(0.0, flight.seconds_waiting + flight.seconds_exchanging - stalled)
        return self._report(flight, flight.seconds_stepping, hidden)

    def _carry_out(self, flight: Flight, island: IslandGroup) -> None:
        """Averages over the islands, and takes the outer step if all agree.

        Args:
            flight: the round; gets the figures.
            island: the ranks of this island; a group of its own for every thread.
        """
        arrived = time.monotonic()
        flight.weights = self._arrive(flight, island)
        exchanging = time.monotonic()
        flight.traffic = self._average(flight, island)
        stepping = time.monotonic()
        self._vote(flight, island)
        own_weight = flight.weights[self.config.island]
        flight.fragment.step(flight.delta, took_part=own_weight > 0)
        self.outer.update_digest(flight.fragment, island)
        self.outer.round = flight.number
        flight.outer_hash = self.outer.outer_hash
        sums = [flight.traffic.bytes_sent, flight.traffic.bytes_received, flight.stats.dot, flight.stats.mean]
        sent, received, dot, mean = island.sum(sums)
        flight.traffic = Traffic(int(sent), int(received))
        flight.cosine = cosine_to_others(dot, flight.square, mean, own_weight / sum(flight.weights))
        flight.seconds_waiting = exchanging - arrived
        flight.seconds_exchanging = stepping - exchanging
        flight.seconds_stepping = time.monotonic() - stepping

    def _report(self, flight: Flight, seconds_applying: float, seconds_hidden: float = 0.0) -> SyncReport:
        return SyncReport(
            round=flight.number,
            participants=[island for island, share in enumerate(flight.weights) if share > 0],
            seconds_computing=flight.seconds_computing,
            seconds_waiting=flight.seconds_waiting,
            seconds_exchanging=flight.seconds_exchanging,
            seconds_applying=flight.seconds_capturing + seconds_applying,
            bytes_sent=flight.traffic.bytes_sent,
            bytes_received=flight.traffic.bytes_received,
            pseudo_gradient_norm=math.sqrt(flight.square) if math.isfinite(flight.square) else math.nan,
            cosine=flight.cosine,
            weight=flight.weight,
            outer_hash=flight.outer_hash,
            fragment=(flight.number - 1) % len(self.outer.fragments),
            seconds_hidden=seconds_hidden,
        )

    def _arrive(self, flight: Flight, island: IslandGroup) -> list[float]:
        """Waits for all islands; returns each one's weight in the average."""
        finite = math.isfinite(flight.square)
        record = ArrivalRecord(weight=flight.weight if finite else 0.0, digest=self.outer.outer_hash)
        raw = island.on_leader(
            lambda: self._ledger.arrive(flight.number, record.model_dump(), self.config.sync_timeout)
        )
        weights = weigh(parse_records(ArrivalRecord, raw), flight.number)
        left_out = [number for number, weight in enumerate(weights) if weight == 0]
        if left_out and island.is_leader:
            logger.warning(
                "round %d: the pseudo-gradient of islands %s is left out: it is not finite, or has no examples behind "
                "it; they continue from the others' average",
                flight.number,
                left_out,
            )
        return weights

    def _average(self, flight: Flight, island: IslandGroup) -> Traffic:
        """Averages all lanes in place. A failure is told to the other islands, then raised on every rank."""

        def average_lanes() -> Traffic:
            traffic = Traffic()
            parts = flight.fragment.partition.split(flight.delta)
            for exchange, part in zip(self._exchanges, parts, strict=True):
                flight.stats.begin_lane()
                traffic += exchange.average(part, flight.weights, self.outer.codec, flight.stats.observe)
            return traffic

        try:
            return island.on_all(average_lanes)
        except DiLoCoError as failure:
            vote = VoteRecord(ok=False, reason=str(failure))
            island.on_leader(lambda: bool(self._settle(flight, vote)))
            raise

    def _vote(self, flight: Flight, island: IslandGroup) -> None:
        """Returns if the round is committed, which it is for all islands or for none."""
        digests = [digest.hexdigest() for digest in flight.stats.digests]
        vote = VoteRecord(ok=True, digest=combine_digests(digests, flight.fragment.partition, island))
        committed, raw = island.on_leader(lambda: self._settle(flight, vote))
        if not committed:
            raise why_aborted(parse_some(VoteRecord, raw), flight.number, self.config.num_islands)

    def _settle(self, flight: Flight, vote: VoteRecord) -> tuple[bool, dict[str, dict[str, Any]]]:
        return self._ledger.settle(flight.number, vote.model_dump(), self.config.exchange_timeout)

    # Leaving

    def leave(self, finished: bool) -> None:
        """Says goodbye: nobody will wait for this island, and island 0 stays until all have said so."""

        self._is_closing = not finished
        self.settle()

        def farewell() -> None:
            try:
                if not finished:
                    self._ledger.leave(self.outer.round + 1)
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
        self._is_closing = True
        if self._flights is not None:
            self._flights.close()
