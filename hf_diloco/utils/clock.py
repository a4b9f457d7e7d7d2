"""The clock of waits and leases, which a test can replace by a faster one."""

from __future__ import annotations

import threading
import time


class Clock:
    """This machine's clock; passed to whatever waits for other islands, or measures how long they are silent."""

    now = staticmethod(time.monotonic)
    """Monotonic time in seconds, from an arbitrary start."""

    def sleep(self, seconds: float) -> None:
        """Sleeps for this many seconds."""
        time.sleep(seconds)

    def event(self) -> threading.Event:
        """Returns an event whose `wait` takes its timeout in this clock's seconds."""
        return threading.Event()


REAL = Clock()
