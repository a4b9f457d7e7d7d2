"""The interface of transports between islands: average one lane's values, and copy them from one island to the others.

A *lane* is the part of the outer state that one rank of each island owns. An `Exchange` connects the owners of one
lane; it knows islands and numbers, nothing of models or algorithms. Transports differ in how bytes travel, not in
their results: sums run in fp32, in the order of the islands' numbers, with operations that round the same way on every
processor, so that all islands, and all transports, get the same bits. A codec's blocks are counted from the lane's
first value, however the transport cuts it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import xxhash

from hf_diloco.codecs import Codec
from hf_diloco.errors import ExchangeError
from hf_diloco.sealing.channel import ISLANDS, Parties
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.clock import REAL, Clock

Observer = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with each block as (own values, average), in order, just before the average replaces the values."""

BLOCK_VALUES = 1 << 18
"""Values that arithmetic handles at a time: 1 MiB a buffer, so that its passes run in the processor's cache. A
multiple of every codec's block."""

BURST_SECONDS = 0.1
"""A `RateLimit` lets unused allowance of this many seconds be made up for."""


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that this process sent and received, counted when they are handed to the transport."""

    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received)


class RateLimit:
    """Limits how fast bytes leave this process, so that an exchange leaves room on the link for other traffic.

    A token bucket, which several threads may share. In any `t` seconds it lets through at most `(t + BURST_SECONDS) *
    bytes_per_second` bytes; None lets everything through.
    """

    def __init__(self, bytes_per_second: float | None = None, clock: Clock = REAL) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second={bytes_per_second}: input should be more than 0, or None")
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = float("-inf")  # when everything taken so far is within the limit

    def take(self, num_bytes: int) -> None:
        """Waits until `num_bytes` may be sent; first come, first served."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = self._clock.now()
            self._paid_until = max(self._paid_until, now - BURST_SECONDS) + num_bytes / self.bytes_per_second
            pause = self._paid_until - now
        if pause > 0:
            self._clock.sleep(pause)

    @property
    def pace(self) -> Callable[[int], None] | None:
        """The function to call before sending a number of bytes, `take`; None without a limit."""
        return None if self.bytes_per_second is None else self.take

    def seconds(self, num_bytes: int) -> float:
        """Returns the shortest time in seconds in which `num_bytes` can be sent."""
        if self.bytes_per_second is None:
            return 0.0
        return max(0.0, num_bytes / self.bytes_per_second - BURST_SECONDS)

    def check(self, num_bytes: int, what: str, timeout: float, otherwise: str) -> None:
        """Raises `ExchangeError` if `num_bytes` take longer than `timeout` seconds at this rate."""
        seconds = self.seconds(num_bytes)
        if self.bytes_per_second and seconds > timeout:
            raise ExchangeError(
                f"at rate_limit ({self.bytes_per_second:,.0f} bytes/s) the {num_bytes:,} bytes that this {what} take "
                f"{seconds:,.0f} s, but exchange_timeout is {timeout:g} s: raise one of them, or {otherwise}"
            )


@dataclass(frozen=True)
class Lane:
    """One end of a lane, whose owners are fully connected: the settings that they agree on before they connect.

    Attributes:
        store: where the owners find each other's ports; reachable from all islands.
        name: unique in the run.
        address: local address to listen on, as the other islands see it.
        timeout: seconds that connecting, and later each whole exchange, may take.
        key: of the run; with one, peers prove that they hold it, and all traffic is sealed. Default: peers are not
            authenticated, and tensors travel unsealed.
        num_connections: between any two owners, the same on all.
        rate_limit: for all that this process sends; lanes may share one. Default: none.
        parties: which islands the owners are; default: numbered as the owners are.
        should_give_up: polled, with the seconds waited, until all peers have published their addresses; True ends the
            wait.
    """

    store: ValueStore
    name: str
    island: int
    num_islands: int
    address: str
    timeout: float
    key: LinkKey | None = None
    num_connections: int = 1
    rate_limit: RateLimit = field(default_factory=RateLimit)
    parties: Parties = ISLANDS
    should_give_up: Callable[[float], bool] = lambda waited: False

    @property
    def peers(self) -> list[int]:
        """All owners except this one."""
        return [peer for peer in range(self.num_islands) if peer != self.island]


