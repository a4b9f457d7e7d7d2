"""Islands that are threads of one process: for tests, and for studies of an algorithm without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import IslandLostError
from hf_diloco.transport.base import (
    BLOCK_VALUES,
    Exchange,
    Observer,
    Traffic,
    averaged_by_all,
    bytes_to_send,
    weighted_mean,
)
from hf_diloco.utils.text import name_all


class MemoryNetwork:
    """The shared state of `num_islands` threads; `lane(name, island)` gives each its end of a lane."""

    def __init__(self, num_islands: int, timeout: float = 60.0) -> None:
        self.num_islands = num_islands
        self.timeout = timeout
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def lane(self, name: str, island: int) -> MemoryExchange:
        """Returns island `island`'s end of the lane `name`."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane(self.num_islands, self.timeout))
        return MemoryExchange(lane, island)


class Swaps:
    """Swaps of items between the threads of one process, in numbered steps, each of at most `timeout` seconds.
    Messages call a member `unit`."""

    def __init__(self, num_members: int, timeout: float, unit: str = "island") -> None:
        self.num_members = num_members
        self.changed = threading.Condition()
        self.left: set[int] = set()
        self._timeout = timeout
        self._unit = unit
        self._given: dict[int, dict[int, Any]] = {}
        self._num_swaps = [0] * num_members

    def swap(self, member: int, item: Any) -> list[Any]:
        """Gives `item` to all members and returns all their items, in the order of the members.

        A complete swap also succeeds for a member that wakes up after another one has left, which under load takes
        seconds. Otherwise raises `IslandLostError`; this member leaves, too.
        """
        number = self._num_swaps[member]
        self._num_swaps[member] += 1
        with self.changed:
            given = self._given.setdefault(number, {})
            given[member] = item
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: len(given) == self.num_members or member in self.left or self.left - given.keys(),
                self._timeout,
            )
            self._given.pop(number - 1, None)  # every member that came to this swap has its items
            absent = set(range(self.num_members)) - given.keys()
            missing = sorted(absent & self.left or absent)
        if missing:
            self.leave(member)
            raise IslandLostError(f"{name_all(missing, self._unit)} did not join the exchange", missing)
        return [given[other] for other in range(self.num_members)]

    def leave(self, member: int) -> None:
        """Leaves, and ends the swaps to which this member has not come."""
        with self.changed:
            self.left.add(member)
            self.changed.notify_all()


class _Lane(Swaps):
    """The swaps of one lane, and its messages."""

    def __init__(self, num_islands: int, timeout: float) -> None:
        super().__init__(num_islands, timeout)
        self.messages: dict[int, dict[int, bytes]] = {}
        self.notify: dict[int, Callable[[], None]] = {}


class MemoryExchange(Exchange):
    """One thread's end of a lane. Moves no bytes, but counts those that a mesh would send."""

    def __init__(self, lane: _Lane, island: int) -> None:
        self._lane = lane
        self.island = island
        self.num_islands = lane.num_members
        self._num_messages = 0

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        if self.num_islands == 1:
            if observe:
                observe(values, values)
            return Traffic()
        size = values.numel()
        code = torch.empty(codec.num_bytes(size), dtype=torch.uint8)
        codec.encode(values, code)
        codes = self._lane.swap(self.island, code)
        mean = weighted_mean([_decode(code, size, codec) for code in codes], weights, keep=self.island)
        if not averaged_by_all(self.num_islands, codec):  # as in the mesh, where the average travels encoded
            codec.round_trip(mean, mean)
        if observe:
            for own, average in zip(values.split(BLOCK_VALUES), mean.split(BLOCK_VALUES), strict=True):
                observe(own, average)
        values.copy_(mean)
        num_bytes = bytes_to_send(size, self.num_islands, codec)  # in a mesh, in each direction
        return Traffic(num_bytes, num_bytes)

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        num_bytes = values.numel() * values.itemsize
        given = self._lane.swap(self.island, values.clone() if self.island == source else None)
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
            self._lane.messages.pop(self._num_messages - 2, None)  # every island that sent the latest one has read it
            self._lane.notify[self.island] = notify
            self._wake_others()
        return True

    def messages(self) -> dict[int, bytes]:
        with self._lane.changed:
            sent = self._lane.messages.get(self._num_messages, {})
            return {island: message for island, message in sent.items() if island != self.island}

    def close(self) -> None:
        self._lane.leave(self.island)
        with self._lane.changed:
            self._wake_others()

    def _wake_others(self) -> None:
        for island, notify in self._lane.notify.items():
            if island != self.island:
                notify()


def _decode(code: torch.Tensor, size: int, codec: Codec) -> torch.Tensor:
    values = torch.empty(size)
    codec.decode(code, values)
    return values
