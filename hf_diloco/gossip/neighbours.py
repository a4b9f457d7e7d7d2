"""One node's end of a graph: its vectors averaged with those of its neighbours.

Transports differ in how bytes travel, not in what comes out. All use `mix_`: the same operations on every node, in
the order of the nodes' numbers. So nodes that are threads of one process get the same bits as those in several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.gossip.averages import Vectors, mean_, mix_
from hf_diloco.gossip.published import MemoryPublished, Published, VersionedBuffer
from hf_diloco.gossip.records import Record, pack_record, unpack_record
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.memory import Swaps
from hf_diloco.transport.mesh import CHUNK_VALUES
from hf_diloco.utils.workspace import Workspace

if TYPE_CHECKING:
    from hf_diloco.gossip.choco import Differences
    from hf_diloco.methods.topology import Topology


class Piece(ABC):
    """A piece of what neighbours swap in an exchange; pieces have the same order at both ends of every edge.

    Attributes:
        bytes_to: what each receiver is sent, in the order of their numbers.
        bytes_from: what each neighbour sends, in the order of their numbers; both ends know the same.
    """

    bytes_to: Mapping[int, int]
    bytes_from: Mapping[int, int]

    @abstractmethod
    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        """What each receiver is sent: uint8, 1-D, contiguous; stays as it is until `finish` has been called.

        Args:
            slot: tells this piece from all others that are in flight; from 0, below the number of pieces.
        """

    @abstractmethod
    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        """Uses what has come. Pieces are finished in their order, each after it was given.

        Args:
            received: uint8, from each neighbour that is not lost; left as it is.
        """


class MixedPiece(Piece):
    """A piece of one vector as it is; what comes of it is what `mix_` gives.

    Args:
        weights: of those from whom it is received, in the order of their numbers.
        receivers: to whom it is sent.
        own: what this node gives.
        out: where the sum goes.
    """

    def __init__(
        self, weights: Mapping[int, float], receivers: Collection[int], own: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.bytes_to = dict.fromkeys(receivers, own.nbytes)
        self.bytes_from = dict.fromkeys(weights, own.nbytes)
        self._weights = weights
        self._own = own
        self._out = out

    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        return dict.fromkeys(self.bytes_to, self._own.view(torch.uint8))

    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        others = [(w, received[peer].view(self._own.dtype)) for peer, w in self._weights.items() if peer in received]
        mix_(self._out, self._own, others)


class Neighbours(ABC):
    """What a node sees of the others. All methods are collective over the nodes, and block.

    Vectors are 1-D, contiguous, fp32 or fp64, of equal length on all nodes. An error in an exchange leaves what was to
    be written undefined, and ends the run of this node.

    Attributes:
        node: this node's number, from 0.
        num_nodes: n.
        topology: who averages with whom, with which weights.
        is_on_host: vectors must lie in host memory.
        is_returning: the others go on without this node, which has been there before: call `enter` before the first
            step.
        coding: of what `mix` moves; None: vectors travel as they are.
    """

    coding: Differences | None = None
    is_on_host: bool = False
    is_returning: bool = False
    node: int
    num_nodes: int
    topology: Topology

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        """Writes Σ_j w_ij(step) vector_j to `outs`; vectors of one step travel together.

        Args:
            vectors: what this node gives; left as they are.
            outs: one for each vector, of its size; they must not overlap `vectors`.
            step: from 0; which weights, on a graph that changes.
            topology: whose weights, the same on all nodes; its edges are edges of `self.topology`, whose weights are
                the default.

        Returns:
            What crossed the node's boundary.

        Raises:
            IslandLostError: a node did not come in time.
        """
        topology = topology or self.topology
        if self.coding is not None:
            return self.coding.mix(self, vectors, outs, topology)
        row = topology.weights(step)[self.node].tolist()
        weights = {peer: row[peer] for peer in topology.neighbours(self.node, step)}
        receivers = topology.receivers(self.node, step)
        pieces: list[Piece] = []
        for own, out in zip(vectors, outs, strict=True):
            size = CHUNK_VALUES if self.is_on_host else max(1, own.numel())
            # Whole blocks of `mix_`, so that nothing depends on how vectors are cut.
            cut = zip(own.split(size), out.split(size), strict=True)
            pieces += (MixedPiece(weights, receivers, *pair) for pair in cut)
        return self.swap(pieces)

    def swap(self, pieces: Sequence[Piece]) -> Traffic:
        """Moves bytes to receivers and from neighbours; `mix` is made of it.

        Returns:
            What crossed the node's boundary.

        Raises:
            IslandLostError: a node did not come in time.
            UnsupportedError: the transport has no such thing.
        """
        raise UnsupportedError(f"{type(self).__name__} moves vectors as they are only: set payload to fp32")

    def begin(self, vectors: Vectors, outs: Vectors, step: int) -> None:  # noqa: B027 - most exchange in `mix` alone
        """Says that `mix` comes next, with these arguments, so that the exchange may go on behind what is between.

        Until then `vectors` stay as they are, and `outs` may be written to at any moment. What goes wrong is raised by
        `mix`. Not collective: nodes that begin and nodes that do not go together.
        """

    def settle(self) -> None:  # noqa: B027 - as `begin`
        """Returns when nothing is under way that `begin` has started; `vectors` may change from then on.

        What came of it is kept for `mix`.
        """

    def check_average(self, vector: torch.Tensor) -> None:  # noqa: B027 - most can average all vectors
        """Raises `UnsupportedError` if nodes cannot average vectors of this kind; asked before the first step."""

    @abstractmethod
    def average(self, vector: torch.Tensor) -> Traffic:
        """Replaces `vector` by the mean over all nodes, which has the same bits on each.

        Returns:
            What crossed the node's boundary.

        Raises:
            IslandLostError: a node did not come in time.
        """

    @property
    def averaged_over(self) -> tuple[int, ...]:
        """The nodes in the last `average`, in order."""
        return tuple(range(self.num_nodes))

    def published(self) -> Published:
        """Where this node leaves its model for the others to take, and takes theirs, without anybody waiting.

        Collective over the nodes, as connections may have to be made; then nothing more is. Call it once. A node that
        `is_returning` connects to the neighbours that are there.

        Raises:
            UnsupportedError: the transport has no such thing.
        """
        raise UnsupportedError(
            f"{type(self).__name__} lets nodes take nothing from each other unasked; choose a method in which "
            "neighbours meet (swarm-sgd: blocking=True)"
        )

    @abstractmethod
    def share(self, topic: str, record: Record) -> list[Record]:
        """Shows all nodes a small record.

        Args:
            topic: what it is about; the n-th call with a topic goes with the others' n-th.
            record: anything that JSON holds.

        Returns:
            The records of all nodes, in their order.

        Raises:
            PayloadError: a record is longer than `MAX_RECORD_BYTES`, or what another node shows is none.
            IslandLostError: a node did not come in time.
        """

    def offer(self, x: torch.Tensor, step: int) -> None:  # noqa: B027 - most transports have nobody come back
        """Lets a node that has come back begin where this one is: called at the beginning of every step.

        Args:
            x: this node's parameters, flat.
            step: the step that begins.
        """

    def enter(self, x: torch.Tensor) -> int:
        """Begins where the neighbours are, on a node that `is_returning`.

        Args:
            x: the parameters, flat, of the type that all nodes have; overwritten with the neighbours' mean.

        Returns:
            The step that this node is to take next.

        Raises:
            IslandLostError: no neighbour is there.
        """
        raise UnsupportedError(f"no node returns to {type(self).__name__}: start all nodes again")

    def recall(self, topic: str) -> list[Record]:
        """What other nodes showed in their last `share` of a topic, in their order, without waiting for any.

        This node's next `share` then goes with their next.
        """
        return []

    def life(self, peer: int) -> str | None:
        """Tells the connection to a neighbour from earlier and later ones, at both its ends; None: it is lost."""
        return ""

    def rekey(self) -> None:
        """Has the next exchange depend on nothing that was exchanged before: called on all nodes at the same step."""
        if self.coding is not None:
            self.coding.rekey()

    def take_news(self) -> list[str]:
        """What happened to neighbours since the last call, a line each."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Lets go of the others at once, so that none waits for this node; may be called more than once."""


