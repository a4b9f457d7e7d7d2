"""A node of the graph as its ranks see it: the leader exchanges with the neighbours, and all ranks get its results."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.published import Published
from hf_diloco.gossip.records import Record
from hf_diloco.gossip.threads import Ahead, Turns
from hf_diloco.inner.device_copies import copy_all, page_lock
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.heartbeats import Members, MemberStatus
from hf_diloco.membership.member_records import Phase
from hf_diloco.methods.topology import Topology
from hf_diloco.transport.base import Traffic
from hf_diloco.utils.workspace import Workspace

T = TypeVar("T")


class CommonEnd:
    """Stops all nodes after the same step once one is asked to stop, so that their checkpoints belong together.

    Nodes that wait for their neighbours are never farther apart than the graph's diameter, but each learns of a stop
    request at a different step. So each exchange carries one value, which is 0 until a node wishes to end. A node
    raises it only in the first exchange of a window. A window has as many exchanges as there are nodes, or more on
    some graphs that change; within it, averaging carries the value to all nodes, and all stop at its end.

    `steps_each` are the optimizer steps from one exchange to the next.
    """

    def __init__(self, topology: Topology, steps_each: int = 1) -> None:
        self.window = max(topology.num_nodes, topology.steps_to_all())
        self._steps_each = steps_each
        self._is_wished = False
        self._is_known = False

    def wish(self) -> None:
        """Records that this node was asked to stop."""
        self._is_wished = True

    def value(self, number: int) -> float:
        """Returns the value that exchange `number`, from 0, carries: 1 if nodes stop at the window's end, else 0."""
        if self._is_wished and number % self.window == 0:
            self._is_known = True
        return float(self._is_known)

    def note(self, mixed: torch.Tensor) -> None:
        """Reads the average of the nodes' values: above 0 if any of them was 1."""
        self._is_known |= bool(mixed.item() > 0)

    def has_come(self, num_steps: int) -> bool:
        """Whether all nodes stop now, after `num_steps` steps."""
        return self._is_known and num_steps % (self.window * self._steps_each) == 0


@dataclass(frozen=True)
class _Mix:
    """The arguments of one `mix`, each with the value of the stop request at its end.

    Attributes:
        given: vectors as the leader's neighbours read them; copies in host memory if needed.
        taken: outputs to which the leader's neighbours write: `outs`, or buffers in host memory if needed.
    """

    step: int
    outs: list[torch.Tensor]
    given: list[torch.Tensor]
    taken: list[torch.Tensor]


