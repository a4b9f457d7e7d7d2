"""The sign of every value and the mean magnitude of a block (scaled signSGD with error feedback, arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np
import torch

from hf_diloco.codecs.blocks import BlockCodec, pack_signs, unpack_signs
from hf_diloco.codecs.compiled import Bytes, Loops, Values, compiled, cut, fill_signs, pack_bits, read_fp32, write_fp32

SCALE_BITS = np.int32(~0xFFF)
LANES = 64  # sums that are accumulated in parallel


@compiled
def _encode(values: Values, code: Bytes, num_values: int) -> None:
    """See `Loops`."""
    is_negative = np.empty(values.shape[1], np.uint8)
    sums = np.empty(LANES)
    for block in range(values.shape[0]):
        row, out = values[block], code[block, 4:]
        sums[:] = 0
        for i in range(row.shape[0] // LANES):
            for lane in range(LANES):
                sums[lane] += abs(row[i * LANES + lane])
        write_fp32(code[block], cut(np.float32(sums.sum() / num_values), SCALE_BITS))
        for i in range(row.shape[0]):
            is_negative[i] = row[i] < np.float32(0)
        pack_bits(is_negative, out)


@compiled
def _decode(code: Bytes, values: Values) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        fill_signs(code[block, 4:], read_fp32(code[block]), values[block])


class SignCodec(BlockCodec):
    """v ~ scale x (1 if v >= 0 else -1); scale = the mean of |v| in its block, 1.008 bits per value.

    Zeros of either sign count as positive. The scale is cut to 12 bits of precision, so that the mean magnitude of
    decoded values is exactly the scale, in any order of summation. A block that holds inf or NaN has a scale that is
    not finite, and decodes to infinities or NaN.

    Block: the scale in fp32, then 512 bytes of signs, a set bit for v < 0; value i is bit i % 8 of byte i // 8.
    """

    name = "sign"
    block_values = 4096
    block_bytes = 4 + block_values // 8
    feedback_decay = 1.0

    loops = Loops(_encode, _decode)

    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        pack_signs(values, code[:, 4:])
        scratch = self._scratch("values", values, torch.float32, self.block_values)
        torch.abs(values, out=scratch)
        scale = scratch.sum(1, keepdim=True, dtype=torch.float64).div_(num_values).float()
        code[:, :4].view(torch.int32).copy_(scale.view(torch.int32).bitwise_and_(int(SCALE_BITS)))

    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        unpack_signs(code[:, 4:], values)
        values.mul_(code[:, :4].view(torch.float32))
