"""The seam between numbers and bytes: what a codec turns a vector of values into, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hf_diloco.utils.workspace import Workspace

TILE_VALUES = 1 << 18
"""Values that several passes handle at a time, so that they run in the processor's cache: 1 MiB of fp32. A multiple of
every codec's blocks."""


class Codec(ABC):
    """Turns fp32 values into the bytes that travel, and back.

    A vector is coded in blocks of `block_values` values, `block_bytes` bytes each, counted from its first value; the
    last block may hold fewer values, and takes as many bytes. So code can be cut, and pieces of it decoded, wherever
    a block begins. Numbers on the wire are little-endian.

    A codec is deterministic, both ways: equal values have equal code, and equal code is decoded to the same bits on
    all processors. Every instance may be used by several threads at once.

    Attributes:
        name: what the setting `payload` calls it.
        block_values: values in a block; a power of two.
        block_bytes: bytes that they take.
        is_exact: decoding gives back every value bit for bit.
        needs_feedback: what is left out is most of the values. It must be sent later (`codecs.feedback`), and an
            average cannot be coded again: islands send each other their codes, and each averages by itself.
    """

    name: str
    block_values: int
    block_bytes: int
    is_exact = False
    needs_feedback = False

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` values take."""
        return -(-num_values // self.block_values) * self.block_bytes

    def locate(self, low: int, high: int) -> slice:
        """Where the code of the values from `low` to `high` lies; a block begins at `low`, and ends at `high`."""
        return slice(self.num_bytes(low), self.num_bytes(high))

    @abstractmethod
    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Writes the code of `values` to `code`.

        A block that holds a value that is not finite decodes to values that are not finite, or are beyond all
        reason, never to others that look right.

        Args:
            values: fp32, 1-D, contiguous; left as they are.
            code: uint8, 1-D, contiguous, `num_bytes(values.numel())` bytes.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `code` stands for to `values`; arguments as for `encode`. Any bytes are some values."""

    def prepare(self) -> None:
        """Codes one block of zeros, so that the first round does not wait for Numba and its machine code (seconds)."""
        values, code = torch.zeros(self.block_values), torch.empty(self.block_bytes, dtype=torch.uint8)
        self.encode(values, code)
        self.decode(code, values)

    def round_trip(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes to `out` what the code of `values` is decoded to; `out` may be `values`."""
        for low in range(0, values.numel(), TILE_VALUES):
            tile = values[low : low + TILE_VALUES]
            size = self.num_bytes(tile.numel())
            code = _round_trips.take(self.name, size, torch.uint8, values.device)
            self.encode(tile, code)
            self.decode(code, out[low : low + TILE_VALUES])


_round_trips = Workspace()
