"""Number formats on the wire, each defined by a single file. `base` says what a codec must define."""

from __future__ import annotations

import sys
from functools import cache

from hf_diloco.codecs.base import TILE_VALUES, Codec
from hf_diloco.errors import UnsupportedError
from hf_diloco.utils.own_files import classes_in, find_class

if sys.byteorder != "little":
    raise UnsupportedError("codecs need a little-endian processor: numbers travel as they lie in memory")

_KINDS = {kind.name: kind for kind in classes_in(__name__, Codec)}  # type: ignore[type-abstract]
BUILT_IN = tuple(_KINDS)
"""The names of the codecs of this package."""
CODECS: dict[str, Codec] = {name: kind() for name, kind in _KINDS.items()}
"""All codecs by name: the built-in ones, and those of a user's own files once `find_codec` has loaded them."""


def find_codec(name: str) -> Codec:
    """Returns the codec for the setting `payload`: one of `BUILT_IN`, or a user's own, as FILE.py:CLASS.

    Raises `ValueError`, with the remedy, if there is no such codec, or it cannot be loaded.
    """
    return CODECS[name] if name in BUILT_IN else _own_codec(name)


@cache
def _own_codec(name: str) -> Codec:
    kind = find_class("number format", name, Codec, _KINDS, ("name",))  # type: ignore[type-abstract]
    try:
        codec = kind()
    except TypeError as error:
        raise ValueError(f"{name!r}: {kind.__name__}() cannot be made ({error}): let it take no arguments") from None
    for needed in ("block_values", "block_bytes"):
        if not isinstance(getattr(codec, needed, None), int):
            raise ValueError(f"{name!r}: {kind.__name__} says no {needed}: give the class that attribute")
    if codec.block_values < 1 or TILE_VALUES % codec.block_values:
        raise ValueError(f"{name!r}: block_values is {codec.block_values}: give a power of two, up to {TILE_VALUES:,}")
    if not (isinstance(codec.feedback_decay, int | float) and 0 <= codec.feedback_decay <= 1):
        raise ValueError(f"{name!r}: feedback_decay is {codec.feedback_decay!r}: give a share, from 0 to 1")
    CODECS[codec.name] = codec
    return codec


__all__ = ["BUILT_IN", "CODECS", "Codec", "find_codec"]
