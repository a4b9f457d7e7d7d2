"""fp32, bf16 and fp16 on the wire: a cast, no scale, no error feedback (OpenDiLoCo, arXiv 2407.07852, sends fp16)."""

from __future__ import annotations

import torch

from hf_diloco.codecs.base import TILE_VALUES, Codec
from hf_diloco.utils.workspace import Workspace


class CastCodec(Codec):
    """Sends values in a floating-point type of 32 or 16 bits.

    fp16 reaches to 65,504: larger magnitudes are clamped to it rather than becoming infinite.
    """

    block_values = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.block_bytes = dtype.itemsize
        self.is_exact = dtype == torch.float32
        self._dtype = dtype
        self._workspace = Workspace()

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        if self._dtype != torch.float16:
            code.view(self._dtype).copy_(values)
            return
        limit = torch.finfo(torch.float16).max
        for part, out in zip(values.split(TILE_VALUES), code.view(self._dtype).split(TILE_VALUES), strict=True):
            clamped = self._workspace.take("clamped", part.numel(), torch.float32, values.device)
            out.copy_(torch.clamp(part, -limit, limit, out=clamped))

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code.view(self._dtype))
