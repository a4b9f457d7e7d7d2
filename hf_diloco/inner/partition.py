"""Partitions the outer state over an island's ranks, and copies master weights to it and back.

There are two partitions. If rank r of every island holds the same segments, each rank keeps the outer state of its own
segments and exchanges it with rank r of the other islands, without traffic inside the island. Otherwise the canonical
index space is cut into equal *lanes*, the same on all islands, and each island moves segments to the ranks that own
the lanes and back, a bounded window at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import torch
import torch.distributed as dist
import xxhash

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.device_copies import copy_all
from hf_diloco.inner.island import IslandGroup

WINDOW_VALUES = 1 << 22
"""Values, of all lanes together, in flight inside the island at a time: 16 MiB of fp32."""

Interval = tuple[int, int]


class Partition(ABC):
    """This rank's part of the outer state: a flat fp32 host vector made of one or more lanes.

    Attributes:
        lanes: the numbers of the lanes that this rank owns, ascending.
        lane_sizes: their lengths.
        numel: length of the vector.
        intervals: the canonical (start, length) runs in the vector, in its order.
    """

    def __init__(self, lanes: list[int], lane_sizes: list[int], intervals: list[Interval]) -> None:
        self.lanes = lanes
        self.lane_sizes = lane_sizes
        self.numel = sum(lane_sizes)
        self.intervals = intervals

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of `vector`, one per lane."""
        return list(vector.split(self.lane_sizes))

    def digest(self, vector: torch.Tensor, island: IslandGroup) -> str:
        """Returns one digest of a vector that is spread over an island's ranks. Collective in the island.

        Lanes are the same on all islands, so equal values have equal digests on islands with other shards.
        """
        return self.combine_digests(
            [xxhash.xxh3_128_hexdigest(part.numpy().data) for part in self.split(vector)], island
        )

    def combine_digests(self, digests: Sequence[str], island: IslandGroup) -> str:
        """Combines the digests of this rank's lanes, in their order, and those of all other ranks into one digest."""
        mine = {str(lane): digest for lane, digest in zip(self.lanes, digests, strict=True)}
        lanes = {int(lane): digest for held in island.gather(mine) for lane, digest in held.items()}
        return xxhash.xxh3_128_hexdigest("".join(lanes[lane] for lane in sorted(lanes)).encode())

    @abstractmethod
    def gather(self, out: torch.Tensor) -> None:
        """Copies the current master weights into `out` (fp32, host, `numel` values). Collective in the island."""

    @abstractmethod
    def scatter(self, vector: torch.Tensor) -> None:
        """Writes `vector` into the master weights and commits them. Collective in the island."""


class AlignedPartition(Partition):
    """Every rank owns the lane of its own segments: lane r has rank r's segments, in their order."""

    def __init__(self, shards: Shards, island: IslandGroup) -> None:
        self._shards = shards
        intervals = shards.intervals()
        super().__init__([island.rank], [sum(length for _, length in intervals)], intervals)

    def gather(self, out: torch.Tensor) -> None:
        copy_all(_cut(out, self._values()))

    def scatter(self, vector: torch.Tensor) -> None:
        copy_all([(segment, piece) for piece, segment in _cut(vector, self._values())])
        self._shards.commit()

    def _values(self) -> list[torch.Tensor]:
        return [segment.values for segment in self._shards.segments()]


@dataclass(frozen=True)
class Overlap:
    """A run of elements that is in both a segment and a lane."""

    segment: int
    segment_start: int
    vector_start: int  # in the owner's vector
    length: int


