"""Loops that are compiled by Numba at their first call, and what their arrays are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Array = NDArray[np.floating]  # fp32 or fp64
Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call, and keeps the machine code on disk for other processes.

    It runs on the thread that calls it and without Python's lock. Nothing is reordered or fused: floating-point
    results are those of any processor. Integers are taken for what their types say: a sum of np.int32 is 64 bits long
    until it is cast.
    """
    return _compile(function, fastmath=False)


def compiled_with_fma(function: Function) -> Function:
    """As `compiled`, but a product and the sum that it goes into are rounded once, where the processor does that.

    So do PyTorch's operations (`lerp`, `add` with `alpha`), whose bits come out then.
    """
    return _compile(function, fastmath={"contract"})


def _compile(function: Function, fastmath: bool | set[str]) -> Function:
    try:
        compile_ = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, cache=True)
        return cast(Function, compile_(function))
    except RuntimeError:  # neither the package's folder nor the user's cache may be written
        compile_ = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)
        return cast(Function, compile_(function))
