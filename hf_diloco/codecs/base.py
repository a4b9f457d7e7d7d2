"""The interface of a codec, which turns numbers into bytes and back, and error feedback for what a codec loses.

Error feedback adds the codec's error of one pseudo-gradient, the residual, to the next:

    a(t)    = decay e(t-1) + Delta(t)
    sent(t) = decode(encode(a(t)))
    e(t)    = a(t) - sent(t)

(Seide et al., Interspeech 2014, with decay 1; SparseLoCo, arXiv 2508.15706, with decay 0.95.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from hf_diloco.codecs.compiled import Values, compiled, is_compiled_for
from hf_diloco.utils.workspace import Workspace

TILE_VALUES = 1 << 18
"""Values that several passes handle at a time, so that they run in the processor's cache: 1 MiB of fp32. A multiple of
every codec's block."""

LANES = 32  # sums that are accumulated in parallel


class Codec(ABC):
    """Turns fp32 values into the bytes that travel, and back.

    A vector is encoded in blocks of `block_values` values and `block_bytes` bytes, counted from its first value. The
    last block may hold fewer values, but takes as many bytes. So code can be cut, and pieces decoded, at every block
    boundary. Numbers on the wire are little-endian.

    A codec is deterministic in both directions: equal values have equal code, and equal code decodes to the same bits
    on all processors. Instances are thread-safe.

    Attributes:
        name: the codec's name in the setting `payload`.
        block_values: values in a block; a power of two, at most `TILE_VALUES`.
        block_bytes: bytes of a block.
        is_exact: whether decoding restores every value bit for bit.
        feedback_decay: the default `decay` of `ErrorFeedback`. Above 0 for codecs that drop most of the information
            (`needs_feedback`).
    """

    name: str
    block_values: int
    block_bytes: int
    is_exact = False
    feedback_decay: ClassVar[float] = 0.0

    @property
    def needs_feedback(self) -> bool:
        """Whether training needs error feedback. If so, an average cannot be encoded again without great loss: islands
        send each other their encoded values, and each computes the average itself."""
        return self.feedback_decay > 0

    def num_bytes(self, num_values: int) -> int:
        """Returns the bytes that `num_values` values take."""
        return -(-num_values // self.block_values) * self.block_bytes

    def locate(self, low: int, high: int) -> slice:
        """Returns the slice of the code for values from `low` to `high`, which must be block boundaries."""
        return slice(self.num_bytes(low), self.num_bytes(high))

    @abstractmethod
    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Encodes `values` into `code`.

        A block with a value that is not finite decodes to values that are not finite or absurdly large, never to
        values that look right.

        Args:
            values: fp32, 1-D, contiguous; not modified.
            code: uint8, 1-D, contiguous, `num_bytes(values.numel())` bytes.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes `code` into `values`; arguments as for `encode`. Any bytes decode to some values."""

    def prepare(self) -> None:
        """Encodes one block of zeros, so that the first round does not wait seconds for Numba to compile or load."""
        values, code = torch.zeros(self.block_values), torch.empty(self.block_bytes, dtype=torch.uint8)
        self.encode(values, code)
        self.decode(code, values)

    def round_trip(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encodes and decodes `values` into `out`, which may be `values`."""
        for low in range(0, values.numel(), TILE_VALUES):
            tile = values[low : low + TILE_VALUES]
            size = self.num_bytes(tile.numel())
            code = _round_trips.take(self.name, size, torch.uint8, values.device)
            self.encode(tile, code)
            self.decode(code, out[low : low + TILE_VALUES])


_round_trips = Workspace()


class ErrorFeedback:
    """One rank's residual e: fp32, on the host. A round that fails does not change it.

    Takes 8 bytes per value: for the residual (`residual`, not a copy), and for the one that replaces it if the round
    is committed. `decay` is the share of the residual that is added, above 0 up to 1.
    """

    def __init__(self, codec: Codec, decay: float, size: int) -> None:
        self._codec = codec
        self._decay = decay
        self.residual = torch.zeros(size)
        self._next = torch.zeros(size)
        self._is_finite = True  # whether the values behind `_next` were
        _add(torch.zeros(1), torch.zeros(1), decay)  # compiles before the first round, like `Codec.prepare`

    def add_(self, delta: torch.Tensor) -> float:
        """Adds the residual to a pseudo-gradient in place, before it is encoded; returns its sum of squares."""
        square = 0.0
        for low in range(0, delta.numel(), TILE_VALUES):
            where = slice(low, low + TILE_VALUES)
            tile, residual, left = delta[where], self.residual[where], self._next[where]
            square += _add(tile, residual, self._decay)
            self._codec.round_trip(tile, left)
            torch.sub(tile, left, out=left)
        self._is_finite = math.isfinite(square)
        return square

    def commit(self) -> None:
        """Replaces the residual by that of the last `add_`, whose values a committed round has used; not if the new
        one is not finite, as no later residual would be finite either."""
        if self._is_finite:
            self.residual, self._next = self._next, self.residual

    def commit_beside(self, progress: torch.Tensor) -> None:
        """Like `commit`, if training went on since `add_`. `progress` is all progress, minus the values sent.

        Reduces `progress` to the part since `add_`: subtracts Delta(t) - sent(t) = e(t) - decay e(t-1).
        """
        progress.sub_(self._next).add_(self.residual, alpha=self._decay)
        self.commit()

    def load(self, residual: torch.Tensor | None) -> None:
        """Restores a saved residual, without copying; None: zero."""
        self.residual = torch.zeros_like(self._next) if residual is None else residual


def _add(values: torch.Tensor, residual: torch.Tensor, decay: float) -> float:
    """values += decay x residual, without fused operations; returns the sum of their squares."""
    if is_compiled_for(values):
        return _add_in_lanes(values.numpy(), residual.numpy(), np.float32(decay))
    values.add_(residual * decay)
    return float(torch.dot(wide := values.double(), wide))


@compiled
def _add_in_lanes(values: Values, residual: Values, decay: np.float32) -> float:
    """values += decay x residual; returns the sum of their squares."""
    sums = np.zeros(LANES)
    whole = values.shape[0] // LANES
    for i in range(whole):
        for lane in range(LANES):
            value = values[i * LANES + lane] + decay * residual[i * LANES + lane]
            values[i * LANES + lane] = value
            sums[lane] += np.float64(value) * np.float64(value)
    square = sums.sum()
    for i in range(whole * LANES, values.shape[0]):
        values[i] += decay * residual[i]
        square += np.float64(values[i]) * np.float64(values[i])
    return float(square)
