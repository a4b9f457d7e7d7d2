"""fp4 E3M0 of Streaming DiLoCo (arXiv 2501.18512): a sign, three bits of exponent, no mantissa."""

from __future__ import annotations

import torch

from hf_diloco.codecs.blocks import MAGNITUDE_BITS
from hf_diloco.codecs.four_bits import BF16_BITS, FourBitCodec
from hf_diloco.codecs.loops import fp4
from hf_diloco.codecs.loops.base import Loops

MAGNITUDES = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
SMALLEST_SCALE = 2.0**-120  # scale x 2^-6 is still normal, so no processor flushes it to zero
ONE = 0x3F80_0000
HALF_OF_SMALLEST = 120 << 23  # 2^-7
HALF_MANTISSA = 1 << 22
EXPONENT_OF_ZERO = 120  # one less than that of 2^-6


class Fp4Codec(FourBitCodec):
    """v ~ +-scale x m, m = 0 or 2^-6 to 2^0; scale = max |v|, cut to bf16.

    The level nearest in value is taken, of two as near the larger. So |v - decoded| <= (1 + 2^-20) x max(|v| / 3,
    2^-7 x scale). Decoding rounds nothing, and coding what was decoded gives the same code again.

    Code: the sign in bit 3; in the bits below it 0 for m = 0, else 7 plus the exponent of m.
    """

    name = "fp4"

    def __init__(self, loops: Loops | None = fp4.LOOPS) -> None:
        super().__init__(loops, MAGNITUDES + [-magnitude for magnitude in MAGNITUDES])

    def _scales(self, largest: torch.Tensor) -> None:
        largest.view(torch.int32).bitwise_and_(BF16_BITS)
        largest.clamp_min_(SMALLEST_SCALE)

    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        bits = torch.mul(values, inverse_scale, out=scratch).view(torch.int32)
        magnitudes = (bits & MAGNITUDE_BITS).clamp_max_(ONE)
        # Half a mantissa rounds the exponent. Below the smallest level, what rounds to it has its own rule.
        exponents = (magnitudes + HALF_MANTISSA >> 23).sub_(EXPONENT_OF_ZERO)
        exponents = torch.maximum(exponents, (magnitudes >= HALF_OF_SMALLEST).int())
        return exponents.bitwise_or_(bits >> 28 & 8).to(torch.uint8)
