"""Says, while something is waited for, for whom and how long: `island 0: waiting for island 1 (12 s of 600 s)`.

Whatever waits for other islands or nodes calls `Wait.look` now and then; a call that blocks goes into `Wait.blocking`.
Nothing is said in the first seconds, and then one line every half minute, over all waits of one `WaitNotes` together:
an island that is a little faster than the others does not fill its log with lines of every round.
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
    """What one island or node says about its waits, at WARNING; for any number of threads.

    Args:
        number: of the island or node that waits.
        unit: "island" or "node".
        first: seconds of a wait before it is told.
        every: seconds from one line to the next, whichever wait it is about.
        clock: by which the waits are measured.
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

    def begin(self, limit: float, what: str = "", where: str | None = None) -> Wait:
        """A wait begins.

        Args:
            limit: seconds that it may take; infinite: no limit.
            what: it is for, as "round 7".
            where: the others should come to, as "tcp://host:port".
        """
        return Wait(self, limit, f"{self._who}: {what}: " if what else f"{self._who}: ", f" at {where}" * bool(where))

    def watch(self, limit: float, what: str, missing: Collection[int]) -> Callable[[], None]:
        """A wait begins; what is to be called now and then until it is over. See `begin` and `Wait.look`."""
        return partial(self.begin(limit, what).look, missing)

    def names(self, numbers: Collection[int]) -> str:
        """See `name_all`."""
        return name_all(numbers, self.unit)

    def say(self, begun: float, text: Callable[[], str]) -> None:
        """Logs `text()`, if the wait that has `begun` then is long enough and nothing was said just before."""
        now = self.clock.now()
        if now - begun >= self.first and now >= self._next_at:
            self._next_at = now + self._every
            logger.warning("%s", text())


class Wait:
    """One wait, from its making on; see `WaitNotes.begin`."""

    def __init__(self, notes: WaitNotes, limit: float, prefix: str, suffix: str) -> None:
        self._notes = notes
        self._limit = limit
        self._prefix = prefix
        self._suffix = suffix
        self._begun = notes.clock.now()

    def look(self, missing: Callable[[], str | Collection[int]] | str | Collection[int], why: str = "") -> None:
        """Says for whom this waits, if it is time to.

        Args:
            missing: numbers of those who are waited for, or words; called only when something is said.
            why: what keeps them away, where that is known.
        """

        def text() -> str:
            found = missing() if callable(missing) else missing
            names = found if isinstance(found, str) else self._notes.names(found)
            waited = self._notes.clock.now() - self._begun
            limit = "" if self._limit == float("inf") else f" of {self._limit:,.0f} s"
            return f"{self._prefix}waiting for {names}{self._suffix} ({waited:,.0f} s{limit}{why and f'; {why}'})"

        self._notes.say(self._begun, text)

    @contextmanager
    def blocking(self, missing: Callable[[], str | Collection[int]] | str | Collection[int]) -> Iterator[None]:
        """Looks from a thread of its own while the caller blocks in a library."""
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
