"""Error feedback: what a codec left out of a pseudo-gradient is added to the next one.

    a(t)    = decay e(t-1) + Delta(t)
    sent(t) = decode(encode(a(t)))
    e(t)    = a(t) - sent(t)

(Seide et al., Interspeech 2014, with decay 1; SparseLoCo, arXiv 2508.15706, with decay 0.95.)
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hf_diloco.codecs.base import TILE_VALUES, Codec
from hf_diloco.codecs.compiled import Values, compiled, is_compiled_for

LANES = 32  # sums that are taken side by side


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
