"""Logs for whom a wait is, and how long it has lasted: `island 0: waiting for island 1 (12 s of 600 s)`.

Code that waits for other islands or nodes calls `Wait.look` now and then; a blocking call goes into `Wait.blocking`.
Nothing is logged in the first seconds, and then one line every half minute, over all waits of one `WaitNotes`
together: an island that is a little faster than the others does not log lines in every round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.text import name_all

logger = logging.getLogger("hf_diloco")

FIRST_SECONDS, EVERY_SECONDS = 3.0, 30.0
_POLL_SECONDS = 0.5


class WaitNotes:
    """Logs the waits of one island or node, at WARNING; for any number of threads.

    Args:
        first: seconds of a wait before it is logged.
        every: seconds from one line to the next, whichever wait it is about.
    """

    def __init__(
        self,
        number: int,
        unit: str = "island",
        first: float = FIRST_SECONDS,
        every: float = EVERY_SECONDS,
        clock: Clock = REAL,
    ) -> None:
        self.unit = unit
        self.first = first
        self.clock = clock
        self._who = f"{unit} {number}"
        self._every = every
        self._next_at = -float("inf")

    def begin(
        self, limit: float, what: str = "", where: str | None = None, why: Callable[[], str] = lambda: ""
    ) -> Wait:
        """Starts a wait of at most `limit` seconds, which may be infinite.

        Args:
            what: its purpose, as "round 7".
            where: the place that the others should reach, as "tcp://host:port".
            why: returns what may keep the others away, if known; called only when a line is logged.
        """
        prefix = f"{self._who}: {what}: " if what else f"{self._who}: "
        return Wait(self, limit, prefix, f" at {where}" * bool(where), why)

    def watch(self, limit: float, what: str, missing: Collection[int]) -> Callable[[], None]:
        """Starts a wait; returns the function to call now and then until it is over. See `begin` and `Wait.look`."""
        return partial(self.begin(limit, what).look, missing)

    def names(self, numbers: Collection[int]) -> str:
        """See `name_all`."""
        return name_all(numbers, self.unit)

    def is_due(self, waited: float) -> bool:
        """Whether to log a wait of this many seconds now: it is long enough, and nothing was logged recently."""
        now = self.clock.now()
        if waited < self.first or now < self._next_at:
            return False
        self._next_at = now + self._every
        return True


class Wait:
    """One wait, which starts with this object; see `WaitNotes.begin`."""

    def __init__(self, notes: WaitNotes, limit: float, prefix: str, suffix: str, why: Callable[[], str]) -> None:
        self._notes = notes
        self._limit = "" if limit == float("inf") else f" of {limit:,.0f} s"
        self._prefix, self._suffix = prefix, suffix
        self._why = why
        self._begun = notes.clock.now()

    def look(self, missing: Callable[[], str | Collection[int]] | str | Collection[int], why: str = "") -> None:
        """Logs for whom this waits, and why, if a line is due; calls `missing` only then."""
        waited = self._notes.clock.now() - self._begun
        if self._notes.is_due(waited):
            found = missing() if callable(missing) else missing
            names = found if isinstance(found, str) else self._notes.names(found)
            known = why or self._why()
            details = f"{waited:,.0f} s{self._limit}{known and f'; {known}'}"
            logger.warning("%swaiting for %s%s (%s)", self._prefix, names, self._suffix, details)

    @contextmanager
    def blocking(self, missing: Callable[[], str | Collection[int]] | str | Collection[int]) -> Iterator[None]:
        """Calls `look` from another thread while the caller blocks in a library."""
        over = self._notes.clock.event()

        def watch() -> None:
            pause = self._notes.first
            while not over.wait(pause):
                self.look(missing)
                pause = _POLL_SECONDS

        thread = threading.Thread(target=watch, name="hf-diloco-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
