"""What codecs of four bits a value share: sixteen levels, two codes a byte, a bf16 scale for every 128 values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from hf_diloco.codecs.blocks import BlockCodec

BF16_BITS = np.int32(~0xFFFF)


class FourBitCodec(BlockCodec):
    """v ~ scale x levels[code], 4.125 bits a value.

    Block: the scale in bf16, then 64 bytes; byte i has the code of value 2i in its low half, of value 2i + 1 in its
    high half. The scale is positive, or infinite if a value is not finite: then all decode to infinities and NaN.
    """

    block_values = 128
    block_bytes = 2 + 64

    levels: ClassVar[Sequence[float]]

    def __init__(self, compiled: bool = True) -> None:
        super().__init__(compiled)
        self._tables: dict[torch.device, torch.Tensor] = {}

    @abstractmethod
    def _scales(self, largest: torch.Tensor) -> None:
        """Turns the largest magnitudes into scales: normal numbers, with no more bits than bf16 has."""

    @abstractmethod
    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The codes of `values`, uint8; overwrites both other arguments."""

    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        scratch = self._scratch("values", values, torch.float32, self.block_values)
        scale = self._largest_magnitudes(values, scratch)
        self._scales(scale)
        code[:, :2].view(torch.bfloat16).copy_(scale)
        codes = self._codes(values, scale.reciprocal_(), scratch)
        torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=code[:, 2:])

    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        indices = self._scratch("indices", values, torch.int32, self.block_values // 2)
        indices.copy_(code[:, 2:])
        # Looking up both values of a byte at once is faster than taking it apart; complex64 is a pair of floats. Only
        # from an even place can values be seen as pairs.
        is_even = values.storage_offset() % 2 == 0
        pairs = values if is_even else self._scratch("values", values, torch.float32, self.block_values)
        table = self._table(values.device)
        torch.index_select(table, 0, indices.view(-1), out=pairs.view(-1).view(torch.complex64))
        scale = self._scratch("largest", values, torch.float32, 1)
        scale.copy_(code[:, :2].view(torch.bfloat16))
        torch.mul(pairs, scale, out=values)

    def _table(self, device: torch.device) -> torch.Tensor:
        """The two levels of each of the 256 bytes."""
        if device not in self._tables:
            levels = torch.tensor(self.levels, dtype=torch.float32)
            pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], 1)
            self._tables[device] = torch.view_as_complex(pairs).to(device)
        return self._tables[device]
