"""sign on a processor: see `codecs.sign`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import cut, read_fp32, write_fp32
from hf_diloco.compiled import Bytes, Values, compiled

SCALE_BITS = np.int32(~0xFFF)
LANES = 64  # sums that are taken side by side
GATHER_BITS = np.uint64(0x0102_0408_1020_4080)  # times eight bytes of 0 or 1, that of byte i is in bit 56 + i


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    is_negative = np.empty(values.shape[1], np.uint8)
    eights = is_negative.view(np.uint64)
    sums = np.empty(LANES)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 4:]
        sums[:] = 0
        for i in range(row.shape[0] // LANES):
            for lane in range(LANES):
                sums[lane] += abs(row[i * LANES + lane])
        write_fp32(code[block], cut(np.float32(sums.sum() / num_values), SCALE_BITS))
        for i in range(row.shape[0]):
            is_negative[i] = row[i] < np.float32(0)
        for i in range(out.shape[0]):
            out[i] = eights[i] * GATHER_BITS >> np.uint64(56)


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, eights = values[block], code[block, 4:]
        scale = read_fp32(code[block])
        for i in range(eights.shape[0]):
            for place in range(8):
                row[8 * i + place] = -scale if eights[i] >> place & 1 else scale


LOOPS = Loops(encode, decode)
