"""The fp4 format E3M0 of Streaming DiLoCo (arXiv 2501.18512): a sign, three bits of exponent, no mantissa."""

from __future__ import annotations

import numpy as np
import torch

from hf_diloco.codecs.blocks import BF16_BITS, FourBitCodec
from hf_diloco.codecs.compiled import (
    MAGNITUDE_BITS,
    Bytes,
    Loops,
    Values,
    compiled,
    cut,
    largest_magnitude,
    pack_pairs,
    read_bf16,
    write_bf16,
)

MAGNITUDES = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
SMALLEST_SCALE = np.float32(2.0**-120)  # scale x 2^-6 is still normal, so no processor flushes it to zero
ONE = np.int32(0x3F80_0000)
HALF_OF_SMALLEST = np.int32(120 << 23)  # 2^-7
HALF_MANTISSA = np.int32(1 << 22)
EXPONENT_OF_ZERO = np.int32(120)  # one less than that of 2^-6


@compiled
def _encode(values: Values, code: Bytes, num_values: int) -> None:
    """See `Loops`."""
    codes = np.empty(values.shape[1], np.uint8)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 2:]
        scale = max(cut(largest_magnitude(row), BF16_BITS), SMALLEST_SCALE)
        write_bf16(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            bits = np.float32(row[i] * inverse).view(np.int32)
            magnitude = np.int32(min(bits & MAGNITUDE_BITS, ONE))
            exponent = np.int32((magnitude + HALF_MANTISSA >> 23) - EXPONENT_OF_ZERO)
            codes[i] = max(exponent, np.int32(magnitude >= HALF_OF_SMALLEST)) | np.int32(bits >> 28 & 8)
        pack_pairs(codes, out)


@compiled
def _decode(code: Bytes, values: Values) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 2:]
        scale = read_bf16(code[block])
        for i in range(codes.shape[0]):
            pair = np.int32(codes[i])
            row[2 * i] = _level(pair) * scale
            row[2 * i + 1] = _level(np.int32(pair >> 4)) * scale


@compiled
def _level(code: np.int32) -> np.float32:
    """Decodes the four low bits of `code`."""
    exponent = np.int32(code & 7)
    magnitude = np.int32(exponent + EXPONENT_OF_ZERO << 23) if exponent > 0 else np.int32(0)
    return np.int32(magnitude | (code & 8) << 28).view(np.float32)


class Fp4Codec(FourBitCodec):
    """v ~ +-scale x m, m = 0 or 2^-6 to 2^0; scale = max |v|, cut to bf16.

    Values round to the nearest level, ties to the larger one. So |v - decoded| <= (1 + 2^-20) x max(|v| / 3,
    2^-7 x scale). Decoding is exact, and encoding decoded values gives the same code again.

    Code: the sign in bit 3; the lower bits are 0 for m = 0, else 7 plus the exponent of m.
    """

    name = "fp4"
    loops = Loops(_encode, _decode)
    levels = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))

    def _scales(self, largest: torch.Tensor) -> None:
        largest.view(torch.int32).bitwise_and_(int(BF16_BITS))
        largest.clamp_min_(float(SMALLEST_SCALE))

    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        bits = torch.mul(values, inverse_scale, out=scratch).view(torch.int32)
        magnitudes = (bits & int(MAGNITUDE_BITS)).clamp_max_(int(ONE))
        # Adding half a mantissa rounds the exponent. Values below the smallest level that round to it need a check.
        exponents = (magnitudes + int(HALF_MANTISSA) >> 23).sub_(int(EXPONENT_OF_ZERO))
        exponents = torch.maximum(exponents, (magnitudes >= int(HALF_OF_SMALLEST)).int())
        return exponents.bitwise_or_(bits >> 28 & 8).to(torch.uint8)
