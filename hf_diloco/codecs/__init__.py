"""Number formats on the wire, each defined by a single file. `base` says what a codec must define."""

from __future__ import annotations

import sys
from functools import cache

from hf_diloco.codecs.base import TILE_VALUES, Codec
from hf_diloco.errors import UnsupportedError
from hf_diloco.utils.own_files import classes_in, is_own, load_own, no_such

if sys.byteorder != "little":
    raise UnsupportedError("codecs need a little-endian processor: numbers travel as they lie in memory")

CODECS: dict[str, Codec] = {
    kind.name: kind()
    for kind in classes_in(__name__, Codec)  # type: ignore[type-abstract]
}
"""All codecs by name: the built-in ones, and those of a user's own files once `find_codec` has loaded them."""
BUILT_IN = tuple(CODECS)
"""The names of the codecs of this package."""


def find_codec(name: str) -> Codec:
    """Returns the codec for the setting `payload`: one of `BUILT_IN`, or a user's own, as FILE.py:CLASS.

    Raises `ValueError`, with the remedy, if there is no such codec, or it cannot be loaded.
    """
    if is_own(name):
        return _own_codec(name)
    if name not in BUILT_IN:
        raise no_such("number format", name, BUILT_IN)
    return CODECS[name]


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
    if codec.block_values < 1 or TILE_VALUES % codec.block_values:
        raise ValueError(f"{name!r}: block_values is {codec.block_values}: give a power of two, up to {TILE_VALUES:,}")
    if not (isinstance(codec.feedback_decay, int | float) and 0 <= codec.feedback_decay <= 1):
        raise ValueError(f"{name!r}: feedback_decay is {codec.feedback_decay!r}: give a share, from 0 to 1")
    if codec.name in BUILT_IN:
        raise ValueError(f"{name!r}: {codec.name} is a codec of hf_diloco: give the class another name")
    CODECS[codec.name] = codec
    return codec


__all__ = ["BUILT_IN", "CODECS", "Codec", "find_codec"]
