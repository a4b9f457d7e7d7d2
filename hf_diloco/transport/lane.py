"""What the ends of direct connections agree on before they connect; and a limit to how fast bytes leave this process,
so that an exchange leaves room on the link for other traffic.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch.distributed import Store

from hf_diloco.sealing.channel import ISLANDS, Parties
from hf_diloco.sealing.keys import LinkKey
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


@dataclass(frozen=True)
class Lane:
    """One end of a lane, whose owners are joined each to each.

    Attributes:
        store: where the owners find each other's ports; reachable from all islands.
        name: unique in the run.
        island: this island's number.
        num_islands: islands in the run.
        address: local address to listen on, as the other islands see it.
        timeout: seconds that connecting, and later each whole exchange, may take.
        key: of the run; with one, the others prove that they hold it, and all that is exchanged is sealed. Default:
            nobody proves anything, and tensors go as they are.
        num_connections: between any two owners, the same on all.
        rate_limit: for all that this process sends; lanes may share one. Default: none.
        parties: which islands the owners are; default: of their numbers.
    """

    store: Store
    name: str
    island: int
    num_islands: int
    address: str
    timeout: float
    key: LinkKey | None = None
    num_connections: int = 1
    rate_limit: RateLimit = field(default_factory=RateLimit)
    parties: Parties = ISLANDS

    @property
    def peers(self) -> list[int]:
        """All owners but this one."""
        return [peer for peer in range(self.num_islands) if peer != self.island]
