"""Islands that are threads of one process: for tests, and for studies of an algorithm without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import IslandLostError
from hf_diloco.transport.base import BLOCK_VALUES, Exchange, Observer, Traffic, averaged_by_all, weighted_mean
from hf_diloco.transport.transfers import bytes_to_send


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
        self.messages: dict[int, dict[int, bytes]] = {}
        self.notify: dict[int, Callable[[], None]] = {}
        self.left: set[int] = set()


class MemoryExchange(Exchange):
    """One thread's end of a lane. Sends nothing anywhere, yet counts the bytes that a mesh would send."""

    def __init__(self, lane: _Lane, island: int, timeout: float) -> None:
        self._lane = lane
        self.island = island
        self.num_islands = lane.num_islands
        self._timeout = timeout
        self._num_swaps = 0
        self._num_messages = 0

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        if self.num_islands == 1:
            if observe:
                observe(values, values)
            return Traffic()
        size = values.numel()
        codes = self._swap(_encode(values, codec))
        mean = weighted_mean([_decode(code, size, codec) for code in codes], weights, keep=self.island)
        if not averaged_by_all(self.num_islands, codec):  # as in the mesh: the average travels encoded
            mean = _decode(_encode(mean, codec), size, codec)
        if observe:
            for own, average in zip(values.split(BLOCK_VALUES), mean.split(BLOCK_VALUES), strict=True):
                observe(own, average)
        values.copy_(mean)
        num_bytes = bytes_to_send(size, self.num_islands, codec)  # in a mesh, each way
        return Traffic(num_bytes, num_bytes)

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        num_bytes = values.numel() * values.itemsize
        given = self._swap(values.clone() if self.island == source else None)
        values.copy_(given[source])
        if self.island == source:
            return Traffic(bytes_sent=num_bytes * (self.num_islands - 1))
        return Traffic(bytes_received=num_bytes)

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        self._num_messages += 1
        with self._lane.changed:
            if self.island in self._lane.left:
                return False
            self._lane.messages.setdefault(self._num_messages, {})[self.island] = message
            self._lane.messages.pop(self._num_messages - 2, None)  # whoever waits here has heard it
            self._lane.notify[self.island] = notify
            self._wake_others()
        return True

    def messages(self) -> dict[int, bytes]:
        with self._lane.changed:
            sent = self._lane.messages.get(self._num_messages, {})
            return {island: message for island, message in sent.items() if island != self.island}

    def close(self) -> None:
        with self._lane.changed:
            self._lane.left.add(self.island)
            self._lane.changed.notify_all()
            self._wake_others()

    def _wake_others(self) -> None:
        for island, notify in self._lane.notify.items():
            if island != self.island:
                notify()

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


def _encode(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    code = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, code)
    return code


def _decode(code: torch.Tensor, size: int, codec: Codec) -> torch.Tensor:
    values = torch.empty(size)
    codec.decode(code, values)
    return values
