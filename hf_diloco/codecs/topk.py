"""The largest values of every block, in two bits each, as SparseLoCo sends them (arXiv 2508.15706)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_diloco.codecs.blocks import BlockCodec
from hf_diloco.codecs.compiled import Bytes, Loops, Values, compiled, read_bf16, write_bf16

KEPT = 64
INDEX_BITS = 12
BLOCK = 1 << INDEX_BITS
INDEX_MASK = BLOCK - 1
ENTRY_BITS = INDEX_BITS + 2
IS_SMALLER = 1 << INDEX_BITS
IS_NEGATIVE = 2 << INDEX_BITS
LARGEST_MAGNITUDE = torch.finfo(torch.bfloat16).max

GROUPS, GROUP_VALUES = 512, 8
INDEX_MASK_32 = np.int32(INDEX_MASK)
KEY_BITS = np.int32(0x7FFF_FFFF & ~INDEX_MASK)  # of a magnitude, without the low bits that the index replaces
COARSE_BITS = 17  # low bits of a magnitude that are ignored in the choice of groups

Keys = NDArray[np.int32]


@compiled
def _encode(values: Values, code: Bytes, num_values: int) -> None:
    """See `Loops`."""
    largest, candidates = np.empty(GROUPS, np.int32), np.empty(BLOCK + 1, np.int32)
    keys, entries, magnitudes = np.empty(KEPT, np.int32), np.empty(KEPT, np.int64), np.empty(KEPT)
    for block in range(values.shape[0]):
        row = values[block]
        _select(row.view(np.int32), largest, candidates, keys)
        for i in range(KEPT):
            entries[i] = INDEX_MASK_32 - (keys[i] & INDEX_MASK_32)
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
def _decode(code: Bytes, values: Values) -> None:
    """See `Loops`."""
    for block in range(values.shape[0]):
        row, packed = values[block], code[block, 4:]
        larger, smaller = read_bf16(code[block]), read_bf16(code[block, 2:])
        row[:] = larger * np.float32(0)  # NaN if the magnitudes are NaN
        for first in range(0, packed.shape[0], 7):
            word = np.int64(0)
            for place in range(7):
                word |= np.int64(packed[first + place]) << 8 * place
            for entry in range(4):
                bits = word >> ENTRY_BITS * entry
                magnitude = smaller if bits & IS_SMALLER else larger
                row[bits & INDEX_MASK_32] = -magnitude if bits & IS_NEGATIVE else magnitude


@compiled
def _select(bits: Keys, largest: Keys, candidates: Keys, keys: Keys) -> None:
    """Writes the `KEPT` largest of a row's keys, smallest first; overwrites the other buffers.

    A key is a magnitude whose low bits are replaced by its index, counted from the end, so that no two are equal. The
    row is divided into groups. The largest keys are in the groups with the largest maxima, which are found first.
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
                key = np.int32(bits[i] & KEY_BITS | (INDEX_MASK_32 - i))
                candidates[number] = key
                number += int(key >= threshold)
    threshold = _threshold(candidates, number, 0)
    kept = 0
    for i in range(number):
        key = candidates[i]
        candidates[kept] = key
        kept += int(key >= threshold)
    for i in range(KEPT):  # puts each key at its rank
        rank = np.int32(0)
        for j in range(KEPT):
            rank += np.int32(candidates[j] < candidates[i])
        keys[rank] = candidates[i]


@compiled
def _threshold(keys: Keys, number: int, lowest_bit: int) -> np.int32:
    """Returns the largest number that `KEPT` of the first `number` keys reach; bits below `lowest_bit` are 0."""
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
    """Like `two_means`, for one row: returns the two means, and how many magnitudes the second represents."""
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
    """Rounds to nearest, ties to even; clamps to the largest finite bf16; keeps NaN."""
    if value != value:
        return np.float32(np.nan)
    bits = np.int64(np.float32(min(value, LARGEST_MAGNITUDE)).view(np.int32))
    return np.int32(bits + 0x7FFF + (bits >> 16 & 1)).view(np.float32)


