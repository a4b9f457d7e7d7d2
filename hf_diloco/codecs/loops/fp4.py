"""fp4 on a processor: see `codecs.fp4` and `codecs.four_bits`."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Bytes, Values, compiled
from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import MAGNITUDE_BITS, cut, largest_magnitude, pack_pairs, read_bf16, write_bf16

SMALLEST_SCALE = np.float32(2.0**-120)
SCALE_BITS = np.int32(~0xFFFF)
ONE = np.int32(0x3F80_0000)
HALF_OF_SMALLEST = np.int32(120 << 23)  # 2^-7
HALF_MANTISSA = np.int32(1 << 22)
EXPONENT_OF_ZERO = np.int32(120)


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    codes = np.empty(values.shape[1], np.uint8)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 2:]
        scale = max(cut(largest_magnitude(row), SCALE_BITS), SMALLEST_SCALE)
        write_bf16(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            bits = np.float32(row[i] * inverse).view(np.int32)
            magnitude = np.int32(min(bits & MAGNITUDE_BITS, ONE))
            exponent = np.int32((magnitude + HALF_MANTISSA >> 23) - EXPONENT_OF_ZERO)
            codes[i] = max(exponent, np.int32(magnitude >= HALF_OF_SMALLEST)) | np.int32(bits >> 28 & 8)
        pack_pairs(codes, out)


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 2:]
        scale = read_bf16(code[block])
        for i in range(codes.shape[0]):
            pair = np.int32(codes[i])
            row[2 * i] = _level(pair) * scale
            row[2 * i + 1] = _level(np.int32(pair >> 4)) * scale


@compiled
def _level(code: np.int32) -> np.float32:
    """What the four low bits of `code` stand for."""
    exponent = np.int32(code & 7)
    magnitude = np.int32(exponent + EXPONENT_OF_ZERO << 23) if exponent > 0 else np.int32(0)
    return np.int32(magnitude | (code & 8) << 28).view(np.float32)


LOOPS = Loops(encode, decode)
