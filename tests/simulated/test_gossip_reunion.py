"""Nodes that all go on, but whose connections break, or that return at the same time; here each is a thread."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from hf_diloco.gossip.averages import mix_
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.methods.topology import Topology, make_topology
from hf_diloco.store.rendezvous import GONE_SECONDS
from hf_diloco.transport import meeting
from tests.clocks import LONG
from tests.gossip_meshes import join
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64


class Nodes:
    """All nodes of a graph, in step, to the end that node 0 decides on.

    Attributes:
        lacks: of each node at the beginning of each step, the neighbours to whom it has no edge.
        news: of each node.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lacks: dict[tuple[int, int], set[int]] = {}
        self.news: dict[int, list[str]] = {node: [] for node in range(topology.num_nodes)}
        self._store = KeptStore()
        self._x: dict[tuple[int, int], torch.Tensor] = {}
        self._out: dict[tuple[int, int], torch.Tensor] = {}
        self._had_trouble = threading.Event()
        self._is_whole = dict.fromkeys(range(topology.num_nodes), False)
        self._last: int | None = None
        self._ended = threading.Barrier(topology.num_nodes)
        self._joined: dict[int, MeshNeighbours] = {}

    def join(self, node: int) -> MeshNeighbours:
        self._joined[node] = join(self._store, self.topology, node)
        return self._joined[node]

    def run(self, live: Callable[[int], MeshNeighbours]) -> None:
        """`live` takes a node to the end; none leaves before all are there."""

        def run(node: int) -> None:
            try:
                neighbours = live(node)
                self._ended.wait(LONG)
                neighbours.close()
            except BaseException:
                self._ended.abort()
                if node in self._joined:
                    self._joined[node].close()  # or the others would wait for it
                raise

        run_islands(self.topology.num_nodes, run, timeout=3 * LONG)

    def step(self, neighbours: MeshNeighbours, x: torch.Tensor, step: int) -> torch.Tensor:
        """Takes a moment, as a gradient does."""
        time.sleep(0.005)
        node = neighbours.node
        neighbours.offer(x, step)
        self.lacks[node, step] = before = _lacked(neighbours)
        neighbours.mix([x], [out := torch.empty_like(x)], step)
        self._x[node, step] = x
        if _lacked(neighbours) == before:  # or else somebody was lost on the way
            self._out[node, step] = out
        self.news[node] += neighbours.take_events()
        self._is_whole[node] = self._had_trouble.is_set() and not neighbours.lost
        return out + 0.001 * node

    def trouble(self) -> None:
        """From now on: when all edges are there again, some further steps, and the end."""
        self._had_trouble.set()

    def go_on(self, neighbours: MeshNeighbours, x: torch.Tensor, step: int) -> MeshNeighbours:
        """To the end."""
        deadline = time.monotonic() + LONG
        while self._last is None or step < self._last:
            assert time.monotonic() < deadline, f"node {neighbours.node} lacks {neighbours.lost}; all: {self.news}"
            x = self.step(neighbours, x, step)
            step += 1
            if neighbours.node == 0 and self._last is None and all(self._is_whole.values()):
                self._last = step + 2 * self.topology.num_nodes  # others may be that far
        assert not neighbours.lost
        return neighbours

    def check_averages(self) -> None:
        """Each is over those to whom there was an edge, bit for bit."""
        for (node, step), out in self._out.items():
            weights = self.topology.weights(step)[node]
            peers = [peer for peer in self.topology.neighbours(node, step) if peer not in self.lacks[node, step]]
            expected = torch.empty(SIZE)
            mix_(expected, self._x[node, step], [(float(weights[peer]), self._x[peer, step]) for peer in peers])
            assert torch.equal(out, expected), (node, step)

    def steps_without(self, node: int, peer: int) -> list[int]:
        return sorted(step for (one, step), lacked in self.lacks.items() if one == node and peer in lacked)

    def check_pair(self, one: int, other: int) -> int:
        """Both had the edge again from the same step on, which is returned."""
        steps, others = self.steps_without(one, other), self.steps_without(other, one)
        assert steps, "they were apart"
        assert others
        assert steps[-1] == others[-1], (steps, others)
        assert steps == list(range(steps[0], steps[-1] + 1)), "for one time"
        return steps[-1] + 1


def _lacked(neighbours: MeshNeighbours) -> set[int]:
    return {peer for peer in neighbours.peers if peer not in neighbours._edges}


def give_up(neighbours: MeshNeighbours, peer: int) -> None:
    """As for one that is late; which then finds its connection broken."""
    neighbours._edges.pop(peer).close()
    neighbours._lose(peer, "it was late")


