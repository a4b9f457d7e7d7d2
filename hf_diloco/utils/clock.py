"""The time that waits and leases take, which a test may have pass faster than real time does."""

from __future__ import annotations

import threading
import time


class Clock:
    """This machine's own; whoever waits for other islands, or measures for how long they are silent, is given one."""

    now = staticmethod(time.monotonic)
    """Monotonic time in seconds, from any beginning."""

    def sleep(self, seconds: float) -> None:
        """Returns after so many seconds."""
        time.sleep(seconds)

    def event(self) -> threading.Event:
        """An event of which `wait` takes its timeout in this clock's seconds."""
        return threading.Event()


REAL = Clock()
