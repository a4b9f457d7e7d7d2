"""What a round measured: bytes, seconds, and how the islands' pseudo-gradients relate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash

from hf_diloco.transport.base import Traffic


@dataclass(frozen=True)
class SyncReport:
    """One committed round as this island measured it; bytes are payload, summed over the island's ranks.

    Attributes:
        round: number of the round, from 1.
        participants: the islands whose pseudo-gradients were averaged.
        seconds_computing: from the end of the last round to the start of this one.
        seconds_waiting: until all islands had arrived, and until all had voted.
        seconds_exchanging: moving and averaging pseudo-gradients.
        seconds_applying: reading and writing masters, the outer step.
        pseudo_gradient_norm: Euclidean norm of this island's own.
        cosine: of this island's pseudo-gradient to the average of the others'; None for a single island, and for
            payloads that leave most of it out.
        weight: examples or tokens behind it, or 1.
        outer_hash: digest of the outer parameters after the round.
        fragment: whose round it was.
        seconds_hidden: of those waiting and exchanging, how many passed behind inner steps.
    """

    round: int
    participants: list[int]
    seconds_computing: float
    seconds_waiting: float
    seconds_exchanging: float
    seconds_applying: float
    bytes_sent: int
    bytes_received: int
    pseudo_gradient_norm: float
    cosine: float | None
    weight: float
    outer_hash: str
    fragment: int = 0
    seconds_hidden: float = 0.0


class SyncClock:
    """Where the seconds and bytes of a round go.

    Args:
        last_end: when the round before it was over, in seconds of the monotonic clock.

    Attributes:
        computing: until it was made.
        waiting: for other islands.
        exchanging: moving and averaging pseudo-gradients.
        applying: what training waits for beside: the masters, the outer step.
        stepping: the same behind inner steps.
        traffic: of this rank.
    """

    def __init__(self, last_end: float | None = None) -> None:
        self.computing = 0.0 if last_end is None else time.monotonic() - last_end
        self.waiting = self.exchanging = self.applying = self.stepping = 0.0
        self.traffic = Traffic()

    @contextmanager
    def counts(self, what: Literal["waiting", "exchanging", "applying", "stepping"]) -> Iterator[None]:
        """Counts what is done within."""
        begun = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - begun)


class AverageStats:
    """What is learnt of an average block by block while these are in the cache: sums for the cosine.

    Attributes:
        dot: of this rank's own values and the average.
        square: of the average.
        digest: of the whole island's average.
    """

    def __init__(self) -> None:
        self.dot = 0.0
        self.square = 0.0
        self.digest = ""

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """See `transport.base.Observer`."""
        self.dot += float(torch.dot(own, mean))
        self.square += float(torch.dot(mean, mean))


class LaneStats(AverageStats):
    """The same, and a digest of each lane's average."""

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
        """The digest of each lane, in order."""
        return [digest.hexdigest() for digest in self._digests]


def cosine_to_others(dot: float, own: float, mean: float, share: float) -> float | None:
    """Cosine of Delta_i to (mean - share * Delta_i), the part of the mean that the others made."""
    if share >= 1:
        return None
    others = mean - 2 * share * dot + share * share * own
    if not (own > 0 and others > 0):
        return None
    return (dot - share * own) / math.sqrt(own * others)
