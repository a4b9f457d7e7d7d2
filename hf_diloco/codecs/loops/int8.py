"""int8 on a processor: see `codecs.int8`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Bytes, Values, compiled
from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import cut, largest_magnitude, read_fp32, write_fp32

SCALE_OF_LARGEST = np.float32((1 + 2**-22) / 127)
SMALLEST_SCALE = np.float32(2.0**-126)
SCALE_BITS = np.int32(~0x7F)
ROUNDING = np.float32(1.5 * 2**23)


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 4:]
        scale = max(cut(largest_magnitude(row) * SCALE_OF_LARGEST, SCALE_BITS), SMALLEST_SCALE)
        write_fp32(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            out[i] = np.float32(row[i] * inverse + ROUNDING).view(np.int32)  # keeps the lowest byte


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 4:]
        scale = read_fp32(code[block])
        for i in range(row.shape[0]):
            row[i] = np.float32(np.int8(codes[i])) * scale


LOOPS = Loops(encode, decode)
