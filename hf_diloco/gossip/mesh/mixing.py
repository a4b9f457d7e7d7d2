"""One exchange with all neighbours: chunks on their way to and from each at once, summed as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.exchange.base import Traffic
from hf_diloco.exchange.connections import Transfers
from hf_diloco.exchange.mesh import CHUNK_VALUES
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.patience import Patience
from hf_diloco.gossip.neighbours import Vectors, mix_

BYTES_IN_FLIGHT = 64 << 20
"""What a node has on its way from all neighbours together, if chunks are few enough."""

MIN_CHUNKS_IN_FLIGHT, MAX_CHUNKS_IN_FLIGHT = 2, 8


class Buffers:
    """The host's memory, used again at every exchange: fresh memory costs eight times what used memory does."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], torch.Tensor] = {}

    def take(self, use: str, peer: int, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of `like`'s size and type."""
        num_bytes = like.numel() * like.itemsize
        known = self._known.get((use, peer, slot))
        if known is None or known.numel() < num_bytes:
            is_pinned = like.device.type == "cuda"
            known = self._known[use, peer, slot] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return known[:num_bytes].view(like.dtype)

    def forget(self, peer: int) -> None:
        """After a transfer that failed: nobody may write to what was to be received."""
        self._known = {key: buffer for key, buffer in self._known.items() if key[1] != peer}


@dataclass
class _Chunk:
    """What is in flight for one piece of one vector."""

    own: torch.Tensor
    out: torch.Tensor
    slot: int
    transfers: dict[int, Transfers] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)


class Mixing:
    """Exchanges of vectors over the edges of one node.

    A neighbour whose transfer fails is left out from that chunk on, and its edge closed.

    Args:
        edges: the node's, by neighbour; whoever is lost is taken out.
        patience: with those that do not come.
        lose: is told whom the node has lost, and why, in words.
    """

    def __init__(self, edges: dict[int, Edge], patience: Patience, lose: Callable[[int, str], None]) -> None:
        self._edges = edges
        self._patience = patience
        self._lose = lose
        self._buffers = Buffers()
        self._pipeline: deque[_Chunk] = deque()

    def run(
        self, weights: Mapping[int, float], receivers: Collection[int], vectors: Vectors, outs: Vectors
    ) -> Traffic:
        """Sends `vectors` to `receivers`, and writes what `mix_` gives to `outs`.

        Args:
            weights: of those from whom it receives, in the order of their numbers.
            receivers: to whom it sends.
            vectors: see `Neighbours.mix`.
            outs: likewise.
        """
        self._patience.begin()
        self._pipeline.clear()
        traffic = Traffic()
        num_slots = _num_chunks_in_flight(len(weights), vectors)
        for number, (own, out) in enumerate(_cut(vectors, outs)):
            if len(self._pipeline) == num_slots:
                traffic += self._finish(weights)
            chunk = _Chunk(own, out, number % num_slots)
            self._pipeline.append(chunk)
            self._begin(chunk, weights, receivers)
        while self._pipeline:
            traffic += self._finish(weights)
        return traffic

    def _begin(self, chunk: _Chunk, weights: Mapping[int, float], receivers: Collection[int]) -> None:
        """Starts the transfers; receives first, as a rate limit takes its time with what is sent."""
        for peer in sorted({*weights, *receivers} & self._edges.keys()):
            chunk.transfers[peer] = self._edges[peer].begin()
        for peer in weights:
            if peer in self._edges:
                with self._unless_lost(peer):
                    received = chunk.received[peer] = self._buffers.take("from", peer, chunk.slot, chunk.own)
                    self._edges[peer].receive(received, chunk.transfers[peer])
        given = self._on_host(chunk)
        for peer in receivers:
            if peer in self._edges:
                with self._unless_lost(peer):
                    self._edges[peer].send(given, chunk.transfers[peer])

    def _finish(self, weights: Mapping[int, float]) -> Traffic:
        """Waits for the first chunk's transfers, and sums what has come."""
        chunk, traffic = self._pipeline[0], Traffic()
        for peer, transfers in chunk.transfers.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    edge, look = self._edges[peer], self._patience.watch(peer)
                    traffic += edge.wait(transfers, self._patience.limit, look)
            traffic += transfers.take_traffic()  # of those who are lost
        self._pipeline.popleft()
        others = [
            (weight, chunk.received[peer].to(chunk.out.device))
            for peer, weight in weights.items()
            if peer in self._edges
        ]
        mix_(chunk.out, chunk.own, others)
        return traffic

    def _on_host(self, chunk: _Chunk) -> torch.Tensor:
        """What is sent of a chunk: on a processor the vector itself."""
        if chunk.own.device.type == "cpu":
            return chunk.own
        return self._buffers.take("own", -1, chunk.slot, chunk.own).copy_(chunk.own)

    @contextmanager
    def _unless_lost(self, peer: int) -> Iterator[None]:
        """Takes a neighbour out if its transfer fails inside, and goes on without."""
        try:
            yield
        except IslandLostError:
            is_late = self._patience.is_over
            self._edges.pop(peer).close()
            for chunk in self._pipeline:
                if peer in chunk.transfers:
                    chunk.transfers[peer].drop()  # or they would keep the sockets open
            self._buffers.forget(peer)
            self._patience.renew()
            self._lose(
                peer, f"it did not come within {self._patience.seconds:g} s" if is_late else "its connection broke"
            )


def _cut(vectors: Vectors, outs: Vectors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each vector's chunks, with where what comes of them goes; whole blocks of `mix_`, which so gives equal bits."""
    for own, out in zip(vectors, outs, strict=True):
        yield from zip(own.split(CHUNK_VALUES), out.split(CHUNK_VALUES), strict=True)


def _num_chunks_in_flight(num_sources: int, vectors: Vectors) -> int:
    chunk_bytes = CHUNK_VALUES * max((vector.itemsize for vector in vectors), default=1)
    wanted = BYTES_IN_FLIGHT // (chunk_bytes * max(1, num_sources))
    return max(MIN_CHUNKS_IN_FLIGHT, min(MAX_CHUNKS_IN_FLIGHT, wanted))
