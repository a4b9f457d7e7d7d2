"""Compressed averaging with neighbours: a node sends the encoded difference between its vector and a replica of it.

    x̂_i ← x̂_i + Q(v_i - x̂_i)                    at node i and at all its receivers
    out_i = v_i + Σ_j w_ij (x̂_j - x̂_i)

as in CHOCO-SGD (arXiv 1902.00340, with consensus step 1). Q encodes and decodes. If a node encoded the vector itself,
the quantization noise would never vanish; differences vanish as the nodes converge, and their noise with them. The
mean over all nodes does not change, up to rounding; nodes that agree, with equal replicas, keep their values.
If vectors are averaged repeatedly, and the code loses e of a difference, the next difference is
(W - I) v + (2I - W) e. So Q's relative error must be well below 1/3: the closer W's eigenvalues are to -1, and the
closer a method is to divergence, the smaller.

For a vector of d values, a node keeps replicas of d values for itself and for each neighbour. Replicas are neither
saved nor handed over: on a new edge the sender sends its whole replica instead of the code, and a node without a
replica of itself copies its vector. All edges are new in the first exchange and in the first after `rekey`, so these
exchanges are exact. That is why a run resumed from a checkpoint continues exactly as the run that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.gossip.averages import Vectors, blocks
from hf_diloco.gossip.neighbours import MixedPiece, Neighbours, Piece
from hf_diloco.methods.topology import Topology
from hf_diloco.transport.base import Traffic
from hf_diloco.utils.workspace import Workspace

PIECE_VALUES = 1 << 20
"""Values in a piece: a multiple of every codec's block, and of the slices of `averages.blocks`."""

MIN_CODED_VALUES = 256
"""Shorter vectors are not encoded: they are signals, such as a stop request, and not parameters."""


def with_payload(neighbours: Neighbours, payload: str) -> Neighbours:
    """Sets the codec with which the vectors of `neighbours` travel; fp32: unencoded. Returns `neighbours`.

    Raises:
        ConfigError: the graph changes over time.
    """
    codec = CODECS[payload]
    if not codec.is_exact:
        neighbours.coding = Differences(neighbours, codec)
    return neighbours


def check_static(topology: Topology, payload: str) -> None:
    """Raises `ConfigError` if the graph changes over time: neighbours that meet rarely have no current replicas."""
    if not topology.is_static:
        raise ConfigError(
            f"payload={payload} needs a graph that does not change, as neighbours keep replicas of each other; "
            f"{topology.name} changes: take ring, grid, hypercube, exponential or symmetric-exponential, or payload "
            "fp32"
        )


class Differences:
    """Exchanges differences to replicas as in the equations above, Q is `codec`: fp32 vectors, on a static graph.

    Results are bit-identical over all transports. When a neighbour is lost, its weight goes to the node itself, and
    its replica is dropped. All nodes must call `rekey` before the same exchanges.

    Raises:
        ConfigError: the graph changes over time.

    Attributes:
        replicas: one `Replicas` for each vector.
        weights: of the neighbours that are connected, in this exchange.
        receivers: those that are connected.
        new: peers of either kind with which nothing has been exchanged since the last `rekey`.
        has_key: whether this node has a replica of itself; if not, the next exchange copies the vector.
        codes: a buffer for each slot, reused in every exchange.
    """

    def __init__(self, neighbours: Neighbours, codec: Codec) -> None:
        self.graph, self.node = neighbours.topology, neighbours.node
        check_static(self.graph, codec.name)
        self.codec = codec
        self._peers = self.graph.neighbours(self.node)
        self._receivers = self.graph.receivers(self.node)
        self.replicas: list[Replicas] = []
        self.has_key = False
        self._lives: dict[int, str] = {}  # of the edges that have exchanged something since the last `rekey`
        self.weights: dict[int, float] = {}
        self.receivers: list[int] = []
        self.new: set[int] = set()
        self.codes: dict[int, torch.Tensor] = {}

    def mix(self, neighbours: Neighbours, vectors: Vectors, outs: Vectors, topology: Topology) -> Traffic:
        of_neighbours = self._weights_of(topology)
        self._prepare(vectors)
        peers = {*of_neighbours, *self._receivers}
        lives = {peer: life for peer in sorted(peers) if (life := neighbours.life(peer)) is not None}
        self.weights = {peer: weight for peer, weight in of_neighbours.items() if peer in lives}
        self.receivers = [peer for peer in self._receivers if peer in lives]
        self.new = {peer for peer, life in lives.items() if self._lives.get(peer) != life}
        traffic = neighbours.swap(
            [
                piece
                for own, out, replicas in zip(vectors, outs, self.replicas, strict=True)
                for piece in self._cut(own, out, replicas)
            ]
        )
        self.has_key = True
        self._lives = {peer: life for peer, life in lives.items() if neighbours.life(peer) == life}
        for replicas in self.replicas:
            replicas.others = {peer: other for peer, other in replicas.others.items() if peer in self._lives}
        return traffic

    def rekey(self) -> None:
        self.has_key = False
        self._lives.clear()

    def refuse_published(self) -> None:
        """Raises `UnsupportedError`: published payloads have no replicas to which a difference could be taken."""
        raise UnsupportedError(
            f"payload={self.codec.name} is for nodes that meet, and not for those that take what others published: "
            "set payload to fp32"
        )

    def _weights_of(self, topology: Topology) -> dict[int, float]:
        """Returns the neighbours' weights. They must be the same in every exchange, as replicas belong to edges."""
        if not topology.is_static or topology.neighbours(self.node) != self._peers:
            raise UnsupportedError(
                f"payload={self.codec.name} goes with one graph only, and not with pairs that are drawn: set payload "
                "to fp32"
            )
        weights = topology.weights()[self.node].tolist()
        return {peer: weights[peer] for peer in self._peers}

    def _prepare(self, vectors: Vectors) -> None:
        """Allocates the replicas of these vectors, unless there are replicas of these sizes."""
        sizes = [vector.numel() for vector in vectors]
        if sizes == [replicas.own.numel() for replicas in self.replicas]:
            return
        for vector in vectors:
            if vector.dtype != torch.float32 and vector.numel() >= MIN_CODED_VALUES:
                raise UnsupportedError(
                    f"payload={self.codec.name}: codes are of float32 values, but the vectors are of {vector.dtype}: "
                    "keep parameters in float32, or set payload to fp32"
                )
        self.replicas = [Replicas(torch.empty_like(vector)) for vector in vectors]
        self.rekey()

    def _cut(self, own: torch.Tensor, out: torch.Tensor, replicas: Replicas) -> list[Piece]:
        """Cuts one vector into pieces."""
        if own.numel() < MIN_CODED_VALUES:
            return [MixedPiece(self.weights, self.receivers, own, out)]
        for peer in self.weights:
            if peer not in replicas.others:
                replicas.others[peer] = torch.empty_like(own)
        wheres = [slice(low, min(low + PIECE_VALUES, own.numel())) for low in range(0, own.numel(), PIECE_VALUES)]
        return [_Difference(self, own[where], out[where], replicas.part(where)) for where in wheres]


