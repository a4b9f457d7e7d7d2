"""A node of the graph as its ranks see it: the leader talks to the neighbours, and all get what it got."""

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
from hf_diloco.membership.heartbeats import Members, Standing
from hf_diloco.membership.member_records import Phase
from hf_diloco.methods.topology import Topology
from hf_diloco.transport.base import Traffic
from hf_diloco.utils.workspace import Workspace

T = TypeVar("T")


class CommonEnd:
    """When nodes end that were asked to: all after the same step, so that their checkpoints belong together.

    Nodes that wait for their neighbours are never farther apart than the graph's diameter, but each hears of a wish at
    another step. So with each exchange goes one value, which is 0 until somebody wishes to end. It is raised only in
    the first exchange of a window, which has as many as there are nodes, or more on some graphs that change; averaging
    carries it to all nodes within the window; and all end with it.

    Args:
        topology: over which the wish spreads.
        steps_each: optimizer steps from one exchange to the next.
    """

    def __init__(self, topology: Topology, steps_each: int = 1) -> None:
        self.window = max(topology.num_nodes, topology.steps_to_all())
        self._steps_each = steps_each
        self._is_wished = False
        self._is_known = False

    def wish(self) -> None:
        """This node was asked to end."""
        self._is_wished = True

    def value(self, number: int) -> float:
        """What goes with an exchange, from 0: 1 if the end is near, else 0."""
        if self._is_wished and number % self.window == 0:
            self._is_known = True
        return float(self._is_known)

    def note(self, mixed: torch.Tensor) -> None:
        """What came out where nodes' values were averaged: any of them raises it above 0."""
        self._is_known |= bool(mixed.item() > 0)

    def has_come(self, num_steps: int) -> bool:
        """Whether all nodes end now, having taken so many steps."""
        return self._is_known and num_steps % (self.window * self._steps_each) == 0


@dataclass(frozen=True)
class _Mix:
    """One `mix`, with the wish to end.

    Attributes:
        step: as its caller gave it.
        outs: likewise, and what comes of the wish.
        given: vectors and wish where the leader's neighbours read them: copies in host memory, if need be.
        taken: where they write: `outs`, or likewise.
    """

    step: int
    outs: list[torch.Tensor]
    given: list[torch.Tensor]
    taken: list[torch.Tensor]


class NodeNeighbours(Neighbours):
    """The neighbours of a node that may have several ranks, with equal parameters, on any device.

    Counts what was exchanged and how long it took, and carries the wish to end (see `CommonEnd`) with every exchange.

    What `begin` starts goes on in a thread while the node computes: vectors of a device are copied to the host before.
    All other calls wait until nothing is under way, but `close`, which ends it. Where nodes are threads of one process
    nothing begins before `mix`, nor does it on a node that is alone.

    Args:
        inner: the leader's neighbours; None on the other ranks.
        topology: the graph.
        node: this node's number.
        island: the ranks of this node.
        turns: of nodes that are threads of one process, one of which computes at a time; None: it has its own.
        members: the leader's, if it gives signs of life.

    Attributes:
        end: when this node ends, if it was asked to.
        standing: what this node's signs of life say; its `steps` are set by who counts them.
        seconds: that the node stood still for exchanges so far.
        seconds_hidden: that exchanges took behind the node's computation so far; on the leader.
        total: what they moved so far, on this rank.
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
        self.standing = members.standing if members else Standing()
        self.standing.num_ranks = island.size

    def stand(self, phase: Phase) -> None:
        """What this node's signs of life say from now on."""
        if self._members:
            self._members.stand(phase)

    def begin(self, vectors: Vectors, outs: Vectors, step: int) -> None:
        inner = self._inner
        if inner is None or not inner.is_on_host or self._turns is not None:
            return
        assert self._begun is None, "what has begun is mixed before the next begins"
        with self._clock():
            begun = self._begun = self._prepare(vectors, outs, step)
            self._ahead.start(lambda: inner.mix(begun.given, begun.taken, step))

    def settle(self) -> None:
        self._ahead.settle()

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        begun, self._begun = self._begun, None
        if begun is not None:
            is_it = topology is None and begun.step == step and all(map(operator.is_, begun.outs, outs))
            assert is_it, "this is not what has begun"
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
        """Carries the wish to end where a method averages over all nodes, and not with its neighbours."""
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
        """As `Neighbours.enter`. Collective over the ranks of the node."""
        step = self._on_leader(lambda inner: inner.enter(x))
        if self._island.size > 1:
            dist.broadcast(x, 0)
        self.is_returning = False
        return step

    def rekey(self) -> None:
        if self._inner is not None:
            self._inner.rekey()

    def take_news(self) -> list[str]:
        """What happened to neighbours since the last call, a line each; on the leader."""
        return self._inner.take_news() if self._inner is not None else []

    def close(self) -> None:
        if self._leaders is not None:
            self._leaders.close()  # which ends what is under way
        self._ahead.close()
        self._begun = None

    @property
    def _inner(self) -> Neighbours | None:
        """The leader's neighbours, when nothing is under way."""
        self._ahead.settle()
        return self._leaders

    def _on_leader(self, call: Callable[[Neighbours], T]) -> T:
        """What the leader's neighbours say, on all ranks. Other nodes of this process compute meanwhile."""

        def run() -> T:
            assert self._inner is not None
            with self._waiting():
                return call(self._inner)

        return self._island.on_leader(run)

    def _waiting(self) -> AbstractContextManager[None]:
        """Other nodes of this process compute inside."""
        return self._turns.others() if self._turns is not None else nullcontext()

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Counts the seconds inside."""
        begin = time.monotonic()
        yield
        self.seconds += time.monotonic() - begin

    def _exchange(self, exchange: Callable[[Neighbours], Traffic], outs: Vectors) -> Traffic:
        def run(inner: Neighbours) -> list[int]:
            traffic = exchange(inner)
            return [traffic.bytes_sent, traffic.bytes_received]

        moved = self._on_leader(run)
        if self._island.size > 1:
            for out in outs:
                dist.broadcast(out, 0)
        traffic = Traffic(*moved) if self._island.is_leader else Traffic()
        self.total += traffic
        return traffic

    def _prepare(self, vectors: Vectors, outs: Vectors, step: int) -> _Mix:
        """Adds the wish, and takes to the host what must be there."""
        wish, mixed = self._wish(vectors[0], step)
        given, taken = [*vectors, wish], [*outs, mixed]
        if self._leaders is None or not self._leaders.is_on_host:
            return _Mix(step, taken, given, taken)
        return _Mix(step, taken, self._on_host("given", given), self._room_on_host("taken", taken))

    def _wish(self, like: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One value to give, and room for what comes of it."""
        wish, mixed = (self._buffers.take(name, 1, like.dtype, like.device) for name in ("wish", "mixed"))
        return wish.fill_(self.end.value(step)), mixed

    def _on_host(self, name: str, vectors: Vectors) -> list[torch.Tensor]:
        """The vectors, or copies in host memory."""
        hosts = self._room_on_host(name, vectors)
        copy_all([(host, vector) for host, vector in zip(hosts, vectors, strict=True) if host is not vector])
        return hosts

    def _room_on_host(self, name: str, vectors: Vectors) -> list[torch.Tensor]:
        """The vectors, or buffers of their sizes in host memory."""
        cpu = torch.device("cpu")
        return [
            vector
            if vector.device.type == "cpu"
            else page_lock(self._buffers.take(f"{name}{number}", vector.numel(), vector.dtype, cpu))
            for number, vector in enumerate(vectors)
        ]
