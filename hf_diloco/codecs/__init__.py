"""Bytes on the wire and back."""

from hf_diloco.codecs.base import Codec
from hf_diloco.codecs.cast import CODECS, CastCodec

__all__ = ["CODECS", "CastCodec", "Codec"]