@compiled
def _pack(entries: NDArray[np.int64], out: Bytes) -> None:
    """Packs every four entries into seven bytes."""
    for word in range(KEPT // 4):
        bits = np.int64(0)
        for i in range(4):
            bits |= entries[4 * word + i] << ENTRY_BITS * i
        for place in range(7):
            out[7 * word + place] = np.uint8(bits >> 8 * place)


class _Constants(NamedTuple):
    from_end: torch.Tensor  # 4095, 4094, ..., 0
    counts: torch.Tensor  # 0, 1, ..., 63
    shifts: torch.Tensor  # of four entries in a word


@cache
def _constants(device: torch.device) -> _Constants:
    return _Constants(
        torch.arange(INDEX_MASK, -1, -1, dtype=torch.int32, device=device),
        torch.arange(KEPT, dtype=torch.float64, device=device),
        torch.arange(0, 4 * ENTRY_BITS, ENTRY_BITS, device=device),
    )


class TopKCodec(BlockCodec):
    """Keeps 64 of 4,096 values, as a sign and one of two magnitudes; the others decode to 0. 0.227 bits per value.

    The codec keeps the largest magnitudes, compared with 12 bits of precision; of equal ones, the first. It splits
    them into smaller and larger ones so that the squared error is smallest, and represents each part by its mean. If
    fewer than 64 values are not 0, the entry of the largest is repeated. A block that holds inf or NaN decodes to NaN.

    Block: the two magnitudes in bf16, the larger first; 64 entries of 14 bits, smallest value first, four in 7 bytes,
    from the low bits. Bits 0 to 11 of an entry are the index, bit 12 is set for the smaller magnitude, bit 13 for a
    negative value.
    """

    name = "topk"
    block_values = BLOCK
    block_bytes = 4 + KEPT * ENTRY_BITS // 8
    feedback_decay = 0.95  # as in SparseLoCo (arXiv 2508.15706)

    loops = Loops(_encode, _decode)

    def _encode_blocks(self, values: torch.Tensor, code: torch.Tensor, num_values: int) -> None:
        constants = _constants(values.device)
        indices = self._largest(values, constants.from_end)
        kept = values.gather(1, indices)
        is_zero = kept == 0
        magnitudes, num_smaller = two_means(kept.abs(), is_zero.sum(1, keepdim=True), constants.counts)
        code[:, :4].view(torch.bfloat16).copy_(magnitudes.clamp_max_(LARGEST_MAGNITUDE))

        entries = indices.add_(constants.counts < num_smaller, alpha=IS_SMALLER).add_(kept < 0, alpha=IS_NEGATIVE)
        entries = torch.where(is_zero, entries[:, -1:], entries)
        words = (entries.view(-1, KEPT // 4, 4) << constants.shifts).sum(2, keepdim=True)
        code[:, 4:].unflatten(1, (-1, 7)).copy_(words.view(torch.uint8)[:, :, :7])

    def _largest(self, values: torch.Tensor, from_end: torch.Tensor) -> torch.Tensor:
        """Returns the indices (n, 64) of each row's largest magnitudes, smallest first, by keys as in `_select`."""
        keys = self._scratch("keys", values, torch.int32, self.block_values)
        torch.bitwise_and(values.view(torch.int32), int(KEY_BITS), out=keys).bitwise_or_(from_end)
        return keys.topk(KEPT, dim=1).values.flip(1).bitwise_not_().bitwise_and_(INDEX_MASK).long()

    def _decode_blocks(self, code: torch.Tensor, values: torch.Tensor) -> None:
        magnitudes = code[:, :4].view(torch.bfloat16).float()
        words = self._scratch("words", values, torch.int64, KEPT // 4).zero_()[:, :, None]
        words.view(torch.uint8)[:, :, :7].copy_(code[:, 4:].unflatten(1, (-1, 7)))
        entries = (words >> _constants(values.device).shifts).flatten(1)
        levels = torch.cat([magnitudes, -magnitudes], 1).gather(1, entries >> INDEX_BITS & 3)
        values.copy_(magnitudes[:, :1] * 0)  # NaN if the magnitudes are NaN
        values.scatter_(1, entries & INDEX_MASK, levels)


def two_means(
    magnitudes: torch.Tensor, num_zeros: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two numbers that best represent a row of magnitudes (n, 2), and the count of the second one (n, 1).

    If c magnitudes have the sum S, and the k smallest the sum S_k, the squared error is smallest where
    S_k^2 / k + (S - S_k)^2 / (c - k) is largest; the numbers are the means of the others and of the k smallest.

    Args:
        magnitudes: (n, 64), smallest first. A row that holds inf or NaN ends with it, and has NaN as its means.
        num_zeros: (n, 1); the number of zeros, which do not count.
        counts: 0 to 63 in fp64.
    """
    # Values are rounded to multiples of about 2^-46 of the largest, so that all sums are exact, in any order of
    # summation.
    grid = magnitudes[:, -1:].double() * KEPT
    rounded = (magnitudes + grid).sub_(grid)
    sums = rounded.cumsum(1)
    smaller = sums - rounded
    larger = sums[:, -1:] - smaller
    mean_larger = larger / (KEPT - counts)
    mean_smaller = smaller / (counts - num_zeros).clamp_min_(1)
    gain = larger.mul_(mean_larger).add_(smaller.mul_(mean_smaller))
    best = gain.argmax(1, keepdim=True)
    return torch.cat([mean_larger.gather(1, best), mean_smaller.gather(1, best)], 1), best
