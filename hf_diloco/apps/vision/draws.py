"""Random numbers as pure functions of what they are for.

No generator has a state: a number is a hash. So a resumed run, other numbers of loader workers, and nodes that are
threads of one process see the same images.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from hf_diloco.apps.vision.pictures import IntArray

FloatArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
_UInt64Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

_DRAWS = {name: number for number, name in enumerate(("row", "column", "flip", "area", "ratio", "top", "left"))}


def uniform(draw: str, seed: int, epoch: int, examples: IntArray) -> FloatArray:
    """A number in [0, 1) for each example, by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        draw: what it is for; other draws are independent.
        seed: of the run.
        epoch: from 0.
        examples: int64 [batch], numbers of the examples in the whole training set.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, _DRAWS[draw]):
        key = _mix(key ^ np.uint64(part))
    hashed = _mix(_mix(key ^ examples.astype(np.uint64)))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: _UInt64Array) -> _UInt64Array:
    """SplitMix64: unsigned 64-bit numbers wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