@dataclass
class Replicas:
    """Replicas of one vector: of this node's, as the others know it, and of each neighbour's; fp32, of its size."""

    own: torch.Tensor
    others: dict[int, torch.Tensor] = field(default_factory=dict)

    def part(self, where: slice) -> Replicas:
        """Views of the replicas' values in a slice."""
        return Replicas(self.own[where], {peer: other[where] for peer, other in self.others.items()})


class _Difference(Piece):
    """A part of one vector: sends the encoded difference to the replica, or the replica itself over a new edge."""

    def __init__(self, coding: Differences, own: torch.Tensor, out: torch.Tensor, replicas: Replicas) -> None:
        size, whole = coding.codec.num_bytes(own.numel()), own.nbytes
        self.bytes_to = {peer: whole if peer in coding.new else size for peer in coding.receivers}
        self.bytes_from = {peer: whole if peer in coding.new else size for peer in coding.weights}
        self._coding = coding
        self._own = own
        self._out = out
        self._replicas = replicas

    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        coding, whole = self._coding, self._replicas.own
        if not coding.has_key:
            whole.copy_(self._own)
            return dict.fromkeys(self.bytes_to, whole.view(torch.uint8))
        code, codec = self._code(slot), coding.codec
        for where in blocks(self._own):
            own, replica, part = self._own[where], whole[where], code[codec.locate(where.start, where.stop)]
            difference = torch.sub(own, replica, out=_scratch(own))
            codec.encode(difference, part)
            codec.decode(part, difference)
            replica.add_(difference)
        return {peer: whole.view(torch.uint8) if peer in coding.new else code for peer in self.bytes_to}

    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        weights = {peer: weight for peer, weight in self._coding.weights.items() if peer in received}
        for where in blocks(self._own):
            own, replica, mixed = self._own[where], self._replicas.own[where], self._out[where]
            difference = _scratch(own)
            mixed.copy_(own)
            for peer, weight in weights.items():
                other = self._replicas.others[peer][where]
                self._follow(peer, received[peer], where, other, difference)
                torch.sub(other, replica, out=difference)
                mixed.add_(difference, alpha=weight)

    def _follow(
        self, peer: int, received: torch.Tensor, where: slice, other: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Updates a neighbour's replica by the same two operations as the neighbour does, so that the bits agree."""
        codec = self._coding.codec
        if peer in self._coding.new:
            other.copy_(received.view(torch.float32)[where])
        else:
            codec.decode(received[codec.locate(where.start, where.stop)], scratch)
            other.add_(scratch)

    def _code(self, slot: int) -> torch.Tensor:
        """A buffer for the code that no other piece in flight uses."""
        codes, device = self._coding.codes, self._own.device
        size = self._coding.codec.num_bytes(self._own.numel())
        known = codes.get(slot)
        if known is None or known.numel() < size or known.device != device:
            known = codes[slot] = torch.empty(size, dtype=torch.uint8, device=device)
        return known[:size]


def _scratch(like: torch.Tensor) -> torch.Tensor:
    return _workspace.take("difference", like.numel(), like.dtype, like.device)


_workspace = Workspace()
