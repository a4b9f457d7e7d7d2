"""The fp32 master weights of one rank, seen as pieces of named parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_diloco.inner.optimizer import InnerOptimizer


@dataclass(frozen=True)
class Segment:
    """A run of elements of one parameter whose master values this rank holds.

    Attributes:
        name: the parameter's name in the unwrapped model (`named_parameters`; tied weights by their first name).
        start: index of the first element in the flattened parameter.
        values: 1-D view into the master storage; writing it writes the master. Any float dtype, any device.
    """

    name: str
    start: int
    values: torch.Tensor

    @property
    def numel(self) -> int:
        return self.values.numel()


class Shards(ABC):
    """Where an island's master weights are. Reading them needs no communication.

    Attributes:
        description: in words, for logs, as "ZeRO-2".
        is_replicated: every rank holds all parameters (DDP, ZeRO-0), instead of a part of its own (ZeRO-1/2/3, FSDP2).
        sizes: element count of each trainable parameter by name, in the model's order. This order, unpadded, is the
            *canonical index space* in which islands with different shards understand each other.
        shapes: of the same parameters, for whoever reads a checkpoint without the model.
        inner: the optimizer that trains the masters.
    """

    description: str
    is_replicated: bool
    sizes: Mapping[str, int]
    shapes: Mapping[str, Sequence[int]] = {}
    inner: InnerOptimizer = InnerOptimizer()

    @abstractmethod
    def segments(self) -> list[Segment]:
        """This rank's segments, always in the same order. Over an island's ranks they cover every element: once if
        sharded, once a rank if replicated."""

    @abstractmethod
    def commit(self, names: Collection[str] | None = None) -> None:
        """Makes the working copies of the model agree with the masters after these were written.

        Collective over the island's ranks under ZeRO-1/2/3 and HSDP.

        Args:
            names: of the parameters that were written, equal on all ranks; None: all. DeepSpeed commits all anyway.
        """

    @property
    def num_parameters(self) -> int:
        """Trainable elements of the whole model."""
        return sum(self.sizes.values())

    @property
    def is_on_cuda(self) -> bool:
        """Whether this rank's masters are on a CUDA device."""
        return any(segment.values.device.type == "cuda" for segment in self.segments())

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins in the canonical index space."""
        offsets, position = {}, 0
        for name, size in self.sizes.items():
            offsets[name] = position
            position += size
        return offsets

    def intervals(self) -> list[tuple[int, int]]:
        """(first canonical index, length) of each of this rank's segments."""
        offsets = self.offsets()
        return [(offsets[segment.name] + segment.start, segment.numel) for segment in self.segments()]
