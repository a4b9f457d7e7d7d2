"""8-bit integers with a scale for every 256 values (block-wise absmax: Dettmers et al., arXiv 2110.02861)."""

from __future__ import annotations

import torch

from hf_diloco.codecs.blocks import BlockCodec
from hf_diloco.codecs.loops import int8
from hf_diloco.codecs.loops.base import Loops

# 1/127 and a little more, so that the scale of a block that was decoded comes out as what it was, not an ulp below.
SCALE_OF_LARGEST = (1 + 2**-22) / 127
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: its reciprocal is finite
SCALE_BITS = ~0x7F
# Adding it to a float moves the nearest integer, ties to even, into the low bits of the mantissa.
ROUNDING = 1.5 * 2**23


class Int8Codec(BlockCodec):
    """v ~ scale x code; scale = max |v| / 127, code = round(v / scale), 8.125 bits a value.

    |v - decoded| <= (1/2 + 2^-15) x scale for all finite values. The scale is cut to 17 bits of precision, so
    that scale x code is exact: decoding rounds nothing, and coding what was decoded gives the same code again.
    A block that holds inf or NaN has an infinite scale and decodes to infinities and NaN.

    Block: the scale in fp32, then 256 int8.
    """

    name = "int8"
    block_values = 256
    block_bytes = 4 + 256

    def __init__(self, loops: Loops | None = int8.LOOPS) -> None:
        super().__init__(loops)

    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        quotients = self._scratch("values", values, torch.float32, self.block_values)
        scale = self._largest_magnitudes(values, quotients)
        scale.mul_(SCALE_OF_LARGEST).view(torch.int32).bitwise_and_(SCALE_BITS)
        scale.clamp_min_(SMALLEST_SCALE)
        code[:, :4].view(torch.float32).copy_(scale)
        torch.mul(values, scale.reciprocal_(), out=quotients)
        code[:, 4:].copy_(quotients.add_(ROUNDING).view(torch.int32))  # keeps the lowest byte

    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        scale = self._scratch("largest", values, torch.float32, 1)
        scale.copy_(code[:, :4].view(torch.float32))
        values.copy_(code[:, 4:].view(torch.int8))
        values.mul_(scale)
