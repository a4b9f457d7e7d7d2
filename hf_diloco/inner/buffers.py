"""The inner optimizer's momentum and moments as shards: they lie as the masters do that they belong to."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hf_diloco.inner.base import Segment, Shards


class BufferShards(Shards):
    """One of them, such as "exp_avg", over the whole model; writing it writes the optimizer's state.

    Wherever an optimizer keeps its masters, in one tensor a parameter, a partition or a sub-group, its state has a
    tensor of the same shape: a segment of the masters lies in one as it lies in the other.

    Args:
        shards: the masters.
        name: of the buffer in the optimizer's state.
    """

    def __init__(self, shards: Shards, name: str) -> None:
        self.description = shards.description
        self.is_replicated = shards.is_replicated
        self.sizes = shards.sizes
        self.inner = shards.inner
        self._shards = shards
        self._name = name

    def segments(self) -> list[Segment]:
        held = [
            (master.data_ptr(), master.numel() * master.element_size(), state[self._name].view(-1))
            for master, state in self.inner.state.items()
            if self._name in state
        ]
        return [Segment(one.name, one.start, _beside(one.values, held)) for one in self._shards.segments()]

    def commit(self, names: Collection[str] | None = None) -> None:
        self.inner.commit_buffer(self._name)


def _beside(values: torch.Tensor, held: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """The part of a buffer that belongs to a part of the masters; zeros of nobody where no step has made any."""
    for begin, num_bytes, buffer in held:
        place = values.data_ptr() - begin
        if 0 <= place < num_bytes:
            return buffer.narrow(0, place // values.element_size(), values.numel())
    return torch.zeros_like(values, dtype=torch.float32)
