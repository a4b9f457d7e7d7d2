"""Numbers as their bits, and as little-endian bytes."""

from __future__ import annotations

import numpy as np

from hf_diloco.codecs.compiled import Bytes, Values, compiled

MAGNITUDE_BITS = np.int32(0x7FFF_FFFF)
INFINITY_BITS = np.int32(0x7F80_0000)
GATHER_BITS = np.uint64(0x0102_0408_1020_4080)  # times eight bytes of 0 or 1, that of byte i is in bit 56 + i


@compiled
def cut(value: np.float32, bits: np.int32) -> np.float32:
    """`value` with only these of its bits."""
    return np.int32(np.float32(value).view(np.int32) & bits).view(np.float32)


@compiled
def largest_magnitude(row: Values) -> np.float32:
    """max |v|; infinite if a value is infinite or NaN.

    By the bits of the magnitudes: as integers they are in the same order, NaN last.
    """
    bits = row.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & MAGNITUDE_BITS)
    return np.int32(min(largest, INFINITY_BITS)).view(np.float32)


@compiled
def write_fp32(code: Bytes, value: np.float32) -> None:
    """Writes the four bytes of `value`, wherever they lie."""
    bits = np.float32(value).view(np.int32)
    for place in range(4):
        code[place] = np.uint8(bits >> (8 * place))


@compiled
def read_fp32(code: Bytes) -> np.float32:
    """What `write_fp32` wrote."""
    low = np.int32(code[0]) | np.int32(code[1]) << 8
    return np.int32(low | np.int32(code[2]) << 16 | np.int32(code[3]) << 24).view(np.float32)


@compiled
def write_bf16(code: Bytes, value: np.float32) -> None:
    """Writes the upper two bytes of `value`: all of it, if it has no more bits than bf16."""
    bits = np.float32(value).view(np.int32)
    code[0] = np.uint8(bits >> 16)
    code[1] = np.uint8(bits >> 24)


@compiled
def read_bf16(code: Bytes) -> np.float32:
    """The bf16 that lies there."""
    return np.int32(np.int32(code[0]) << 16 | np.int32(code[1]) << 24).view(np.float32)


@compiled
def pack_pairs(codes: Bytes, out: Bytes) -> None:
    """Two codes of four bits a byte, the first in the low half."""
    for i in range(out.shape[0]):
        out[i] = codes[2 * i] | codes[2 * i + 1] << 4


@compiled
def pack_bits(is_set: Bytes, out: Bytes) -> None:
    """Eight bytes of 0 or 1 to one byte, the first in its lowest bit; `is_set` holds eight times as many as `out`."""
    eights = is_set.view(np.uint64)
    for i in range(out.shape[0]):
        out[i] = eights[i] * GATHER_BITS >> np.uint64(56)


@compiled
def fill_signs(bits: Bytes, magnitude: np.float32, out: Values) -> None:
    """Writes -magnitude for every set bit and magnitude for others; `out` holds up to eight times as many."""
    for i in range(out.shape[0] // 8):
        for place in range(8):
            out[8 * i + place] = -magnitude if bits[i] >> place & 1 else magnitude
    for i in range(out.shape[0] // 8 * 8, out.shape[0]):
        out[i] = -magnitude if bits[i // 8] >> (i % 8) & 1 else magnitude
