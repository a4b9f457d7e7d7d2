"""The seam between numbers and bytes: what a codec turns a chunk of a pseudo-gradient into."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Codec(ABC):
    """Turns chunks of fp32 values into the form that travels, and back.

    Both directions work on chunks, in buffers that the caller allocates once. A codec is deterministic and
    element-wise or block-wise, so that every island decodes the same bytes to the same floats.
    """

    name: str
    wire_dtype: torch.dtype

    @abstractmethod
    def encode(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the code of `values` (fp32, 1-D): `values` itself where nothing need change, else `buffer`, filled.

        `buffer` has `values.numel()` elements of `wire_dtype`.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the fp32 values of `code`: `code` itself where nothing need change, else `buffer`, filled."""

    @property
    def is_exact(self) -> bool:
        """Whether decoding gives back every fp32 value bit for bit."""
        return self.wire_dtype == torch.float32

    def num_bytes(self, num_values: int) -> int:
        """Bytes that `num_values` values take on the wire."""
        return num_values * self.wire_dtype.itemsize
