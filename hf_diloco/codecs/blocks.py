"""The base of block codecs: tiling of long vectors, and the largest magnitude of every block.

And the base of 4-bit codecs: sixteen levels, two codes per byte, a bf16 scale for every 128 values. And signs as bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from hf_diloco.codecs.base import Codec
from hf_diloco.codecs.compiled import GATHER_BITS, INFINITY_BITS, MAGNITUDE_BITS, Loops, is_compiled_for
from hf_diloco.utils.workspace import Workspace

ACCELERATOR_TILE = 1 << 24
"""Values that are encoded at a time on an accelerator, to bound scratch memory."""

BF16_BITS = np.int32(~0xFFFF)
LOWEST_BITS = 0x0101_0101_0101_0101  # of each of the eight bytes of an int64


class BlockCodec(Codec):
    """Encodes whole blocks, many at a time. A partial block is padded with zeros, and its padding dropped on decoding.

    Every codec has two implementations with bit-identical results: compiled loops (`loops`) for values on a CPU, and
    PyTorch's operations for values on an accelerator, if Numba is not installed, or if `compiled` is False.
    """

    loops: ClassVar[Loops]

    def __init__(self, compiled: bool = True) -> None:
        self._loops = self.loops if compiled else None
        self._workspace = Workspace()

    @abstractmethod
    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        """Encodes `values` (n, block_values) into `code` (n, block_bytes); values after `num_values` are padding."""

    @abstractmethod
    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes `code` (n, block_bytes) into `values` (n, block_values)."""

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        for rows, blocks in self._tiles(values, code):
            self._encode_rows(rows, blocks, self.block_values)
        rest = values.numel() % self.block_values
        if rest:
            padded = self._workspace.take("partial", self.block_values, torch.float32, values.device)
            padded[:rest].copy_(values[-rest:])
            padded[rest:].zero_()
            self._encode_rows(padded[None], code[None, -self.block_bytes :], rest)

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        for rows, blocks in self._tiles(values, code):
            self._decode_rows(blocks, rows)
        rest = values.numel() % self.block_values
        if rest:
            padded = self._workspace.take("partial", self.block_values, torch.float32, values.device)
            self._decode_rows(code[None, -self.block_bytes :], padded[None])
            values[-rest:].copy_(padded[:rest])

    def _encode_rows(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        if self._loops and is_compiled_for(values):
            self._loops.encode(values.numpy(), code.numpy(), num_values)
        else:
            self._encode_blocks(values, code, num_values)

    def _decode_rows(self, code: torch.Tensor, values: torch.Tensor) -> None:
        if self._loops and is_compiled_for(values):
            self._loops.decode(code.numpy(), values.numpy())
        else:
            self._decode_blocks(code, values)

    def _tiles(self, values: torch.Tensor, code: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the whole blocks of a vector, a tile at a time: their values and their code, one row per block."""
        whole = values.numel() // self.block_values
        rows = values[: whole * self.block_values].view(whole, self.block_values)
        blocks = code[: whole * self.block_bytes].view(whole, self.block_bytes)
        step = ACCELERATOR_TILE // self.block_values
        for first in range(0, whole, step):
            yield rows[first : first + step], blocks[first : first + step]

    def _scratch(self, name: str, like: torch.Tensor, dtype: torch.dtype, columns: int) -> torch.Tensor:
        """Returns a buffer with as many rows as `like`."""
        rows = like.shape[0]
        return self._workspace.take(name, rows * columns, dtype, like.device).view(rows, columns)

    def _largest_magnitudes(self, values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Returns max |v| of each row, (n, 1), as `largest_magnitude`; overwrites `scratch`."""
        bits = scratch.view(torch.int32)
        torch.bitwise_and(values.view(torch.int32), int(MAGNITUDE_BITS), out=bits)
        largest = self._scratch("largest", values, torch.int32, 1)
        torch.amax(bits, 1, keepdim=True, out=largest)
        return largest.clamp_max_(int(INFINITY_BITS)).view(torch.float32)


class FourBitCodec(BlockCodec):
    """v ~ scale x levels[code], 4.125 bits per value.

    Block: the scale in bf16, then 64 bytes; byte i has the code of value 2i in its low half, of value 2i + 1 in its
    high half. The scale is positive. It is infinite if a value is not finite: then all decode to infinities and NaN.
    """

    block_values = 128
    block_bytes = 2 + 64

    levels: ClassVar[tuple[float, ...]]

    @abstractmethod
    def _scales(self, largest: torch.Tensor) -> None:
        """Turns the largest magnitudes into scales, in place: normal numbers that bf16 represents exactly."""

    @abstractmethod
    def _codes(self, values: torch.Tensor, inverse_scale: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Returns the codes of `values`, uint8; overwrites both other arguments."""

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
        # Looking up both values of a byte at once is faster than splitting the byte; complex64 is a pair of floats.
        # Values can be viewed as pairs only if they start at an even offset.
        is_even = values.storage_offset() % 2 == 0
        pairs = values if is_even else self._scratch("values", values, torch.float32, self.block_values)
        table = _pairs(self.levels, values.device)
        torch.index_select(table, 0, indices.view(-1), out=pairs.view(-1).view(torch.complex64))
        scale = self._scratch("largest", values, torch.float32, 1)
        scale.copy_(code[:, :2].view(torch.bfloat16))
        torch.mul(pairs, scale, out=values)


@cache
def _pairs(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Returns the two levels of each of the 256 bytes, as one complex64 each."""
    values = torch.tensor(levels, dtype=torch.float32)
    return torch.view_as_complex(torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)).to(device)


_sign_buffers = Workspace()


def pack_signs(values: torch.Tensor, bits: torch.Tensor) -> None:
    """Writes the signs of `values`, fp32 (n, 8 m), to `bits`, uint8 (n, m), by PyTorch's operations.

    A bit is set for v < 0; value i of a row is bit i % 8 of byte i // 8.
    """
    scratch = _like("values", values, torch.float32)
    torch.add(values, 0.0, out=scratch)  # turns -0 into +0
    signs = _like("signs", values, torch.uint8)
    signs.copy_(scratch.view(torch.int32).bitwise_right_shift_(31))
    eights = signs.view(torch.int64).bitwise_and_(LOWEST_BITS).mul_(int(GATHER_BITS))
    bits.copy_(eights.bitwise_right_shift_(56))  # keeps the lowest byte


def unpack_signs(bits: torch.Tensor, values: torch.Tensor) -> None:
    """Writes -1 to `values`, fp32 (n, 8 m), for every set bit of `bits`, uint8 (n, m), and 1 for others."""
    indices = _like("indices", bits, torch.int32)
    indices.copy_(bits)
    eights = _like("eights", bits, torch.int64)
    torch.index_select(_eights(values.device), 0, indices.view(-1), out=eights.view(-1))
    values.copy_(eights.view(torch.int8))


def _like(name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _sign_buffers.take(name, like.numel(), dtype, like.device).view(like.shape)


@cache
def _eights(device: torch.device) -> torch.Tensor:
    """Returns the decoded form of each of the 256 bytes: eight int8, +1 or -1, in one int64."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).view(-1).to(device)
