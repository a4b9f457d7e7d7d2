"""Values as floating-point numbers of 32 or 16 bits: no scale, no error feedback."""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_diloco.codecs.base import TILE_VALUES, Codec
from hf_diloco.utils.workspace import Workspace


class CastCodec(Codec):
    """Casts values to another dtype."""

    dtype: ClassVar[torch.dtype]
    block_values = 1

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        code.view(self.dtype).copy_(values)

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code.view(self.dtype))


class Fp32Codec(CastCodec):
    """Sends values unchanged."""

    name = "fp32"
    dtype = torch.float32
    block_bytes = 4
    is_exact = True


class Bf16Codec(CastCodec):
    """Sends values with 8 bits of precision and the range of fp32."""

    name = "bf16"
    dtype = torch.bfloat16
    block_bytes = 2


class Fp16Codec(CastCodec):
    """Sends values with 11 bits of precision, as OpenDiLoCo does (arXiv 2407.07852).

    The largest fp16 number is 65,504: larger magnitudes are clamped to it, so that they do not become infinite.
    """

    name = "fp16"
    dtype = torch.float16
    block_bytes = 2

    def __init__(self) -> None:
        self._workspace = Workspace()

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        limit = torch.finfo(torch.float16).max
        for part, out in zip(values.split(TILE_VALUES), code.view(torch.float16).split(TILE_VALUES), strict=True):
            clamped = self._workspace.take("clamped", part.numel(), torch.float32, values.device)
            out.copy_(torch.clamp(part, -limit, limit, out=clamped))
