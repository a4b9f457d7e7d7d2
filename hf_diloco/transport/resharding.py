"""Direct connections between islands that cut the parameters differently.

Each rank of an island owns one range of the canonical index space. Where all islands have as many ranks the ranges are
equal, and a rank has one peer in each island. Else the space is cut at the ends of all islands' ranges: every piece
has one owner in each island, who exchange it. Pieces go in ascending order, so that nobody waits in a circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import DamagedTransferError, ExchangeError, PayloadError
from hf_diloco.transport.base import Observer, Traffic
from hf_diloco.transport.lane import Lane
from hf_diloco.transport.mesh import MeshExchange, Watch
from hf_diloco.transport.transfers import LossNotes

NOTE_PATIENCE = 0.5
"""See `LossNotes`. A wrong island named costs an attempt here, and everybody waits for it."""


class Range(NamedTuple):
    """A rank's values: canonical index of the first, and how many."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def check_ranges(ranges: Sequence[Range], size: int) -> None:
    """Raises `PayloadError` unless an island's ranges, in the order of its ranks, are all `size` values, each once."""
    position = 0
    for part in ranges:
        if part.start != position or part.length < 0:
            raise PayloadError(f"the ranges of an island's ranks do not follow each other: {list(ranges)[:8]}")
        position = part.end
    if position != size:
        raise PayloadError(f"the ranges of an island's ranks hold {position:,} values, not {size:,}")


def cut(own: Range, all_ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """The pieces of a rank's range, each with one owner in every island; in ascending order."""
    ends = {end for ranges in all_ranges for part in ranges for end in (part.start, part.end)}
    inner = sorted(end for end in ends if own.start < end < own.end)
    bounds = [own.start, *inner, own.end]
    return [Range(low, high - low) for low, high in itertools.pairwise(bounds) if high > low]


class SegmentedMesh:
    """One rank's connections for all its pieces.

    Args:
        lane: of all its pieces, each of which is a lane of its own; owners are numbered by their places among the
            islands that take part.
        own: this rank's range.
        all_ranges: of all ranks of all islands that take part, in their order; checked.
        watch: see `MeshExchange`.

    Raises:
        IslandLostError: the others did not connect; places are named, where one is to blame.
        ForgedError: another one does not hold the key; the island is named.
    """

    def __init__(
        self, lane: Lane, own: Range, all_ranges: Sequence[Sequence[Range]], watch: Watch | None = None
    ) -> None:
        self._own = own
        self._is_open = True
        self._pieces: list[tuple[Range, MeshExchange]] = []
        notes = LossNotes(lane.store, lane.name, lane.island, NOTE_PATIENCE)
        try:
            for piece in cut(own, all_ranges):
                part = replace(lane, name=f"{lane.name}/{piece.start}")
                self._pieces.append((piece, MeshExchange(part, notes, watch=watch)))
        except BaseException:
            self.close()
            raise

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        """As `Exchange.average`, of this rank's whole range."""
        if not self._is_open:
            raise ExchangeError("these connections are closed")
        traffic = Traffic()
        damaged: set[int] = set()
        is_sealed = False
        for piece, mesh in self._pieces:
            low = piece.start - self._own.start
            try:
                traffic += mesh.average(values[low : low + piece.length], weights, codec, observe)
            except DamagedTransferError as error:  # the others wait for the pieces that are left
                damaged.update(error.islands)
                is_sealed = error.is_sealed
        if damaged:
            raise DamagedTransferError(damaged, is_sealed)
        return traffic

    def close(self) -> None:
        """Lets go of all connections at once; may be called more than once."""
        for _, mesh in self._pieces:
            mesh.close()
        self._pieces.clear()
        self._is_open = False
