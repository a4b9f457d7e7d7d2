"""Number formats on the wire: one file each, and this registry."""

from __future__ import annotations

import sys
from functools import cache

import torch

from hf_diloco.codecs.base import CastCodec, Codec
from hf_diloco.codecs.fp4 import Fp4Codec
from hf_diloco.codecs.int4 import Int4Codec
from hf_diloco.codecs.int8 import Int8Codec
from hf_diloco.codecs.sign import SignCodec
from hf_diloco.codecs.topk import TopKCodec
from hf_diloco.errors import UnsupportedError
from hf_diloco.utils.own_files import is_own, load_own

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
"""All that islands may name to each other; those of a user's files once `find_codec` has loaded them."""
_BUILT_IN = frozenset(CODECS)


def find_codec(name: str) -> Codec:
    """The codec that the setting `payload` stands for: one of `CODECS`, or a user's own, as FILE.py:CLASS.

    Raises:
        ValueError: there is none, or it cannot be loaded; with the remedy.
    """
    return _own_codec(name) if is_own(name) else CODECS[name]


@cache
def _own_codec(name: str) -> Codec:
    kind = load_own(name, Codec)  # type: ignore[type-abstract]
    try:
        codec = kind()
    except TypeError as error:
        raise ValueError(f"{name!r}: {kind.__name__}() cannot be made ({error}): let it take no arguments") from None
    for needed, sort in (("name", str), ("block_values", int), ("block_bytes", int)):
        if not isinstance(getattr(codec, needed, None), sort):
            raise ValueError(f"{name!r}: {kind.__name__} says no {needed}: give the class that attribute")
    if codec.name in _BUILT_IN:
        raise ValueError(f"{name!r}: {codec.name} is a codec of hf_diloco: give the class another name")
    CODECS[codec.name] = codec
    return codec


__all__ = ["CODECS", "Codec", "find_codec"]
