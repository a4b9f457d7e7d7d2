"""One node's end of a graph: averages its vectors with those of its neighbours.

Transports differ in how they move bytes, not in the results. All use `mix_`: the same operations on every node, in
the order of the nodes' numbers. So nodes that are threads of one process get the same bits as nodes in processes of
their own.
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
    """A piece of the data that neighbours swap in an exchange; both ends of an edge have the same order of pieces.

    Attributes:
        bytes_to, bytes_from: bytes sent to each receiver, and received from each neighbour, in the order of their
            numbers; both ends know them.
    """

    bytes_to: Mapping[int, int]
    bytes_from: Mapping[int, int]

    @abstractmethod
    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        """Returns the data for each receiver: uint8, 1-D, contiguous; it must not change until `finish` is called.

        `slot` differs from the slots of all other pieces in flight; from 0, below the number of pieces.
        """

    @abstractmethod
    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        """Uses the data, uint8, from each neighbour that is not lost, and does not modify it.

        Pieces finish in their order, each after its `give`.
        """


class MixedPiece(Piece):
    """An unencoded piece of one vector: sends `own` to the receivers, and writes the result of `mix_` to `out`."""

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
    """A node's interface to the others. Unless a method says otherwise, it is collective over the nodes, and blocks.

    Vectors are 1-D, contiguous, fp32 or fp64, of equal length on all nodes. An error in an exchange leaves the outputs
    undefined, and ends this node's run.

    Attributes:
        node: this node's number, from 0.
        is_on_host: whether vectors must be in host memory.
        is_returning: whether this node restarts while the others go on without it: call `enter` before the first step.
        coding: compresses the vectors that `mix` moves; None: vectors travel unencoded.
    """

    coding: Differences | None = None
    is_on_host: bool = False
    is_returning: bool = False
    node: int
    num_nodes: int
    topology: Topology

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        """Writes Σ_j w_ij(step) vector_j to `outs`; all vectors of a step travel together. Returns the node's traffic.

        Args:
            vectors: this node's vectors; not modified.
            outs: one for each vector, of its size; they must not overlap `vectors`.
            step: from 0; selects the weights, on a graph that changes.
            topology: supplies the weights, the same on all nodes; its edges must be edges of `self.topology`, which is
                the default.

        Raises:
            IslandLostError: a node did not answer within the timeout.
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
            # Whole blocks of `mix_`, so that results do not depend on the cuts.
            cut = zip(own.split(size), out.split(size), strict=True)
            pieces += (MixedPiece(weights, receivers, *pair) for pair in cut)
        return self.swap(pieces)

    def swap(self, pieces: Sequence[Piece]) -> Traffic:
        """Sends pieces to receivers, and receives those of neighbours; returns this node's traffic.

        Raises like `mix`, which is built on it, and `UnsupportedError` if the transport does not support pieces.
        """
        raise UnsupportedError(f"{type(self).__name__} moves vectors as they are only: set payload to fp32")

    def begin(self, vectors: Vectors, outs: Vectors, step: int) -> None:  # noqa: B027 - most exchange in `mix` alone
        """Announces a call of `mix` with these arguments, so that the exchange may run in the background until then.

        Until that call `vectors` must not change, and `outs` may be written at any moment. `mix` raises any error.
        Not collective.
        """

    def drain(self) -> None:  # noqa: B027 - as `begin`
        """Waits until `vectors` of `begin` may change again; the outcome is kept for `mix`."""

    def check_average(self, vector: torch.Tensor) -> None:  # noqa: B027 - most can average all vectors
        """Raises `UnsupportedError` if nodes cannot average vectors of this kind; called before the first step."""

    @abstractmethod
    def average(self, vector: torch.Tensor) -> Traffic:
        """Replaces `vector` by the mean over all nodes, bit-identical on each; returns this node's traffic.

        Raises:
            IslandLostError: a node did not answer within the timeout.
        """

    @property
    def averaged_over(self) -> tuple[int, ...]:
        """The nodes that took part in the last `average`, in order."""
        return tuple(range(self.num_nodes))

    def published(self) -> Published:
        """Returns the object through which this node publishes its model, and reads the others', without waiting.

        Only this call is collective, as it may open connections. Call it once. A node that `is_returning` connects to
        the neighbours that are running.

        Raises:
            UnsupportedError: the transport does not support publishing.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not support publishing; choose a method in which "
            "neighbours meet (swarm-sgd: blocking=True)"
        )

    @abstractmethod
    def share(self, topic: str, record: Record) -> list[Record]:
        """Shares a small record with all nodes; returns the records of all, in their order.

        Args:
            topic: the record's subject; the n-th call with a topic is matched with the others' n-th.
            record: anything that JSON holds.

        Raises:
            PayloadError: a record is longer than `MAX_RECORD_BYTES`, or another node's record is invalid.
            IslandLostError: a node did not answer within the timeout.
        """

    def offer(self, x: torch.Tensor, step: int) -> None:  # noqa: B027 - in most transports no node is restarted
        """Lets a restarted neighbour enter with this node's parameters `x`, flat. Called when a step begins."""

    def enter(self, x: torch.Tensor) -> int:
        """Overwrites the flat parameters `x` with the neighbours' mean, on a node that `is_returning`.

        Returns the step that this node takes next.

        Raises:
            IslandLostError: no neighbour is running.
        """
        raise UnsupportedError(f"no node returns to {type(self).__name__}: start all nodes again")

    def recall(self, topic: str) -> list[Record]:
        """Returns the records of other nodes' last `share` of a topic, in their order, without waiting.

        This node's next `share` is then matched with their next.
        """
        return []

    def life(self, peer: int) -> str | None:
        """Identifies the current connection to a neighbour; the same at both ends. None: the neighbour is lost."""
        return ""

    def rekey(self) -> None:
        """Makes the next exchange independent of all earlier ones; called on all nodes at the same step."""
        if self.coding is not None:
            self.coding.rekey()

    def take_events(self) -> list[str]:
        """Returns what happened to neighbours since the last call, one line for each event."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Disconnects at once, so that no node waits for this one; may be called more than once."""


_workspace = Workspace()


class MemoryGraph:
    """Connects nodes that are threads of one process; `node(i)` returns each node's end.

    A node waits for the others for `timeout` seconds.
    """

    def __init__(self, topology: Topology, timeout: float = 60.0) -> None:
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
    """One thread's end. Nodes read each other's vectors without copying or sending them; bytes count as if sent."""

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
        """Yields the values that all nodes give, `given` of this one. On exit waits until all nodes have read them."""
        yield self._graph.swaps.swap(self.node, given)
        self._graph.swaps.swap(self.node, None)
