"""The sum of a node's vectors and its neighbours', cut into pieces that are summed as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hf_diloco.gossip.averages import Vectors, mix_
from hf_diloco.gossip.mesh.swapping import Buffers
from hf_diloco.gossip.pieces import Piece
from hf_diloco.transport.transfers import CHUNK_VALUES

OWN = -1
"""Whose buffers are this node's own: no neighbour has that number."""


class _Sum(Piece):
    """A piece of one vector; what comes of it is what `mix_` gives."""

    def __init__(
        self,
        weights: Mapping[int, float],
        receivers: Collection[int],
        own: torch.Tensor,
        out: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        self.bytes_to = dict.fromkeys(receivers, own.nbytes)
        self.bytes_from = dict.fromkeys(weights, own.nbytes)
        self.is_pinned = own.device.type == "cuda"
        self._weights = weights
        self._own = own
        self._out = out
        self._buffers = buffers

    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        given = self._own.view(torch.uint8)
        if self.is_pinned:
            given = self._buffers.take(OWN, slot, given.numel(), is_pinned=True).copy_(given)
        return dict.fromkeys(self.bytes_to, given)

    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        kind, device = self._own.dtype, self._own.device
        others = [
            (weight, received[peer].view(kind).to(device))
            for peer, weight in self._weights.items()
            if peer in received
        ]
        mix_(self._out, self._own, others)


def sum_pieces(
    weights: Mapping[int, float], receivers: Collection[int], vectors: Vectors, outs: Vectors, buffers: Buffers
) -> list[Piece]:
    """An exchange that writes what `mix_` gives to `outs`.

    Pieces are whole blocks of `mix_`, so that nothing depends on how vectors are cut.

    Args:
        weights: of those from whom it receives, in the order of their numbers.
        receivers: to whom it sends.
        vectors: see `Neighbours.mix`.
        outs: likewise.
        buffers: for vectors that do not lie in host memory.
    """
    return [
        _Sum(weights, receivers, one, into, buffers)
        for own, out in zip(vectors, outs, strict=True)
        for one, into in zip(own.split(CHUNK_VALUES), out.split(CHUNK_VALUES), strict=True)
    ]
