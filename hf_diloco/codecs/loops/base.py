"""What a codec's loops are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hf_diloco.codecs.compiled import Bytes, Values


class Loops(NamedTuple):
    """What a codec does on a processor.

    Attributes:
        encode: takes values (n, block_values), code (n, block_bytes), and how many values of each row are real.
        decode: takes code and values of these shapes.
    """

    encode: Callable[[Values, Bytes, int], None]
    decode: Callable[[Bytes, Values], None]
