"""4-bit integers with a scale for every 128 values (block-wise absmax, like int8)."""

from __future__ import annotations

import numpy as np
import torch

from hf_diloco.codecs.blocks import BF16_BITS, FourBitCodec
from hf_diloco.codecs.compiled import (
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

SCALE_OF_LARGEST = np.float32((1 + 2**-22) / 7)
SMALLEST_SCALE = np.float32(2.0**-126)
ROUNDING = np.float32(1.5 * 2**23 + 8)  # as in int8, plus 8, so that codes are not negative


@compiled
def _encode(values: Values, code: Bytes, num_values: int) -> None:
    """See `Loops`."""
    codes = np.empty(values.shape[1], np.uint8)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 2:]
        scale = max(cut(largest_magnitude(row) * SCALE_OF_LARGEST, BF16_BITS), SMALLEST_SCALE)
        write_bf16(code[block], scale)
        inverse = np.float32(1) / scale
        for i in range(row.shape[0]):
            codes[i] = np.float32(row[i] * inverse + ROUNDING).view(np.int32)  # keeps the lowest byte
        pack_pairs(codes, out)


@compiled
def _decode(code: Bytes, values: Values) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        row, codes = values[block], code[block, 2:]
        scale = read_bf16(code[block])
        for i in range(codes.shape[0]):
            pair = np.int32(codes[i])
            row[2 * i] = np.float32((pair & 15) - 8) * scale
            row[2 * i + 1] = np.float32((pair >> 4) - 8) * scale


class Int4Codec(FourBitCodec):
    """v ~ scale x (code - 8); scale = max |v| / 7, cut to bf16; code = 8 + round(v / scale), 1 to 15.

    |v - decoded| <= (1/2 + 2^-20) x scale for all finite values. Decoding is exact, and encoding decoded values gives
    the same code again.
    """

    name = "int4"
    loops = Loops(_encode, _decode)
    levels = tuple(float(level) for level in range(-8, 8))

    def _scales(self, largest: torch.Tensor) -> None:
        largest.mul_(float(SCALE_OF_LARGEST)).view(torch.int32).bitwise_and_(int(BF16_BITS))
        largest.clamp_min_(float(SMALLEST_SCALE))

    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        torch.mul(values, inverse_scale, out=scratch)
        codes = self._scratch("codes", values, torch.uint8, self.block_values)
        return codes.copy_(scratch.add_(float(ROUNDING)).view(torch.int32))
