"""fp32, bf16 and fp16 on the wire: a cast, no scale, no error feedback (OpenDiLoCo, arXiv 2407.07852, sends fp16)."""

from __future__ import annotations

import torch

from hf_diloco.codecs.base import Codec


class CastCodec(Codec):
    """Sends values in a floating-point type of 32 or 16 bits.

    fp16 reaches to 65,504: larger magnitudes are clamped to it rather than becoming infinite.
    """

    def __init__(self, name: str, wire_dtype: torch.dtype) -> None:
        self.name = name
        self.wire_dtype = wire_dtype

    def encode(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        if self.is_exact:
            return values
        code = buffer[: values.numel()]
        if self.wire_dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            values = values.clamp(-limit, limit)
        return code.copy_(values)

    def decode(self, code: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return code if self.is_exact else buffer[: code.numel()].copy_(code)


CODECS = {
    "fp32": CastCodec("fp32", torch.float32),
    "bf16": CastCodec("bf16", torch.bfloat16),
    "fp16": CastCodec("fp16", torch.float16),
}
