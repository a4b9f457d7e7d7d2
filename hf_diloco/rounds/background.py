"""Rounds behind the inner steps: captured, carried out on a separate thread, and applied some inner steps later.

    begin: capture; the fragment's next inner steps begin
    on the thread: make the pseudo-gradient, and carry out the round (`rounds.round`)
    land, `config.delay` inner steps later: write the masters

Several rounds may be in flight; they are carried out, and land, in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from hf_diloco.errors import DiLoCoError, ExchangeError
from hf_diloco.outer.fragment import Fragment
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution, SyncClock, capture


class Background:
    """One rank's rounds from capture to landing. Every method is collective over the island's ranks.

    If a round fails, the rounds queued behind it fail too.

    Args:
        carry_out: carries out the round of a contribution; called on a thread.

    Attributes:
        last_end: when training last resumed, in seconds of the monotonic clock.
        is_installing: inner steps are waiting for a round that is due to land.
    """

    def __init__(self, outer: OuterState, carry_out: Callable[[Contribution], SyncReport]) -> None:
        self.outer = outer
        self.last_end = time.monotonic()
        self.is_installing = False
        self._carry_out = carry_out
        self._pool = ThreadPoolExecutor(1, "hf-diloco-round", initializer=_pin_to_one_core)
        self._under_way: deque[tuple[Contribution, Future[SyncReport]]] = deque()
        self._has_failed = False

    @property
    def oldest(self) -> Contribution | None:
        """The contribution of the oldest round in flight, if any."""
        return self._under_way[0][0] if self._under_way else None

    def begin(self) -> Contribution:
        """Captures the contribution to the next round; the fragment's next inner steps begin."""
        own = capture(self.outer, SyncClock(self.last_end))
        own.fragment.start_anew()
        own.is_begun = True
        self.outer.num_begun = own.number
        return own

    def start(self, own: Contribution) -> None:
        """Queues a round from `begin` on the thread."""

        def run() -> SyncReport:
            if self._has_failed:
                raise ExchangeError("the round before it failed")
            try:
                return self._carry_out(own)
            except BaseException:
                self._has_failed = True
                raise

        self._under_way.append((own, self._pool.submit(run)))

    def begin_due_round(self) -> None:
        """Begins the round that is due."""
        own = self.begin()
        own.fragment.install_in = min(self.outer.config.delay, own.fragment.due_at)
        self.start(own)
        self.last_end = time.monotonic()

    def install(self, fragment: Fragment) -> list[SyncReport]:
        """Waits for the round of `fragment`, if it is still in flight, and installs its result in the masters.

        Raises:
            DiLoCoError: the round failed; it and all rounds behind it have returned their inner steps.
        """
        reports = []
        if self.oldest and self.oldest.fragment is fragment:
            self.is_installing = True
            try:
                reports.append(self.collect())
            finally:
                self.is_installing = False
        begun = time.monotonic()
        self.outer.install(fragment)
        self.last_end = time.monotonic()
        seconds = self.last_end - begun
        return [replace(report, seconds_applying=report.seconds_applying + seconds) for report in reports]

    def collect(self) -> SyncReport:
        """Waits for the oldest round in flight.

        Raises:
            DiLoCoError: as `install`.
        """
        begun = time.monotonic()
        try:
            report = self._under_way[0][1].result()
        except DiLoCoError:
            self._give_back()
            raise
        self._under_way.popleft()
        stalled = time.monotonic() - begun
        return replace(report, seconds_hidden=max(0.0, report.seconds_waiting + report.seconds_exchanging - stalled))

    def _give_back(self) -> None:
        while self._under_way:
            own, future = self._under_way.pop()
            future.exception()
            own.give_back()
        for fragment in self.outer.fragments:
            self.outer.release_scratch(fragment)
        self.outer.num_begun = self.outer.round
        self._has_failed = False

    def drain(self) -> tuple[list[SyncReport], DiLoCoError | None]:
        """Waits for all rounds in flight; returns the reports of those that ended, and the first error, if any."""
        reports = []
        try:
            while self._under_way:
                reports.append(self.collect())
        except DiLoCoError as error:
            return reports, error
        return reports, None

    def close(self) -> None:
        """Waits until the thread has ended; cancels rounds that it has not started."""
        self._pool.shutdown(cancel_futures=True)


def _pin_to_one_core() -> None:
    """Limits this thread to one core: small operations on cores busy with training slow both down 40-fold or more."""
    torch.set_num_threads(1)
