"""sign on a processor: see `codecs.sign`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Bytes, Values, compiled
from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import cut, fill_signs, pack_bits, read_fp32, write_fp32

SCALE_BITS = np.int32(~0xFFF)
LANES = 64  # sums that are taken side by side


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    is_negative = np.empty(values.shape[1], np.uint8)
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
        pack_bits(is_negative, out)


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        fill_signs(code[block, 4:], read_fp32(code[block]), values[block])


LOOPS = Loops(encode, decode)
