"""fp4 E3M0 of Streaming DiLoCo (arXiv 2501.18512): a sign, three bits of exponent, no mantissa."""

from __future__ import annotations

import torch

from hf_diloco.codecs.four_bits import BF16_BITS, FourBitCodec

MAGNITUDES = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
SMALLEST_SCALE = 2.0**-120  # scale x 2^-6 is still normal, so no processor flushes it to zero
HALF_MANTISSA = 1 << 9  # of fp16


class Fp4Codec(FourBitCodec):
    """v ~ +-scale x m, m = 0 or 2^-6 to 2^0; scale = max |v|, cut to bf16.

    The level nearest in value is taken, of two as near the larger, after |v| / scale was rounded to fp16. So
    |v - decoded| <= (1 + 2^-9) x max(|v| / 3, 2^-7 x scale). Decoding rounds nothing, and coding what was decoded
    gives the same code again.

    Code: the sign in bit 3; in the bits below it 0 for m = 0, else 7 plus the exponent of m.
    """

    name = "fp4"

    def __init__(self) -> None:
        super().__init__(MAGNITUDES + [-magnitude for magnitude in MAGNITUDES])

    def _scales(self, largest: torch.Tensor) -> None:
        largest.view(torch.int32).bitwise_and_(BF16_BITS)
        largest.clamp_min_(SMALLEST_SCALE)

    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        # Times 2^-8, 2^-6 becomes the smallest normal number of fp16, and the exponent field counts from there as the
        # code does: numbers below have 0 in it, and steps as wide as the first binade. Half a mantissa rounds it.
        torch.mul(values, inverse_scale.mul_(2.0**-8), out=scratch)
        halves = self._scratch("codes", values, torch.float16, self.block_values)
        codes = halves.copy_(scratch).view(torch.int16).add_(HALF_MANTISSA)
        # Four codes at a time; what comes from the next one is masked.
        wide = codes.view(torch.int64)
        signs = self._scratch("signs", values, torch.int64, wide.shape[1])
        torch.bitwise_right_shift(wide, 12, out=signs).bitwise_and_(0x0008_0008_0008_0008)
        wide.bitwise_right_shift_(10).bitwise_and_(0x0007_0007_0007_0007).bitwise_or_(signs)
        return codes
