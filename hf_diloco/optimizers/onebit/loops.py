"""1-bit compression with error feedback on a processor, in one pass over memory: see `onebit.feedback`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.bits import pack_bits
from hf_diloco.codecs.compiled import Bytes, Values, compiled

TILE = 4096  # values that several loops handle while they are in the cache
LANES = 64  # sums that are taken side by side


@compiled
def add_and_pack(values: Values, total: Values, scale: np.float32, bits: Bytes) -> float:
    """total = values + (total - scale sgn(total)), its signs to `bits`; returns the sum of its squares.

    A set bit is v < 0; the last byte is filled up with zeros.
    """
    is_negative = np.zeros(TILE, np.uint8)
    sums = np.zeros(LANES)
    rest = 0.0
    for begin in range(0, values.shape[0], TILE):
        new, tile = values[begin : begin + TILE], total[begin : begin + TILE]
        size = new.shape[0]
        for i in range(size):
            before = tile[i]
            tile[i] = new[i] + (before + scale if before < np.float32(0) else before - scale)
        for i in range(size):
            is_negative[i] = tile[i] < np.float32(0)
        is_negative[size:] = 0
        pack_bits(is_negative, bits[begin // 8 : (begin + size + 7) // 8])
        for i in range(size // LANES):
            for lane in range(LANES):
                value = tile[i * LANES + lane]
                sums[lane] += np.float64(value) * np.float64(value)
        for i in range(size // LANES * LANES, size):
            rest += np.float64(tile[i]) * np.float64(tile[i])
    return float(sums.sum() + rest)


@compiled
def add_signs(bits: Bytes, magnitude: np.float32, out: Values) -> None:
    """Adds -magnitude for every set bit and magnitude for others; `out` holds up to eight times as many values."""
    for i in range(out.shape[0] // 8):
        for place in range(8):
            out[8 * i + place] += -magnitude if bits[i] >> place & 1 else magnitude
    for i in range(out.shape[0] // 8 * 8, out.shape[0]):
        out[i] += -magnitude if bits[i // 8] >> (i % 8) & 1 else magnitude
