"""How loops are compiled, and what their arrays are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Function = TypeVar("Function", bound=Callable[..., object])


class Loops(NamedTuple):
    """What a codec does on a processor.

    Attributes:
        encode: takes values (n, block_values), code (n, block_bytes), and how many values of each row are real.
        decode: takes code and values of these shapes.
    """

    encode: Callable[[Values, Bytes, int], None]
    decode: Callable[[Bytes, Values], None]


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call, and keeps the machine code on disk for other processes.

    It runs on the thread that calls it and without Python's lock. Nothing is reordered or fused: floating-point
    results are those of any processor. Integers are taken for what their types say: a sum of np.int32 is 64 bits long
    until it is cast.
    """
    try:
        return _compile(function, keep=True)
    except RuntimeError:  # neither the package's folder nor the user's cache may be written
        return _compile(function, keep=False)


def _compile(function: Function, *, keep: bool) -> Function:
    return cast(Function, numba.njit(nogil=True, error_model="numpy", cache=keep)(function))
