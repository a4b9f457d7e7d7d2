"""Error feedback on a processor: see `codecs.feedback`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Values, compiled

LANES = 32  # sums that are taken side by side


@compiled
def add_(values: Values, residual: Values, decay: np.float32) -> float:
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
