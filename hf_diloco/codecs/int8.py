"""8-bit integers with a scale for every 256 values (block-wise absmax: Dettmers et al., arXiv 2110.02861)."""

from __future__ import annotations

import numpy as np
import torch

from hf_diloco.codecs.blocks import BlockCodec
from hf_diloco.codecs.compiled import Bytes, Loops, Values, compiled, cut, largest_magnitude, read_fp32, write_fp32

# Slightly more than 1/127, so that encoding a decoded block gives the same scale again, not one ulp less.
SCALE_OF_LARGEST = np.float32((1 + 2**-22) / 127)
SMALLEST_SCALE = np.float32(2.0**-126)  # the smallest normal number: its reciprocal is finite
SCALE_BITS = np.int32(~0x7F)
# Added to a float, it moves the nearest integer, ties to even, into the low bits of the mantissa.
ROUNDING = np.float32(1.5 * 2**23)


@compiled
def _encode(values: Values, code: Bytes, num_values: int) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 4:]
        scale = max(cut(largest_magnitude(row) * SCALE_OF_LARGEST, SCALE_BITS), SMALLEST_SCALE)
        write_fp32(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            out[i] = np.float32(row[i] * inverse + ROUNDING).view(np.int32)  # keeps the lowest byte


@compiled
def _decode(code: Bytes, values: Values) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 4:]
        scale = read_fp32(code[block])
        for i in range(row.shape[0]):
            row[i] = np.float32(np.int8(codes[i])) * scale


class Int8Codec(BlockCodec):
    """v ~ scale x code; scale = max |v| / 127, code = round(v / scale), 8.125 bits per value.

    |v - decoded| <= (1/2 + 2^-15) x scale for all finite values. The scale is cut to 17 bits of precision, so that
    scale x code, and hence decoding, is exact. Encoding decoded values gives the same code again.
    A block that holds inf or NaN has an infinite scale and decodes to infinities and NaN.

    Block: the scale in fp32, then 256 int8.
    """

    name = "int8"
    block_values = 256
    block_bytes = 4 + 256
    loops = Loops(_encode, _decode)

    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        quotients = self._scratch("values", values, torch.float32, self.block_values)
        scale = self._largest_magnitudes(values, quotients)
        scale.mul_(float(SCALE_OF_LARGEST)).view(torch.int32).bitwise_and_(int(SCALE_BITS))
        scale.clamp_min_(float(SMALLEST_SCALE))
        code[:, :4].view(torch.float32).copy_(scale)
        torch.mul(values, scale.reciprocal_(), out=quotients)
        code[:, 4:].copy_(quotients.add_(float(ROUNDING)).view(torch.int32))  # keeps the lowest byte

    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        scale = self._scratch("largest", values, torch.float32, 1)
        scale.copy_(code[:, :4].view(torch.float32))
        values.copy_(code[:, 4:].view(torch.int8))
        values.mul_(scale)