def start(node: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(node))


@pytest.mark.parametrize("graph", ["ring", "exponential", "one-peer-exponential", "full"])
def test_a_connection_that_breaks_is_made_again(graph: str) -> None:
    """Both ends go on without each other, and from a step on with each other: nobody is started again."""
    nodes, one, other = Nodes(make_topology(graph, 4)), 1, 2

    def live(node: int) -> MeshNeighbours:
        neighbours, x = nodes.join(node), start(node)
        for step in range(4):
            if node == one and step == 2:
                give_up(neighbours, other)
                nodes.trouble()
            x = nodes.step(neighbours, x, step)
        return nodes.go_on(neighbours, x, 4)

    nodes.run(live)
    nodes.check_averages()
    again = nodes.check_pair(one, other)
    for node, peer, reason in (one, other, "it was late"), (other, one, "its connection broke"):
        assert nodes.news[node] == [
            f"node {peer} was lost ({reason}): its weight stays with this node until it returns",
            f"node {peer} is connected again: it takes part from step {again} on",
        ]
    assert nodes.news[0] == nodes.news[3] == []


def test_a_connection_is_made_again_when_the_own_address_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A VPN that goes down takes with it the address on which its node listens."""
    nodes, one, other = Nodes(make_topology("ring", 4)), 1, 2
    is_down, num_refused, listen = threading.Event(), 0, meeting._listen

    def listen_if_up(address: str) -> socket.socket:
        nonlocal num_refused
        if is_down.is_set() and num_refused < 3:
            num_refused += 1
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return listen(address)

    def live(node: int) -> MeshNeighbours:
        neighbours, x = nodes.join(node), start(node)
        for step in range(4):
            if node == one and step == 2:
                is_down.set()
                give_up(neighbours, other)
                nodes.trouble()
            x = nodes.step(neighbours, x, step)
        return nodes.go_on(neighbours, x, 4)

    monkeypatch.setattr(meeting, "_listen", listen_if_up)
    nodes.run(live)
    nodes.check_averages()
    nodes.check_pair(one, other)
    assert num_refused == 3


def cut_off_from_store(neighbours: MeshNeighbours, seconds: float) -> None:
    """For a while its store is at a port where nobody listens."""
    board, other = neighbours._board, KeptStore()
    back, board._store = board._store, other.client()
    del other  # which ends it
    threading.Timer(seconds, lambda: setattr(board, "_store", back)).start()


def lose_each_other_once(topology: str, one: int, other: int, trouble: Callable[[MeshNeighbours], None]) -> None:
    """Four nodes go on; one of them gives up another just after some trouble, and both meet again."""
    nodes = Nodes(make_topology(topology, 4))

    def live(node: int) -> MeshNeighbours:
        neighbours, x = nodes.join(node), start(node)
        for step in range(4):
            if node == one and step == 2:
                trouble(neighbours)
                give_up(neighbours, other)
                nodes.trouble()
            x = nodes.step(neighbours, x, step)
        return nodes.go_on(neighbours, x, 4)

    nodes.run(live)
    nodes.check_averages()
    nodes.check_pair(one, other)


def test_a_connection_is_made_again_when_the_rendezvous_answers_again() -> None:
    """What cuts off a neighbour may cut off the node that keeps the rendezvous as well."""
    lose_each_other_once("ring", 1, 2, lambda neighbours: cut_off_from_store(neighbours, 3 * GONE_SECONDS))


@pytest.mark.parametrize("which", ["_look", "connect"])
def test_a_connection_is_made_again_when_threads_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    num_refused, start_thread = 0, threading.Thread.start

    def start_unless_full(thread: threading.Thread) -> None:
        nonlocal num_refused
        run = getattr(thread, "_target", None)
        if thread.name == "hf-diloco-returns" and run and run.__name__ == which and num_refused < 2:
            num_refused += 1
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    def fill(_: MeshNeighbours) -> None:
        monkeypatch.setattr(threading.Thread, "start", start_unless_full)

    lose_each_other_once("ring", 1, 2, fill)
    assert num_refused == 2


def test_a_connection_that_breaks_twice_is_made_again_after_a_rest() -> None:
    nodes, one, other = Nodes(make_topology("ring", 3)), 0, 2

    def live(node: int) -> MeshNeighbours:
        neighbours, x, num_broken, step = nodes.join(node), start(node), 0, 0
        while node == one and num_broken < 3:
            if step and other in neighbours._edges:  # after a step all have joined
                give_up(neighbours, other)
                num_broken += 1
            x = nodes.step(neighbours, x, step)
            step += 1
        if node == one:
            nodes.trouble()
        return nodes.go_on(neighbours, x, step)

    begun = time.monotonic()
    nodes.run(live)
    nodes.check_averages()
    assert time.monotonic() - begun > 1 + 2, "rests of one and of two seconds"
    assert sum("is connected again" in line for line in nodes.news[one]) == 3
    assert sum("is connected again" in line for line in nodes.news[other]) == 3


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([2, 3, 4], marks=pytest.mark.slow),
        [3, 2, 4],
        pytest.param([3, 4, 2], marks=pytest.mark.slow),
        pytest.param([4, 3, 2], marks=pytest.mark.slow),
    ],
)
def test_three_in_a_row_return_together(order: list[int]) -> None:
    """They were on one machine. Who is between two others has nobody to begin with until one of them is in."""
    nodes = Nodes(make_topology("ring", 6))
    all_left = threading.Barrier(len(order))
    has_come: dict[int, threading.Event] = {node: threading.Event() for node in order}

    def live(node: int) -> MeshNeighbours:
        neighbours, x = nodes.join(node), start(node)
        for step in range(3):
            x = nodes.step(neighbours, x, step)
        if node not in order:
            return nodes.go_on(neighbours, x, 3)
        neighbours.close()
        all_left.wait(LONG)
        place = order.index(node)
        if place:
            has_come[order[place - 1]].wait(LONG)
        threading.Timer(0.2, has_come[node].set).start()
        neighbours = nodes.join(node)
        assert neighbours.is_returning
        step = neighbours.enter(x)
        nodes.trouble()
        return nodes.go_on(neighbours, x, step)

    nodes.run(live)
    nodes.check_averages()
    for node in range(6):
        assert not nodes.lacks[node, max(step for one, step in nodes.lacks if one == node)]


def test_two_with_the_same_neighbours_return_together() -> None:
    """Each neighbour gives to one after the other: all in the same order, where both enter at the same step."""
    nodes, leavers = Nodes(make_topology("full", 5)), (1, 3)
    all_left = threading.Barrier(len(leavers))

    def live(node: int) -> MeshNeighbours:
        neighbours, x = nodes.join(node), start(node)
        for step in range(3):
            x = nodes.step(neighbours, x, step)
        if node not in leavers:
            return nodes.go_on(neighbours, x, 3)
        neighbours.close()
        all_left.wait(LONG)
        neighbours = nodes.join(node)
        step = neighbours.enter(x)
        nodes.trouble()
        return nodes.go_on(neighbours, x, step)

    nodes.run(live)
    nodes.check_averages()


def test_nodes_that_wait_for_nobody_are_connected_again() -> None:
    """Where each takes what others published: links are made again, too."""
    nodes, one, other = Nodes(make_topology("ring", 3)), 0, 2
    newest: dict[tuple[int, int], int] = {}  # what a node took from another one: the step that it was at
    satisfied: set[int] = set()

    def live(node: int) -> MeshNeighbours:
        neighbours, step = nodes.join(node), 0
        published = neighbours.published()
        deadline = time.monotonic() + LONG
        before: dict[int, int] = {}
        while len(satisfied) < 3:
            assert time.monotonic() < deadline, nodes.news
            time.sleep(0.002)
            neighbours.offer(torch.zeros(SIZE), step)
            published.publish(torch.tensor([step]).view(torch.uint8))
            for peer in neighbours.peers:
                payload, _ = published.pull(peer)
                if payload is not None:
                    newest[node, peer] = int(payload.view(torch.int64))
            if node == one and step == 10:
                give_up(neighbours, other)
            nodes.news[node] += neighbours.take_events()
            if node not in (one, other) or "is connected again" in "".join(nodes.news[node]):
                before = before or {peer: newest.get((node, peer), 0) for peer in neighbours.peers}
                if all(newest.get((node, peer), -1) > before[peer] for peer in neighbours.peers):
                    satisfied.add(node)
            step += 1
        assert not neighbours.lost
        return neighbours

    nodes.run(live)
    assert [line.split(" (")[0] for line in nodes.news[one]][:1] == [f"node {other} was lost"]
    assert [line.split(" (")[0] for line in nodes.news[other]][:1] == [f"node {one} was lost"]
    assert nodes.news[1] == []


def test_one_that_makes_no_sense_keeps_nobody_else_apart() -> None:
    senseless = 0

    def throw_rubbish(neighbours: MeshNeighbours) -> None:
        neighbours._members.log.store.put(f"heartbeats/{senseless}/000002.json", b"rubbish")
        neighbours._reception.look_for([senseless])

    lose_each_other_once("full", 1, 2, throw_rubbish)