_workspace = Workspace()


class MemoryGraph:
    """The shared ground of nodes that are threads of one process; `node(i)` gives each its end."""

    def __init__(self, topology: Topology, timeout: float = 60.0) -> None:
        """
        Args:
            topology: who averages with whom.
            timeout: seconds that a node waits for the others.
        """
        self.topology = topology
        self.num_nodes = topology.num_nodes
        self.swaps = Swaps(self.num_nodes, timeout, "node")
        self.all_versioned = [VersionedBuffer() for _ in range(self.num_nodes)]

    def node(self, number: int) -> MemoryNeighbours:
        """Returns the end of node `number`, from 0."""
        if not 0 <= number < self.num_nodes:
            raise ConfigError(
                f"node {number}: {self.topology.name} has nodes 0 to {self.num_nodes - 1}; give one of them"
            )
        return MemoryNeighbours(self, number)


class MemoryNeighbours(Neighbours):
    """One thread's end. Nothing is sent, nor copied: nodes read each other's vectors; bytes count as if sent."""

    def __init__(self, graph: MemoryGraph, node: int) -> None:
        self._graph = graph
        self.node = node
        self.num_nodes = graph.num_nodes
        self.topology = graph.topology

    def swap(self, pieces: Sequence[Piece]) -> Traffic:
        with self._shown([piece.give(slot) for slot, piece in enumerate(pieces)]) as given:
            for number, piece in enumerate(pieces):
                piece.finish({peer: given[peer][number][self.node] for peer in piece.bytes_from})
        return Traffic(
            sum(sum(piece.bytes_to.values()) for piece in pieces),
            sum(sum(piece.bytes_from.values()) for piece in pieces),
        )

    def average(self, vector: torch.Tensor) -> Traffic:
        mean = _workspace.take("mean", vector.numel(), vector.dtype, vector.device)
        with self._shown(vector) as given:
            mean_(mean, given)
        vector.copy_(mean)
        num_bytes = 2 * (self.num_nodes - 1) * vector.numel() * vector.itemsize // self.num_nodes
        return Traffic(num_bytes, num_bytes)  # as an all-reduce in a ring, or a reduce-scatter and an all-gather

    def share(self, topic: str, record: Record) -> list[Record]:
        with self._shown(pack_record(topic, record)) as packed:
            return [unpack_record(topic, node, one) for node, one in enumerate(packed)]

    def published(self) -> MemoryPublished:
        if self.coding is not None:
            self.coding.refuse_published()
        return MemoryPublished(self._graph.all_versioned, self.node)

    def close(self) -> None:
        self._graph.swaps.leave(self.node)

    @contextmanager
    def _shown(self, given: Any) -> Iterator[list[Any]]:
        """What all nodes show, this one `given`; once all have read, vectors may change."""
        yield self._graph.swaps.swap(self.node, given)
        self._graph.swaps.swap(self.node, None)
