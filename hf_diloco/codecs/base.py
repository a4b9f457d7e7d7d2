"""The seam between numbers and bytes: what a codec is, and error feedback for what it leaves out.

Error feedback adds to a pseudo-gradient what a codec left out of the one before:

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
every codec's blocks."""

LANES = 32  # sums that are taken side by side


class Codec(ABC):
    """Turns fp32 values into the bytes that travel, and back.

    A vector is coded in blocks of `block_values` values, `block_bytes` bytes each, counted from its first value; the
    last block may hold fewer values, and takes as many bytes. So code can be cut, and pieces of it decoded, wherever
    a block begins. Numbers on the wire are little-endian.

    A codec is deterministic, both ways: equal values have equal code, and equal code is decoded to the same bits on
    all processors. Every instance may be used by several threads at once.

    Attributes:
        name: what the setting `payload` calls it.
        block_values: values in a block; a power of two.
        block_bytes: bytes that they take.
        is_exact: decoding gives back every value bit for bit.
        feedback_decay: by default the share of what is left out that is sent later (`ErrorFeedback`, whose `decay` it
            is). Above 0: what is left out is most of the values (`needs_feedback`).
    """

    name: str
    block_values: int
    block_bytes: int
    is_exact = False
    feedback_decay: ClassVar[float] = 0.0

    @property
    def needs_feedback(self) -> bool:
        """Without feedback nothing is learnt, and an average cannot be coded again.

        So islands send each other their codes, and each averages by itself.
        """
        return self.feedback_decay > 0

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` values take."""
        return -(-num_values // self.block_values) * self.block_bytes

    def locate(self, low: int, high: int) -> slice:
        """Where the code of the values from `low` to `high` lies; a block begins at `low`, and ends at `high`."""
        return slice(self.num_bytes(low), self.num_bytes(high))

    @abstractmethod
    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Writes the code of `values` to `code`.

        A block that holds a value that is not finite decodes to values that are not finite, or are beyond all
        reason, never to others that look right.

        Args:
            values: fp32, 1-D, contiguous; left as they are.
            code: uint8, 1-D, contiguous, `num_bytes(values.numel())` bytes.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `code` stands for to `values`; arguments as for `encode`. Any bytes are some values."""

    def prepare(self) -> None:
        """Codes one block of zeros, so that the first round does not wait for Numba and its machine code (seconds)."""
        values, code = torch.zeros(self.block_values), torch.empty(self.block_bytes, dtype=torch.uint8)
        self.encode(values, code)
        self.decode(code, values)

    def round_trip(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes to `out` what the code of `values` is decoded to; `out` may be `values`."""
        for low in range(0, values.numel(), TILE_VALUES):
            tile = values[low : low + TILE_VALUES]
            size = self.num_bytes(tile.numel())
            code = _round_trips.take(self.name, size, torch.uint8, values.device)
            self.encode(tile, code)
            self.decode(code, out[low : low + TILE_VALUES])


_round_trips = Workspace()


class ErrorFeedback:
    """One rank's residual e: fp32, on the host. A round that fails leaves it as it was.

    Takes 8 bytes a value: the residual, and the one that takes its place if the round is committed.

    Args:
        codec: how pseudo-gradients travel.
        decay: share of the residual that is added, above 0 up to 1.
        size: values.

    Attributes:
        residual: e; not a copy.
    """

    def __init__(self, codec: Codec, decay: float, size: int) -> None:
        self._codec = codec
        self._decay = decay
        self.residual = torch.zeros(size)
        self._next = torch.zeros(size)
        self._is_finite = True  # what `_next` was made from
        _add(torch.zeros(1), torch.zeros(1), decay)  # Numba is ready when the first round begins, as `Codec.prepare`

    def add_(self, delta: torch.Tensor) -> float:
        """Turns a pseudo-gradient into what is sent, before it is encoded; returns the sum of its squares."""
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
        """What `add_` made last was used: its residual counts from now on.

        Unless it is not finite: no residual would be, ever after.
        """
        if self._is_finite:
            self.residual, self._next = self._next, self.residual

    def commit_beside(self, progress: torch.Tensor) -> None:
        """As `commit`, where more was trained since `add_`; `progress` is all of that, less what was sent.

        Leaves what was trained since: takes out Delta(t) - sent(t) = e(t) - decay e(t-1).
        """
        progress.sub_(self._next).add_(self.residual, alpha=self._decay)
        self.commit()

    def load(self, residual: torch.Tensor | None) -> None:
        """Takes back a saved residual, without copying; None: nothing is left from before."""
        self.residual = torch.zeros_like(self._next) if residual is None else residual


def _add(values: torch.Tensor, residual: torch.Tensor, decay: float) -> float:
    """values += decay x residual, the product rounded by itself; returns the sum of their squares."""
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
