"""Loops that are compiled by Numba at their first call, and what their arrays are.

Numba and LLVM take 208 MB, so they are an extra. Without them PyTorch's operations do the same, slower, with the same
bits (`is_compiled_for`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hf_diloco.utils.extras import is_installed

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Array = NDArray[np.floating]  # fp32 or fp64
Function = TypeVar("Function", bound=Callable[..., object])


class Loops(NamedTuple):
    """What a codec does on a processor.

    Attributes:
        encode: takes values (n, block_values), code (n, block_bytes), and how many values of each row are real.
        decode: takes code and values of these shapes.
    """

    encode: Callable[[Values, Bytes, int], None]
    decode: Callable[[Bytes, Values], None]


def is_compiled_for(values: torch.Tensor) -> bool:
    """Whether compiled loops are to be called for values of this device; else PyTorch's operations."""
    return values.device.type == "cpu" and _has_numba()


@cache
def _has_numba() -> bool:
    return is_installed("numba")


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call, and keeps the machine code on disk for other processes.

    It runs on the thread that calls it and without Python's lock. Nothing is reordered or fused: floating-point
    results are those of any processor. Integers are taken for what their types say: a sum of np.int32 is 64 bits long
    until it is cast.
    """
    return cast(Function, _Compiled(function, fastmath=False))


def compiled_with_fma(function: Function) -> Function:
    """As `compiled`, but a product and the sum that it goes into are rounded once, where the processor does that.

    So do PyTorch's operations (`lerp`, `add` with `alpha`), whose bits come out then.
    """
    return cast(Function, _Compiled(function, fastmath={"contract"}))


class _Compiled:
    """A function that imports Numba when it is first called: many processes never are to code anything."""

    def __init__(self, function: Callable[..., object], fastmath: bool | set[str]) -> None:
        self._function = cast(FunctionType, function)
        self._fastmath = fastmath
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        return self.machine_code(*arguments)

    @cached_property
    def machine_code(self) -> Callable[..., Any]:
        import numba

        names = self._function.__globals__
        for name in self._function.__code__.co_names:  # those that it calls, as Numba knows them
            if isinstance(called := names.get(name), _Compiled):
                names[name] = called.machine_code
        settings: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": self._fastmath}
        try:
            return cast(Callable[..., Any], numba.njit(cache=True, **settings)(self._function))
        except RuntimeError:  # neither the package's folder nor the user's cache may be written
            return cast(Callable[..., Any], numba.njit(**settings)(self._function))
