"""Shards without an engine: named parameters cut over ranks in the ways that DDP, ZeRO-1/2 and ZeRO-3 cut them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch

from hf_diloco.inner.base import Segment, Shards

Piece = tuple[str, int, int]
"""Name of a parameter, first element, number of elements."""

Cut = Literal["whole", "flat", "each"]


def cut_pieces(sizes: Mapping[str, int], num_ranks: int, cut: Cut) -> list[list[Piece]]:
    """What each rank holds: all (`whole`), a run of all flattened together (`flat`), or a part of each (`each`)."""
    if cut == "whole":
        return [[(name, 0, size) for name, size in sizes.items()] for _ in range(num_ranks)]
    if cut == "each":
        return [_parts_of_each(sizes, num_ranks, rank) for rank in range(num_ranks)]
    part = -(-sum(sizes.values()) // num_ranks)
    return [_run(sizes, rank * part, (rank + 1) * part) for rank in range(num_ranks)]


def _parts_of_each(sizes: Mapping[str, int], num_ranks: int, rank: int) -> list[Piece]:
    found = []
    for name, size in sizes.items():
        part = -(-size // num_ranks)
        start, end = min(rank * part, size), min((rank + 1) * part, size)
        if start < end:
            found.append((name, start, end - start))
    return found


def _run(sizes: Mapping[str, int], low: int, high: int) -> list[Piece]:
    """Elements low to high of the parameters flattened in another order than the model's, as groups make it."""
    found = []
    position = 0
    for name, size in reversed(list(sizes.items())):
        start, end = max(low, position), min(high, position + size)
        if start < end:
            found.append((name, start - position, end - start))
        position += size
    return found


class ListShards(Shards):
    """One rank's pieces, each in a tensor of its own."""

    def __init__(self, sizes: Mapping[str, int], pieces: Sequence[Piece], is_replicated: bool = False) -> None:
        self.description = "pieces"
        self.is_replicated = is_replicated
        self.sizes = dict(sizes)
        self.num_commits = 0
        self._segments = [Segment(name, start, torch.zeros(length)) for name, start, length in pieces]

    def segments(self) -> list[Segment]:
        return list(self._segments)

    def commit(self, names: Collection[str] | None = None) -> None:
        self.num_commits += 1

    def write(self, whole: torch.Tensor) -> None:
        """Takes this rank's part of a vector over the canonical index space."""
        for (start, length), segment in zip(self.intervals(), self._segments, strict=True):
            segment.values.copy_(whole[start : start + length])

    def read(self) -> torch.Tensor:
        """The canonical vector, not a number where another rank holds it."""
        whole = torch.full((self.num_parameters,), torch.nan)
        for (start, length), segment in zip(self.intervals(), self._segments, strict=True):
            whole[start : start + length] = segment.values
        return whole


def make_shards(sizes: Mapping[str, int], num_ranks: int, rank: int, cut: Cut) -> ListShards:
    """The shards of one rank."""
    return ListShards(sizes, cut_pieces(sizes, num_ranks, cut)[rank], is_replicated=cut == "whole")
