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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_diloco.agreement.ledger import Ledger
from hf_diloco.agreement.records import (
    JoinRecord,
    LayoutRecord,
    StateRecord,
    parse_records,
)
from hf_diloco.agreement.verdicts import states_are_equal
from hf_diloco.codecs import CODECS
from hf_diloco.config import DiLoCoConfig
from hf_diloco.eager import EagerFragment
from hf_diloco.errors import DiLoCoError, IslandLostError, RendezvousError
from hf_diloco.exchange.base import Exchange
from hf_diloco.exchange.transport import Transport, open_transport
from hf_diloco.fragment import Fragment
from hf_diloco.island import IslandGroup
from hf_diloco.measure import SyncReport
from hf_diloco.meeting import Facts, check_fingerprints, check_folders, find_common, make_fingerprint
from hf_diloco.sessions.base import BaseSession
from hf_diloco.sessions.carrier import Carrier
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
        if (
            config.fragment_sync_delay or config.eager_updates
        ):  # the thread's talk inside the island must not mix with the training's
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
        self._carrier = Carrier(config, self.outer, self._ledger, self._exchanges)
        island.on_leader(self._ledger.claim)
        self._last_end = time.monotonic()

    def _connect(self, transport: Transport | None) -> Transport:
        """The leader first: what keeps it from connecting is then known to all ranks."""
        opened = [transport] if transport else []

        def open_once() -> None:
            if not opened:
                opened.append(open_transport(self.config, self.island.is_leader, self.island.size))

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
            fragment.digest = ""
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
        if self.config.eager_updates:
            return self._advance_eagerly(is_last)
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

    def _advance_eagerly(self, is_last: bool) -> list[SyncReport]:
        """Uses the average of the round that ends, and this island's own part of the one that begins; see `eager`."""
        fragment, flights = self.outer.current, self._flights
        assert isinstance(fragment, EagerFragment)
        assert flights is not None
        reports = [self._collect(flights)] if flights else []
        if fragment.is_owed_a_mean:  # the checkpoint was written when that round could not take place
            reports.append(self._carry_out_now(self._anticipated_flight(fragment)))
        flight = self._capture()
        if is_last:
            reports.append(self._carry_out_now(flight))
            fragment.step_eagerly(None)
            self.island.on_all(self._average_parameters)
        else:
            flight.steps, flight.weight_of_steps, flight.due_at = (
                0,
                0.0,
                self.config.sync_every,
            )  # are used, come what may
            fragment.step_eagerly(flight.delta if math.isfinite(flight.square) else None)
            flights.start(flight, lambda flight: self._carrier.carry_out(flight, self._aside))
        fragment.write_masters()
        self._last_end = time.monotonic()
        return reports

    def _carry_out_now(self, flight: Flight) -> SyncReport:
        try:
            self._carrier.carry_out(flight, self.island)
        except DiLoCoError:
            flight.give_back()
            self.outer.num_begun -= 1
            raise
        return self._report(flight, flight.seconds_stepping)

    def _anticipated_flight(self, fragment: EagerFragment) -> Flight:
        delta = fragment.anticipated()
        (square,) = self.island.sum([float(torch.dot(delta, delta))])
        self.outer.num_begun += 1
        return Flight(
            number=self.outer.num_begun,
            fragment=fragment,
            delta=delta,
            square=square,
            weight=1.0,
            steps=0,
            weight_of_steps=0.0,
            due_at=fragment.due_at,
            seconds_computing=0.0,
            seconds_capturing=0.0,
        )

    def _average_parameters(self) -> None:
        """After the last round: what momentum has left of the islands' differences goes."""
        fragment = self.outer.current
        parts = fragment.partition.split(fragment.strategy.parameters)
        for exchange, part in zip(self._exchanges, parts, strict=True):
            exchange.average(part, [1.0] * self.config.num_islands, CODECS["fp32"])

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
        self._carry_out_now(flight)
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
        flights.start(flight, lambda flight: self._carrier.carry_out(flight, self._aside))
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
        landing = time.monotonic()
        fragment.write_masters(self.config.fragment_update_alpha)
        fragment.install_in = None
        self.outer.rest(fragment)
        self._last_end = time.monotonic()
        seconds = self._last_end - landing
        return [replace(report, seconds_applying=report.seconds_applying + seconds) for report in reports]

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
        return self._report(flight, 0.0, hidden)

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
