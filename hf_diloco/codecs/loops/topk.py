"""topk on a processor: see `codecs.topk`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hf_diloco.codecs.compiled import Bytes, Values, compiled
from hf_diloco.codecs.loops.base import Loops
from hf_diloco.codecs.loops.bits import read_bf16, write_bf16

BLOCK = 4096
KEPT = 64
GROUPS, GROUP_VALUES = 512, 8
INDEX_BITS = 12
INDEX_MASK = np.int32(BLOCK - 1)
KEY_BITS = np.int32(0x7FFF_FFFF & ~(BLOCK - 1))
COARSE_BITS = 17  # of a magnitude that are not looked at when groups are chosen
ENTRY_BITS = 14
IS_SMALLER = 1 << INDEX_BITS
IS_NEGATIVE = 2 << INDEX_BITS
LARGEST_MAGNITUDE = float.fromhex("0x1.fep127")  # of bf16

Keys = NDArray[np.int32]


@compiled
def encode(values: Values, code: Bytes, num_values: int) -> None:
    """As `Loops`."""
    largest, candidates = np.empty(GROUPS, np.int32), np.empty(BLOCK + 1, np.int32)
    keys, entries, magnitudes = np.empty(KEPT, np.int32), np.empty(KEPT, np.int64), np.empty(KEPT)
    for block in range(values.shape[0]):
        row = values[block]
        _select(row.view(np.int32), largest, candidates, keys)
        for i in range(KEPT):
            entries[i] = INDEX_MASK - (keys[i] & INDEX_MASK)
            magnitudes[i] = abs(row[entries[i]])
        larger, smaller, num_smaller = _two_means(magnitudes)
        write_bf16(code[block], _round_to_bf16(larger))
        write_bf16(code[block, 2:], _round_to_bf16(smaller))
        for i in range(KEPT):
            entries[i] |= IS_NEGATIVE * (row[entries[i]] < 0) | IS_SMALLER * (i < num_smaller)
        for i in range(KEPT):
            if magnitudes[i] == 0:
                entries[i] = entries[KEPT - 1]
        _pack(entries, code[block, 4:])


@compiled
def decode(code: Bytes, values: Values) -> None:
    """As `Loops`."""
    for block in range(values.shape[0]):
        row, packed = values[block], code[block, 4:]
        larger, smaller = read_bf16(code[block]), read_bf16(code[block, 2:])
        row[:] = larger * np.float32(0)  # NaN if that is what they are
        for first in range(0, packed.shape[0], 7):
            word = np.int64(0)
            for place in range(7):
                word |= np.int64(packed[first + place]) << 8 * place
            for entry in range(4):
                bits = word >> ENTRY_BITS * entry
                magnitude = smaller if bits & IS_SMALLER else larger
                row[bits & INDEX_MASK] = -magnitude if bits & IS_NEGATIVE else magnitude


@compiled
def _select(bits: Keys, largest: Keys, candidates: Keys, keys: Keys) -> None:
    """Writes the `KEPT` largest of a row's keys, smallest first; overwrites the other buffers.

    A key is a magnitude and, in place of its low bits, its index from the end: no two are equal. The row is seen as
    groups. What is among the largest lies in the groups with the largest maxima, which are found first.
    """
    largest[:] = 0
    for i in range(GROUP_VALUES):
        for group in range(GROUPS):
            largest[group] = max(largest[group], np.int32(bits[i * GROUPS + group] & KEY_BITS))
    threshold = _threshold(largest, GROUPS, COARSE_BITS)
    number = 0
    for group in range(GROUPS):
        if largest[group] >= threshold:
            for i in range(group, BLOCK, GROUPS):
                key = np.int32(bits[i] & KEY_BITS | (INDEX_MASK - i))
                candidates[number] = key
                number += int(key >= threshold)
    threshold = _threshold(candidates, number, 0)
    kept = 0
    for i in range(number):
        key = candidates[i]
        candidates[kept] = key
        kept += int(key >= threshold)
    for i in range(KEPT):  # to its rank
        rank = np.int32(0)
        for j in range(KEPT):
            rank += np.int32(candidates[j] < candidates[i])
        keys[rank] = candidates[i]


@compiled
def _threshold(keys: Keys, number: int, lowest_bit: int) -> np.int32:
    """The largest number that `KEPT` of the first `number` keys reach; its bits below the lowest are 0."""
    threshold = np.int32(0)
    for bit in range(30, lowest_bit - 1, -1):
        trial = np.int32(threshold | np.int32(1) << bit)
        reached = np.int32(0)
        for i in range(number):
            reached += np.int32(keys[i] >= trial)
        if reached >= KEPT:
            threshold = trial
    return threshold


@compiled
def _two_means(magnitudes: NDArray[np.float64]) -> tuple[float, float, int]:
    """As `codecs.topk.two_means`, for one row: the two numbers, and how many the second stands for."""
    grid = magnitudes[KEPT - 1] * KEPT
    total, num_zeros = 0.0, 0
    for i in range(KEPT):
        total += magnitudes[i] + grid - grid
        num_zeros += magnitudes[i] == 0
    below, best = 0.0, -1.0
    larger, smaller, num_smaller = np.nan, np.nan, 0
    for i in range(KEPT):
        above = total - below
        mean_above, mean_below = above / (KEPT - i), below / max(i - num_zeros, 1)
        gain = above * mean_above + below * mean_below
        if gain > best:
            best, larger, smaller, num_smaller = gain, mean_above, mean_below, i
        below += magnitudes[i] + grid - grid
    return larger, smaller, num_smaller


@compiled
def _round_to_bf16(value: float) -> np.float32:
    """To nearest, ties to even; what is too large to the largest, and NaN to NaN."""
    if value != value:
        return np.float32(np.nan)
    bits = np.int64(np.float32(min(value, LARGEST_MAGNITUDE)).view(np.int32))
    return np.int32(bits + 0x7FFF + (bits >> 16 & 1)).view(np.float32)


@compiled
def _pack(entries: NDArray[np.int64], out: Bytes) -> None:
    """Four entries in seven bytes."""
    for word in range(KEPT // 4):
        bits = np.int64(0)
        for i in range(4):
            bits |= entries[4 * word + i] << ENTRY_BITS * i
        for place in range(7):
            out[7 * word + place] = np.uint8(bits >> 8 * place)


LOOPS = Loops(encode, decode)
