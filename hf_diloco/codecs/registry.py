"""All codecs by name."""

from __future__ import annotations

import torch

from hf_diloco.codecs.base import Codec
from hf_diloco.codecs.cast import CastCodec

_ALL: list[Codec] = [
    CastCodec("fp32", torch.float32),
    CastCodec("bf16", torch.bfloat16),
    CastCodec("fp16", torch.float16),
]

CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
