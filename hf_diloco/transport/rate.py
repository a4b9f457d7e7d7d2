"""A limit to how fast bytes leave this process, so that an exchange leaves room on the link for other traffic."""

from __future__ import annotations

import threading

from hf_diloco.utils.clock import REAL, Clock

BURST_SECONDS = 0.1
"""What has not been used of the limit so long before may be made up for."""


class RateLimit:
    """A token bucket, which several threads may share.

    In any `t` seconds no more than `(t + BURST_SECONDS) * bytes_per_second` bytes are let through.

    Args:
        bytes_per_second: None lets everything through.
        clock: by which it waits.

    Raises:
        ValueError: the limit is not more than 0.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        clock: Clock = REAL,
    ) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second={bytes_per_second}: input should be more than 0, or None")
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = float("-inf")  # the moment at which all that was taken is within the limit

    def take(self, num_bytes: int) -> None:
        """Returns once so many bytes may go; who comes first is served first."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = self._clock.now()
            self._paid_until = max(self._paid_until, now - BURST_SECONDS) + num_bytes / self.bytes_per_second
            pause = self._paid_until - now
        if pause > 0:
            self._clock.sleep(pause)

    def seconds(self, num_bytes: int) -> float:
        """The least that so many bytes take."""
        if self.bytes_per_second is None:
            return 0.0
        return max(0.0, num_bytes / self.bytes_per_second - BURST_SECONDS)
