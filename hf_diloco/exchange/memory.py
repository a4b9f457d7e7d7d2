"""Islands that are threads of one process: for tests, and for studies of an algorithm without a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import IslandLostError
from hf_diloco.exchange.base import BLOCK_VALUES, Exchange, Observer, Traffic, weighted_mean


class MemoryNetwork:
    """The shared ground of `num_islands` threads; `lane(name, island)` gives each its end of a lane."""

    def __init__(self, num_islands: int, timeout: float = 60.0) -> None:
        self.num_islands = num_islands
        self.timeout = timeout
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def lane(self, name: str, island: int) -> MemoryExchange:
        """Returns island `island`'s end of the lane `name`."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane(self.num_islands))
        return MemoryExchange(lane, island, self.timeout)


class _Lane:
    """What the islands put down for each other, swap by swap, and who has left."""

    def __init__(self, num_islands: int) -> None:
        self.num_islands = num_islands
        self.changed = threading.Condition()
        self.given: dict[int, dict[int, Any]] = {}
        self.left: set[int] = set()


class MemoryExchange(Exchange):
    """One thread's end of a lane. Sends nothing anywhere, yet counts the bytes that a mesh would send."""

    def __init__(self, lane: _Lane, island: int, timeout: float) -> None:
        self._lane = lane
        self.island = island
        self.num_islands = lane.num_islands
        self._timeout = timeout
        self._num_swaps = 0

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        if self.num_islands == 1:
            if observe:
                observe(values, values)
            return Traffic()
        wire = torch.empty(values.numel(), dtype=codec.wire_dtype)
        codes = self._swap(codec.encode(values, wire).clone())
        parts = [codec.decode(code, torch.empty_like(values)).clone() for code in codes]
        mean = weighted_mean(parts, weights, keep=self.island)
        if self.num_islands > 2 and not codec.is_exact:  # as in the mesh: the sum travels encoded as well
            mean = codec.decode(codec.encode(mean, wire), torch.empty_like(values))
        if observe:
            for own, average in zip(values.split(BLOCK_VALUES), mean.split(BLOCK_VALUES), strict=True):
                observe(own, average)
        values.copy_(mean)
        num_bytes = codec.num_bytes(values.numel())
        sent = num_bytes if self.num_islands == 2 else 2 * (self.num_islands - 1) * num_bytes // self.num_islands
        return Traffic(sent, sent)

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        num_bytes = values.numel() * values.itemsize
        given = self._swap(values.clone() if self.island == source else None)
        values.copy_(given[source])
        if self.island == source:
            return Traffic(bytes_sent=num_bytes * (self.num_islands - 1))
        return Traffic(bytes_received=num_bytes)

    def close(self) -> None:
        with self._lane.changed:
            self._lane.left.add(self.island)
            self._lane.changed.notify_all()

    def _swap(self, item: Any) -> list[Any]:
        """Gives `item` to all and returns what all gave, in the order of the islands."""
        lane, number = self._lane, self._num_swaps
        self._num_swaps += 1
        with lane.changed:
            given = lane.given.setdefault(number, {})
            given[self.island] = item
            lane.changed.notify_all()
            lane.changed.wait_for(
                lambda: len(given) == self.num_islands or lane.left - given.keys(), timeout=self._timeout
            )
            lane.given.pop(number - 1, None)  # whoever waits here has taken it
            absent = set(range(self.num_islands)) - given.keys()
            missing = sorted(absent & lane.left or absent)
        if missing:
            self.close()
            raise IslandLostError(f"islands {missing} did not come to the exchange", missing)
        return [given[island] for island in range(self.num_islands)]
