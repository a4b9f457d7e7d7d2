"""int4 on a processor: see `codecs.int4` and `codecs.four_bits`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Bytes, Values, compiled
from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import cut, largest_magnitude, pack_pairs, read_bf16, write_bf16

SCALE_OF_LARGEST = np.float32((1 + 2**-22) / 7)
SMALLEST_SCALE = np.float32(2.0**-126)
SCALE_BITS = np.int32(~0xFFFF)
ROUNDING = np.float32(1.5 * 2**23 + 8)


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    codes = np.empty(values.shape[1], np.uint8)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 2:]
        scale = max(cut(largest_magnitude(row) * SCALE_OF_LARGEST, SCALE_BITS), SMALLEST_SCALE)
        write_bf16(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            codes[i] = np.float32(row[i] * inverse + ROUNDING).view(np.int32)  # keeps the lowest byte
        pack_pairs(codes, out)


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 2:]
        scale = read_bf16(code[block])
        for i in range(codes.shape[0]):
            pair = np.int32(codes[i])
            row[2 * i] = np.float32((pair & 15) - 8) * scale
            row[2 * i + 1] = np.float32((pair >> 4) - 8) * scale


LOOPS = Loops(encode, decode)