class Exchange(ABC):
    """The owners of one lane, one for each island.

    Every method is collective over the islands and blocks until this island's part is done. An `ExchangeError` leaves
    `values` undefined and the exchange closed.
    """

    island: int
    num_islands: int

    def expect(self, size: int, codec: Codec) -> None:
        """Announces the number of values of the next `prepare`, the same on all islands, whenever it comes.

        Peers' data can then be received before this island has its own. Does not block; optional.
        """
        return

    def prepare(self, values: torch.Tensor, codec: Codec) -> None:
        """Announces that `average` of these `values` is the next exchange on all islands, whenever it comes.

        The values may be sent at once, and peers' data received before this island asks for them. Does not block;
        optional. The values must not change until then.
        """
        return

    @abstractmethod
    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        """Replaces `values` (fp32, host, 1-D, equal length everywhere) by the weighted mean over the islands.

        There is one non-negative weight per island, equal on all. An island of weight 0 takes part in the transfer,
        but its values are never used, not even if they are NaN.

        Raises `IslandLostError` if an island did not send or receive in time, `ExchangeError` if the transfer failed
        otherwise.
        """

    @abstractmethod
    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        """Replaces `values` (fp32, host, 1-D) by those of island `source`, exactly. Raises as `average`."""

    @abstractmethod
    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        """Sends a small record to all peers, beside the values. Does not block.

        Every island calls it equally often, and takes part in the same exchanges between the calls. A peer's n-th
        message belongs to this island's n-th call.

        Args:
            message: if it is too long for the transport, peers receive an empty one.
            notify: called, on any thread, when a new message has arrived, or an island is lost.

        Returns False if no messages will arrive: the transport carries none, or is closed.
        """

    @abstractmethod
    def messages(self) -> dict[int, bytes]:
        """Returns the peers' messages of the latest `send_message` that have arrived undamaged. Does not block."""

    def find_broken(self) -> list[int]:
        """Returns the islands whose connection is known to have broken since the last exchange; does not block."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Closes all connections at once; may be called more than once."""


class AverageStats:
    """Statistics of an average, computed block by block while the blocks are in cache: sums for the cosine (`dot`: of
    this rank's own values and the average; `square`: of the average), and the digest of the whole island's average."""

    def __init__(self) -> None:
        self.dot = 0.0
        self.square = 0.0
        self.digest = ""

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """See `Observer`."""
        self.dot += float(torch.dot(own, mean))
        self.square += float(torch.dot(mean, mean))


class LaneStats(AverageStats):
    """The same statistics, and a digest of each lane's average."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: list[Any] = []

    def begin_lane(self) -> None:
        self._digests.append(xxhash.xxh3_128())

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        super().observe(own, mean)
        self._digests[-1].update(mean.numpy().data)

    @property
    def digests(self) -> list[str]:
        """The digests of the lanes, in order."""
        return [digest.hexdigest() for digest in self._digests]


def averaged_by_all(num_islands: int, codec: Codec) -> bool:
    """Whether each island averages all values itself, instead of one piece on behalf of all."""
    return num_islands == 2 or codec.needs_feedback


def bytes_to_send(size: int, num_islands: int, codec: Codec) -> int:
    """Returns the bytes that each island sends for an average, apart from the rounding of pieces."""
    num_bytes = (num_islands - 1) * codec.num_bytes(size)
    return num_bytes if averaged_by_all(num_islands, codec) else 2 * num_bytes // num_islands


def cut_into_pieces(size: int, num_islands: int, codec: Codec) -> list[slice]:
    """Cuts `size` values into one piece per island, of nearly equal length, in whole blocks of `codec`."""
    num_blocks = -(-size // codec.block_values)
    bounds = [min(size, num_blocks * k // num_islands * codec.block_values) for k in range(num_islands + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def weighted_mean(parts: Sequence[torch.Tensor], weights: Sequence[float], keep: int | None) -> torch.Tensor:
    """Returns the mean of fp32 `parts` of equal length, summed in the order given, in one of the parts.

    Each operation is a plain multiplication or addition: fused multiply-adds would round differently in the vector
    body and the scalar tail of a kernel, and from one processor type to the next, and islands would drift apart.

    The part at index `keep`, if any, stays unchanged (it is returned only if no other has a weight); the others are
    overwritten. Weights are not negative, and not all 0.
    """
    counted = [island for island, weight in enumerate(weights) if weight > 0]
    if len(counted) == 1:
        return parts[counted[0]]
    values = list(parts)
    total = sum(weights)
    uniform = len({weights[island] for island in counted}) == 1
    if not uniform:
        for island in counted:
            share = weights[island] / total
            values[island] = values[island] * share if island == keep else values[island].mul_(share)
    first, second, *others = counted
    mean = torch.add(values[first], values[second], out=values[second if first == keep else first])
    for island in others:
        mean.add_(values[island])
    return mean.mul_(1.0 / len(counted)) if uniform else mean
