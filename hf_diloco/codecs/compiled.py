"""Loops that Numba compiles at their first call, and common helpers: bits of numbers, packing into bytes.

Numba and LLVM take 208 MB, so they are an optional extra. Without them, PyTorch's operations give bit-identical
results, but are slower (`is_compiled_for`).
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

MAGNITUDE_BITS = np.int32(0x7FFF_FFFF)
INFINITY_BITS = np.int32(0x7F80_0000)
GATHER_BITS = np.uint64(0x0102_0408_1020_4080)  # times eight bytes of 0 or 1: moves byte i to bit 56 + i

Function = TypeVar("Function", bound=Callable[..., object])


class Loops(NamedTuple):
    """The compiled loops of a codec.

    `encode` takes values (n, block_values), code (n, block_bytes), and the number of values per row before padding;
    `decode` takes code and values of these shapes.
    """

    encode: Callable[[Values, Bytes, int], None]
    decode: Callable[[Bytes, Values], None]


def is_compiled_for(values: torch.Tensor) -> bool:
    """Whether to use compiled loops for values on this device, and not PyTorch's operations."""
    return values.device.type == "cpu" and _has_numba()


@cache
def _has_numba() -> bool:
    return is_installed("numba")


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call, and caches the machine code on disk for other processes.

    The function runs on the calling thread without Python's lock. Nothing is reordered or fused, so floating-point
    results are the same on all processors. Numba's integer types apply: a sum of np.int32 has 64 bits until it is
    cast.
    """
    return cast(Function, _Compiled(function, fastmath=False))


def compiled_with_fma(function: Function) -> Function:
    """Like `compiled`, but fuses a product and the sum that uses it into one rounding, if the processor has FMA.

    PyTorch's operations (`lerp`, `add` with `alpha`) do the same, so results are bit-identical to theirs.
    """
    return cast(Function, _Compiled(function, fastmath={"contract"}))


class _Compiled:
    """A function that imports Numba at its first call: many processes never encode anything."""

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
        for name in self._function.__code__.co_names:  # replaces functions that it calls by Numba's
            if isinstance(called := names.get(name), _Compiled):
                names[name] = called.machine_code
        settings: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": self._fastmath}
        try:
            return cast(Callable[..., Any], numba.njit(cache=True, **settings)(self._function))
        except RuntimeError:  # neither the package's folder nor the user's cache is writable
            return cast(Callable[..., Any], numba.njit(**settings)(self._function))


@compiled
def cut(value: np.float32, bits: np.int32) -> np.float32:
    """Returns `value` with all other bits set to 0."""
    return np.int32(np.float32(value).view(np.int32) & bits).view(np.float32)


@compiled
def largest_magnitude(row: Values) -> np.float32:
    """Returns max |v|; infinite if a value is infinite or NaN.

    Compares the bits of the magnitudes: as integers they have the same order, NaN last, and compare faster.
    """
    bits = row.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & MAGNITUDE_BITS)
    return np.int32(min(largest, INFINITY_BITS)).view(np.float32)


@compiled
def write_fp32(code: Bytes, value: np.float32) -> None:
    """Writes the four bytes of `value`; `code` needs no alignment."""
    bits = np.float32(value).view(np.int32)
    for place in range(4):
        code[place] = np.uint8(bits >> (8 * place))


@compiled
def read_fp32(code: Bytes) -> np.float32:
    """Reads a value that `write_fp32` wrote."""
    low = np.int32(code[0]) | np.int32(code[1]) << 8
    return np.int32(low | np.int32(code[2]) << 16 | np.int32(code[3]) << 24).view(np.float32)


@compiled
def write_bf16(code: Bytes, value: np.float32) -> None:
    """Writes the upper two bytes of `value`, which is exact if bf16 represents `value`."""
    bits = np.float32(value).view(np.int32)
    code[0] = np.uint8(bits >> 16)
    code[1] = np.uint8(bits >> 24)


@compiled
def read_bf16(code: Bytes) -> np.float32:
    """Reads a bf16."""
    return np.int32(np.int32(code[0]) << 16 | np.int32(code[1]) << 24).view(np.float32)


@compiled
def pack_pairs(codes: Bytes, out: Bytes) -> None:
    """Packs two 4-bit codes into each byte, the first in the low half."""
    for i in range(out.shape[0]):
        out[i] = codes[2 * i] | codes[2 * i + 1] << 4


@compiled
def pack_bits(is_set: Bytes, out: Bytes) -> None:
    """Packs eight bytes of 0 or 1 into one, the first in the lowest bit; `is_set` has eight times as many as `out`."""
    eights = is_set.view(np.uint64)
    for i in range(out.shape[0]):
        out[i] = eights[i] * GATHER_BITS >> np.uint64(56)


@compiled
def fill_signs(bits: Bytes, magnitude: np.float32, out: Values) -> None:
    """Writes -magnitude for every set bit and magnitude for others; `out` has up to eight times as many values."""
    for i in range(out.shape[0] // 8):
        for place in range(8):
            out[8 * i + place] = -magnitude if bits[i] >> place & 1 else magnitude
    for i in range(out.shape[0] // 8 * 8, out.shape[0]):
        out[i] = -magnitude if bits[i // 8] >> (i % 8) & 1 else magnitude
