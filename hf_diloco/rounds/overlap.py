"""Rounds behind the inner steps: capture, take off, and land `config.delay` inner steps later.

    capture: read masters -> pseudo-gradient
    carry out, on a thread of its own: exchange -> outer step
    land: write masters

Several may be under way; they are carried out, and land, in their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import DiLoCoError
from hf_diloco.outer.fragment import Fragment
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.flights import Flight, Flights
from hf_diloco.rounds.measure import SyncReport


class Overlap:
    """One rank's rounds from capture to landing. Every method is collective over the island's ranks.

    Args:
        config: the outer loop's settings.
        outer: this rank's outer state.
        carry_out: averages over the islands and takes the outer step; called on a thread, with a group of ranks that
            nothing else uses meanwhile.

    Attributes:
        flights: rounds under way.
        last_end: when training last went on, in seconds of the monotonic clock.
        failure: of a round that `settle` waited for; for the next `advance`.
        is_landing: inner steps wait for a round that is to land now.
    """

    def __init__(self, config: DiLoCoConfig, outer: OuterState, carry_out: Callable[[Flight], None]) -> None:
        self.config = config
        self.outer = outer
        self.flights = Flights(carry_out)
        self.last_end = time.monotonic()
        self.failure: DiLoCoError | None = None
        self.is_landing = False

    def capture(self) -> Flight:
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
            seconds_computing=started - self.last_end,
            seconds_capturing=time.monotonic() - started,
            rates=self.outer.rates,
        )
        fragment.start_anew(self.config.sync_every)
        return flight

    def take_off(self) -> None:
        """Begins the round that is due."""
        flight = self.capture()
        flight.fragment.install_in = self.config.delay
        self.flights.start(flight)
        self.last_end = time.monotonic()

    def landing(self, at_once: bool = False) -> Fragment | None:
        """The fragment whose masters are to take the outer parameters of its last round; the oldest if several."""
        waiting = [fragment for fragment in self.outer.fragments if fragment.install_in is not None]
        first = min(waiting, key=lambda fragment: fragment.install_in or 0, default=None)
        is_time = first is not None and first.install_in is not None and (at_once or first.install_in <= 0)
        return first if is_time else None

    def land(self, fragment: Fragment) -> list[SyncReport]:
        """Waits for the round of `fragment`, if it is under way still, and has the masters take its result.

        Raises:
            DiLoCoError: it failed; it and all behind it have given back what they took.
        """
        reports = []
        if self.flights.oldest and self.flights.oldest.fragment is fragment:
            self.is_landing = True
            try:
                reports.append(self.collect())
            finally:
                self.is_landing = False
        landing = time.monotonic()
        self.outer.land(fragment)
        self.last_end = time.monotonic()
        seconds = self.last_end - landing
        return [replace(report, seconds_applying=report.seconds_applying + seconds) for report in reports]

    def collect(self) -> SyncReport:
        """Waits for the oldest round under way.

        Raises:
            DiLoCoError: as `land`.
        """
        try:
            flight, stalled = self.flights.land()
        except DiLoCoError:
            for fragment in self.outer.fragments:
                self.outer.rest(fragment)
            self.outer.num_begun = self.outer.round
            raise
        hidden = max(0.0, flight.seconds_waiting + flight.seconds_exchanging - stalled)
        return self.report(flight, 0.0, hidden)

    def settle(self) -> list[SyncReport]:
        """Waits for all rounds under way."""
        reports = []
        try:
            while self.flights:
                reports.append(self.collect())
        except DiLoCoError as error:
            self.failure = error
        return reports

    def raise_failure(self) -> None:
        """Raises, once, what `settle` met."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def report(self, flight: Flight, seconds_applying: float, seconds_hidden: float = 0.0) -> SyncReport:
        """The figures of a round that was carried out."""
        return SyncReport(
            round=flight.number,
            participants=flight.participants,
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
            fragment=self.outer.number_of(flight.number),
            seconds_hidden=seconds_hidden,
        )

    def close(self) -> None:
        """Returns when the thread has ended."""
        self.flights.close()