class LanePartition(Partition):
    """Cuts the canonical index space into `num_lanes` equal lanes; lane l belongs to rank `l * ranks // num_lanes`.

    Args:
        num_lanes: equal on all islands, and at least the number of ranks of the largest island.
        block_values: lanes begin at multiples of it, so that no block of a codec spans two lanes.

    Attributes:
        windows: parts of the ranks' vectors that are swapped one after the other, to bound memory.
    """

    def __init__(self, shards: Shards, island: IslandGroup, num_lanes: int, block_values: int = 1) -> None:
        self.shards = shards
        self._island = island
        total = shards.num_parameters
        num_blocks = -(-total // block_values)
        starts = [num_blocks * lane // num_lanes * block_values for lane in range(num_lanes)]
        bounds = list(pairwise([*starts, total]))
        owned = [
            [lane for lane in range(num_lanes) if lane * island.size // num_lanes == rank]
            for rank in range(island.size)
        ]
        self._ranges = [[bounds[lane] for lane in lanes] for lanes in owned]
        intervals = [(low, high - low) for low, high in self._ranges[island.rank]]
        super().__init__(owned[island.rank], [length for _, length in intervals], intervals)
        held = island.gather(shards.intervals())
        # (start, length, number of the segment), sorted, to find the overlaps of a window without a full scan.
        self._held = [
            sorted((start, length, number) for number, (start, length) in enumerate(intervals)) for intervals in held
        ]
        self._starts = [[start for start, _, _ in intervals] for intervals in self._held]
        largest = max(sum(high - low for low, high in ranges) for ranges in self._ranges)
        window = max(1, WINDOW_VALUES // island.size)
        self.windows = [(start, min(start + window, largest)) for start in range(0, largest, window)]

    def gather(self, out: torch.Tensor) -> None:
        island = self._island
        values = [segment.values for segment in self.shards.segments()]
        if self.shards.is_replicated or island.size == 1:  # this rank holds all that it owns
            mine = self.overlaps(island.rank, island.rank, (0, self.numel))
            copy_all([(_in_vector(out, overlap), _in_segments(values, overlap)) for overlap in mine])
            return
        for window in self.windows:
            held, owned = self._in_window(values, out, window)
            self._swap(held, owned)

    def scatter(self, vector: torch.Tensor) -> None:
        values = [segment.values for segment in self.shards.segments()]
        for window in self.windows:
            held, owned = self._in_window(values, vector, window)
            self._swap(owned, held)
        self.shards.commit()

    def _in_window(
        self, values: list[torch.Tensor], vector: torch.Tensor, window: Interval
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Returns, for each rank, views of the segments here that it owns, and of the part of `vector` that it holds.

        Covers only the part `window` of every rank's vector.
        """
        me, ranks = self._island.rank, range(self._island.size)
        held = [[_in_segments(values, overlap) for overlap in self.overlaps(me, owner, window)] for owner in ranks]
        owned = [[_in_vector(vector, overlap) for overlap in self.overlaps(holder, me, window)] for holder in ranks]
        return held, owned

    def overlaps(self, holder: int, owner: int, window: Interval) -> list[Overlap]:
        """Returns the overlaps of `holder`'s segments with the part `window` of `owner`'s vector, in its order."""
        found = []
        vector_start = 0
        for low, high in self._ranges[owner]:
            begin = max(low, low + window[0] - vector_start)
            end = min(high, low + window[1] - vector_start)
            nearest = max(0, bisect_right(self._starts[holder], begin) - 1)
            for start, length, number in islice(self._held[holder], nearest, None):
                if start >= end:
                    break
                first, last = max(begin, start), min(end, start + length)
                if first < last:
                    found.append(Overlap(number, first - start, vector_start + first - low, last - first))
            vector_start += high - low
        return found

    def _swap(self, outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]]) -> None:
        """Sends each rank its outgoing pieces, and fills the incoming pieces from each rank."""
        counts, sizes = ([sum(piece.numel() for piece in pieces) for pieces in way] for way in (outgoing, incoming))
        sent = torch.empty(sum(counts))
        copy_all(_cut(sent, list(chain.from_iterable(outgoing))))
        received = sent
        if self._island.size > 1:
            received = torch.empty(sum(sizes))
            dist.all_to_all_single(received, sent, sizes, counts, group=self._island.group)
        copy_all([(piece, part) for part, piece in _cut(received, list(chain.from_iterable(incoming)))])


def choose_partition(
    shards: Shards, island: IslandGroup, layouts: Sequence[dict[str, object]], block_values: int = 1
) -> Partition:
    """Returns the partition for all islands, given each island's `layout_of`; `block_values`: see `LanePartition`."""
    first = layouts[0]
    if all(layout == first for layout in layouts) and (island.size == 1 or not shards.is_replicated):
        return AlignedPartition(shards, island)
    num_lanes = max(len(layout["ranks"]) for layout in layouts)  # type: ignore[arg-type]
    return LanePartition(shards, island, num_lanes, block_values)


def to_model_intervals(partition: Partition, fragment: Shards, model: Shards) -> list[Interval]:
    """Returns the intervals of a fragment's partition in the canonical index space of the whole model."""
    offsets = model.offsets()
    return [(offsets[name] + inside, count) for name, inside, count in _by_parameter(partition, fragment)]


def runs_of(partition: Partition, shards: Shards, label: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Splits a rank's vector into runs of parameters with the same label; returns (begin, end, label) in order.

    `label` is by parameter name; 0 for those without.
    """
    found: list[tuple[int, int, int]] = []
    place = 0
    for name, _, count in _by_parameter(partition, shards):
        one = label.get(name, 0)
        if found and found[-1][2] == one:
            found[-1] = (found[-1][0], place + count, one)
        else:
            found.append((place, place + count, one))
        place += count
    return found


def _by_parameter(partition: Partition, shards: Shards) -> Iterator[tuple[str, int, int]]:
    """Yields the runs of a rank's vector within one parameter: its name, the first element, and the length."""
    names, starts = list(shards.sizes), list(shards.offsets().values())
    for position, length in partition.intervals:
        end = position + length
        while position < end:
            number = bisect_right(starts, position) - 1
            name, inside = names[number], position - starts[number]
            count = min(end - position, shards.sizes[name] - inside)
            yield name, inside, count
            position += count


def layout_of(shards: Shards, island: IslandGroup) -> dict[str, object]:
    """Returns the layout of an island's shards: two are equal exactly if each rank holds the same segments in both.

    Raises:
        UnsupportedError: the island's ranks do not hold one whole model.
    """
    check_cover(shards, island)
    listing = "\n".join(f"{segment.name} {segment.start} {segment.numel}" for segment in shards.segments())
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return {"ranks": island.gather(digest), "replicated": shards.is_replicated}


def check_cover(shards: Shards, island: IslandGroup) -> None:
    """Checks that the ranks hold one whole model: no gaps, no element twice, no differing models.

    Training would be silently wrong otherwise. Collective over the island's ranks; all of them raise or none.

    Raises:
        UnsupportedError: names the parameter.
    """
    held = island.gather({"sizes": dict(shards.sizes), "intervals": shards.intervals()})
    if any(list(rank["sizes"].items()) != list(held[0]["sizes"].items()) for rank in held):
        raise UnsupportedError(
            "the ranks of this island hold different parameters (pipeline, tensor or expert parallelism), which is "
            "not supported yet: use DDP or DeepSpeed ZeRO inside the island"
        )
    intervals = [rank["intervals"] for rank in held]
    for covering in intervals if shards.is_replicated else [list(chain.from_iterable(intervals))]:
        _check_tiles(covering, shards)


def _check_tiles(intervals: Sequence[Interval], shards: Shards) -> None:
    """Raises `UnsupportedError` unless the intervals fill the canonical index space without gap or overlap."""
    end = 0
    for start, length in sorted((start, length) for start, length in intervals if length):
        if start > end:
            break
        if start < end:
            raise UnsupportedError(
                f"several ranks hold the same part of {_name_at(shards, start)}: the shards of this way to train "
                f"({shards.description}) are not known to this package; use DDP or DeepSpeed ZeRO inside the island"
            )
        end = start + length
    if end < shards.num_parameters:
        raise UnsupportedError(
            f"no optimizer on this island trains {_name_at(shards, end)}: hand it to the optimizer with the other "
            "parameters, or freeze it (requires_grad=False)"
        )


def _name_at(shards: Shards, position: int) -> str:
    offsets = shards.offsets()
    return [name for name, size in shards.sizes.items() if size and offsets[name] <= position][-1]


def _in_segments(values: list[torch.Tensor], overlap: Overlap) -> torch.Tensor:
    return values[overlap.segment].narrow(0, overlap.segment_start, overlap.length)


def _in_vector(vector: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    return vector.narrow(0, overlap.vector_start, overlap.length)


def _cut(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Splits a vector by the sizes of these pieces; returns each part with its piece."""
    return list(zip(flat.split([piece.numel() for piece in pieces]), pieces, strict=True))
