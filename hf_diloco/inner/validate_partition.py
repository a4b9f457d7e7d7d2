"""The check that an island's ranks together hold the whole model: each element once, or all of it on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hf_diloco.errors import UnsupportedError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup

Interval = tuple[int, int]


def check_cover(shards: Shards, island: IslandGroup) -> None:
    """Refuses what would train silently wrong: gaps, elements held twice, ranks with different models.

    Collective over the island's ranks; all of them raise or none.

    Raises:
        UnsupportedError: naming the parameter.
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
    """The intervals must fill the canonical index space without gap or overlap."""
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