class NodeNeighbours(Neighbours):
    """The neighbours of a node that may have several ranks, with equal parameters, on any device.

    Measures traffic and time of exchanges, and sends the stop request (see `CommonEnd`) with every exchange.

    The exchange that `begin` starts runs in a thread while the node computes; vectors on a device are copied to the
    host first. All other calls wait until nothing is in flight, except `close`, which ends an exchange in flight. If
    nodes are threads of one process, or a node is alone, `begin` is a no-op, and `mix` does all the work.

    Args:
        inner: the leader's neighbours; None on the other ranks.
        island: the ranks of this node.
        turns: shared by nodes that are threads of one process, so that one computes at a time.
        members: the leader's, if it sends heartbeats.

    Attributes:
        standing: the contents of this node's heartbeats; whoever counts steps sets `steps`.
        seconds: seconds that this node has waited for exchanges so far.
        seconds_hidden: seconds that exchanges ran in the background of the node's computation so far; on the leader.
        total: traffic of all exchanges so far, on this rank.
    """

    def __init__(
        self,
        inner: Neighbours | None,
        topology: Topology,
        node: int,
        island: IslandGroup,
        turns: Turns | None = None,
        members: Members | None = None,
    ) -> None:
        self._leaders = inner
        self._ahead = Ahead()
        self._begun: _Mix | None = None
        self._island = island
        self._turns = turns
        self._buffers = Workspace()
        self.topology = topology
        self.node = node
        self.num_nodes = topology.num_nodes
        self.end = CommonEnd(topology)
        self.seconds = 0.0
        self.seconds_hidden = 0.0
        self.total = Traffic()
        self.is_returning = island.on_leader(lambda: inner is not None and inner.is_returning)
        self._members = members
        self.standing = members.standing if members else MemberStatus()
        self.standing.num_ranks = island.size

    def set_phase(self, phase: Phase) -> None:
        if self._members:
            self._members.set_phase(phase)

    def begin(self, vectors: Vectors, outs: Vectors, step: int) -> None:
        inner = self._inner
        if inner is None or not inner.is_on_host or self._turns is not None:
            return
        assert self._begun is None, "mix the exchange that has begun before the next begins"
        with self._clock():
            begun = self._begun = self._prepare(vectors, outs, step)
            self._ahead.start(lambda: inner.mix(begun.given, begun.taken, step))

    def drain(self) -> None:
        self._ahead.drain()

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        begun, self._begun = self._begun, None
        if begun is not None:
            is_it = topology is None and begun.step == step and all(map(operator.is_, begun.outs, outs))
            assert is_it, "another exchange has begun"
        with self._clock():
            mix = begun or self._prepare(vectors, outs, step)

            def exchange(inner: Neighbours) -> Traffic:
                if begun:
                    traffic, hidden = self._ahead.take()
                    self.seconds_hidden += hidden
                else:
                    traffic = inner.mix(mix.given, mix.taken, step, topology=topology)
                copy_all([(out, host) for host, out in zip(mix.taken, mix.outs, strict=True) if host is not out])
                return traffic

            traffic = self._exchange(exchange, mix.outs)
        self.end.note(mix.outs[-1])
        return traffic

    def check_average(self, vector: torch.Tensor) -> None:
        self._on_leader(lambda inner: inner.check_average(vector))

    def average(self, vector: torch.Tensor) -> Traffic:
        def exchange(inner: Neighbours) -> Traffic:
            if not inner.is_on_host or vector.device.type == "cpu":
                return inner.average(vector)
            (host,) = self._on_host("given", [vector])
            traffic = inner.average(host)
            copy_all([(vector, host)])
            return traffic

        with self._clock():
            return self._exchange(exchange, [vector])

    @property
    def averaged_over(self) -> tuple[int, ...]:
        return super().averaged_over if self._leaders is None else self._leaders.averaged_over

    def spread_wish(self, like: torch.Tensor) -> None:
        """Spreads the stop request, for a method that averages over all nodes and not with neighbours."""
        wish, _ = self._wish(like, self.standing.steps)
        self.average(wish)
        self.end.note(wish)

    def published(self) -> Published:
        inner = self._inner
        if inner is None or self._island.size > 1:
            return super().published()
        with self._waiting():
            return inner.published()

    def share(self, topic: str, record: Record) -> list[Record]:
        return self._on_leader(lambda inner: inner.share(topic, record))

    def recall(self, topic: str) -> list[Record]:
        return self._on_leader(lambda inner: inner.recall(topic))

    def give_turn(self) -> None:
        """Lets other nodes of this process compute."""
        with self._waiting():
            pass

    def offer(self, x: torch.Tensor, step: int) -> None:
        if self._inner is not None:
            self._inner.offer(x, step)

    def enter(self, x: torch.Tensor) -> int:
        step = self._on_leader(lambda inner: inner.enter(x))
        self._broadcast([x])
        self.is_returning = False
        return step

    def rekey(self) -> None:
        if self._inner is not None:
            self._inner.rekey()

    def take_events(self) -> list[str]:
        return self._inner.take_events() if self._inner is not None else []

    def close(self) -> None:
        if self._leaders is not None:
            self._leaders.close()  # which ends an exchange in flight
        self._ahead.close()
        self._begun = None

    @property
    def _inner(self) -> Neighbours | None:
        """The leader's neighbours; waits until nothing is in flight."""
        self._ahead.drain()
        return self._leaders

    def _on_leader(self, call: Callable[[Neighbours], T]) -> T:
        """Calls the leader's neighbours; returns the result on all ranks. Other nodes of this process may compute."""

        def run() -> T:
            assert self._inner is not None
            with self._waiting():
                return call(self._inner)

        return self._island.on_leader(run)

    def _waiting(self) -> AbstractContextManager[None]:
        """A context inside which other nodes of this process may compute."""
        return self._turns.others() if self._turns is not None else nullcontext()

    @contextmanager
    def _clock(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds += time.monotonic() - begin

    def _exchange(self, exchange: Callable[[Neighbours], Traffic], outs: Vectors) -> Traffic:
        def run(inner: Neighbours) -> list[int]:
            traffic = exchange(inner)
            return [traffic.bytes_sent, traffic.bytes_received]

        moved = self._on_leader(run)
        self._broadcast(outs)
        traffic = Traffic(*moved) if self._island.is_leader else Traffic()
        self.total += traffic
        return traffic

    def _broadcast(self, vectors: Vectors) -> None:
        if self._island.size > 1:
            for vector in vectors:
                dist.broadcast(vector, 0)

    def _prepare(self, vectors: Vectors, outs: Vectors, step: int) -> _Mix:
        """Adds the stop request, and copies vectors to the host if the leader's neighbours need them there."""
        wish, mixed = self._wish(vectors[0], step)
        given, taken = [*vectors, wish], [*outs, mixed]
        if self._leaders is None or not self._leaders.is_on_host:
            return _Mix(step, taken, given, taken)
        return _Mix(step, taken, self._on_host("given", given), self._room_on_host("taken", taken))

    def _wish(self, like: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the value of the stop request to send, and a buffer for its average."""
        wish, mixed = (self._buffers.take(name, 1, like.dtype, like.device) for name in ("wish", "mixed"))
        return wish.fill_(self.end.value(step)), mixed

    def _on_host(self, name: str, vectors: Vectors) -> list[torch.Tensor]:
        """Returns each vector if it is in host memory, or a copy there."""
        hosts = self._room_on_host(name, vectors)
        copy_all([(host, vector) for host, vector in zip(hosts, vectors, strict=True) if host is not vector])
        return hosts

    def _room_on_host(self, name: str, vectors: Vectors) -> list[torch.Tensor]:
        """Returns each vector if it is in host memory, or a buffer of its size there."""
        cpu = torch.device("cpu")
        return [
            vector
            if vector.device.type == "cpu"
            else page_lock(self._buffers.take(f"{name}{number}", vector.numel(), vector.dtype, cpu))
            for number, vector in enumerate(vectors)
        ]
