"""Bytes on the wire and back: one file a number format."""

from hf_diloco.codecs.base import Codec
from hf_diloco.codecs.registry import CODECS, find_codec

__all__ = ["CODECS", "Codec", "find_codec"]
