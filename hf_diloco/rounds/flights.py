"""Rounds under way behind the inner steps: one thread carries them out, one after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from hf_diloco.errors import DiLoCoError, ExchangeError
from hf_diloco.outer.fragment import Fragment
from hf_diloco.rounds.measure import AverageStats, SyncReport
from hf_diloco.transport.base import Traffic


@dataclass
class Flight:
    """One round from the capture of a pseudo-gradient to the outer step.

    Attributes:
        number: of the round.
        fragment: whose round it is.
        delta: this rank's part of the pseudo-gradient; becomes the average.
        square: of the whole island's.
        weight: what it weighs.
        steps: inner steps behind it.
        weight_of_steps: examples or tokens behind it.
        due_at: inner steps after which it was due.
        seconds_computing: from the end of the last round to the capture.
        seconds_capturing: what the capture took.
        rates: this island's inner learning rates, where the method wants them.
    """

    number: int
    fragment: Fragment
    delta: torch.Tensor
    square: float
    weight: float
    steps: int
    weight_of_steps: float
    due_at: int
    seconds_computing: float
    seconds_capturing: float
    rates: list[float] = field(default_factory=list)
    # What carrying it out finds.
    participants: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    stats: AverageStats = field(default_factory=AverageStats)
    traffic: Traffic = field(default_factory=Traffic)
    cosine: float | None = None
    outer_hash: str = ""
    seconds_waiting: float = 0.0
    seconds_exchanging: float = 0.0
    seconds_stepping: float = 0.0

    def note(self, report: SyncReport) -> None:
        """Takes what carrying it out has measured."""
        self.participants = report.participants
        self.traffic = Traffic(report.bytes_sent, report.bytes_received)
        self.weight, self.cosine, self.outer_hash = report.weight, report.cosine, report.outer_hash
        self.seconds_waiting, self.seconds_exchanging = report.seconds_waiting, report.seconds_exchanging

    def give_back(self) -> None:
        """Nothing came of it: its inner steps count for the next try."""
        fragment = self.fragment
        fragment.steps += self.steps
        fragment.weight += self.weight_of_steps
        fragment.due_at = self.due_at
        fragment.install_in = None


class Flights:
    """Those that have begun, oldest first, and the thread that carries them out.

    After one has failed, those behind it fail too.

    Args:
        carry_out: called with each, on the thread.
    """

    def __init__(self, carry_out: Callable[[Flight], None]) -> None:
        self._carry_out = carry_out
        self._pool = ThreadPoolExecutor(1, "hf-diloco-round", initializer=_take_one_core)
        self._under_way: deque[tuple[Flight, Future[None]]] = deque()
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def oldest(self) -> Flight | None:
        """The round that is carried out first."""
        return self._under_way[0][0] if self._under_way else None

    def start(self, flight: Flight) -> None:
        """Has a round carried out after those before it."""

        def run() -> None:
            if self._has_failed:
                raise ExchangeError("the round before it failed")
            try:
                self._carry_out(flight)
            except BaseException:
                self._has_failed = True
                raise

        self._under_way.append((flight, self._pool.submit(run)))

    def land(self) -> tuple[Flight, float]:
        """Waits for the oldest; returns it, and for how many seconds.

        Raises:
            DiLoCoError: it failed; it and all behind it have given back what they took.
        """
        begun = time.monotonic()
        flight, future = self._under_way[0]
        try:
            future.result()
        except DiLoCoError:
            self._give_back()
            raise
        self._under_way.popleft()
        return flight, time.monotonic() - begun

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._pool.shutdown(cancel_futures=True)

    def _give_back(self) -> None:
        while self._under_way:
            flight, future = self._under_way.pop()
            future.exception()
            flight.give_back()
        self._has_failed = False


def _take_one_core() -> None:
    """Two busy threads' worth of small operations on cores that train would slow both down, 40 times and more."""
    torch.set_num_threads(1)
