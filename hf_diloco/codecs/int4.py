"""4-bit integers with a scale for every 128 values (block-wise absmax, like int8)."""

from __future__ import annotations

import torch

from hf_diloco.codecs.four_bits import BF16_BITS, FourBitCodec
from hf_diloco.codecs.int8 import ROUNDING
from hf_diloco.codecs.loops import int4
from hf_diloco.codecs.loops.base import Loops

SCALE_OF_LARGEST = (1 + 2**-22) / 7
SMALLEST_SCALE = 2.0**-126


class Int4Codec(FourBitCodec):
    """v ~ scale x (code - 8); scale = max |v| / 7, cut to bf16; code = 8 + round(v / scale), 1 to 15.

    |v - decoded| <= (1/2 + 2^-20) x scale for all finite values. Decoding rounds nothing, and coding what was decoded
    gives the same code again.
    """

    name = "int4"

    def __init__(self, loops: Loops | None = int4.LOOPS) -> None:
        super().__init__(loops, [float(level) for level in range(-8, 8)])

    def _scales(self, largest: torch.Tensor) -> None:
        largest.mul_(SCALE_OF_LARGEST).view(torch.int32).bitwise_and_(BF16_BITS)
        largest.clamp_min_(SMALLEST_SCALE)

    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        torch.mul(values, inverse_scale, out=scratch)
        codes = self._scratch("codes", values, torch.uint8, self.block_values)
        return codes.copy_(scratch.add_(ROUNDING + 8).view(torch.int32))
