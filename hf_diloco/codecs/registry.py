"""All codecs by name."""

from __future__ import annotations

import sys

import torch

from hf_diloco.codecs.base import Codec
from hf_diloco.codecs.cast import CastCodec
from hf_diloco.codecs.fp4 import Fp4Codec
from hf_diloco.codecs.int4 import Int4Codec
from hf_diloco.codecs.int8 import Int8Codec
from hf_diloco.codecs.sign import SignCodec
from hf_diloco.codecs.topk import TopKCodec
from hf_diloco.errors import UnsupportedError

if sys.byteorder != "little":
    raise UnsupportedError("codecs need a little-endian processor: numbers travel as they lie in memory")

_ALL: list[Codec] = [
    CastCodec("fp32", torch.float32),
    CastCodec("bf16", torch.bfloat16),
    CastCodec("fp16", torch.float16),
    Int8Codec(),
    Int4Codec(),
    Fp4Codec(),
    TopKCodec(),
    SignCodec(),
]

CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}
