"""Nodes that take what others published, and are lost and return meanwhile; here each is a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh import MeshNeighbours, average
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.published import Published
from hf_diloco.methods.topology import Topology, make_topology
from tests.clocks import LONG, wait_until
from tests.gossip_meshes import join
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 100
LEAVER = 1


def taken(published: Published, node: int) -> torch.Tensor | None:
    payload, _ = published.pull(node)
    return None if payload is None else payload.view(torch.float32).clone()


class Swarm:
    """Nodes that step as fast as they can, until they are told to end; one leaves and returns.

    Attributes:
        steps: of each node, so far.
        offered: a node's parameters at each step.
        seen: what a node took last from another one.
        news: of each node.
        averaged: the nodes in each average that was asked for.
    """

    def __init__(self, store: KeptStore, topology: Topology) -> None:
        num_nodes = topology.num_nodes
        self.topology = topology
        self.others = [node for node in range(num_nodes) if node != LEAVER]
        self.near = sorted({*topology.neighbours(LEAVER), *topology.receivers(LEAVER)})
        self.steps = dict.fromkeys(self.others, 0)
        self.offered: dict[tuple[int, int], torch.Tensor] = {}
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self.news: dict[int, list[str]] = {node: [] for node in self.others}
        self.averaged: dict[int, list[tuple[int, ...]]] = {node: [] for node in self.others}
        self._store = store
        self._num_averages = 0
        self._has_ended = threading.Event()
        self._left = threading.Barrier(num_nodes)

    def run(self, leave_and_return: Callable[[], MeshNeighbours]) -> None:
        """All nodes, the one that leaves among them; none goes before all have ended."""

        def run(node: int) -> None:
            try:
                neighbours = leave_and_return() if node == LEAVER else self._go_on(node)
                self._has_ended.set()
            except BaseException:
                self._has_ended.set()
                self._left.abort()
                raise
            with suppress(threading.BrokenBarrierError):  # the error that broke it is reported
                self._left.wait(LONG)
            neighbours.close()

        run_islands(self.topology.num_nodes, run, timeout=3 * LONG)

    def join(self) -> tuple[MeshNeighbours, MeshPublished]:
        """The one that leaves joins, for the first time or again."""
        neighbours = join(self._store, self.topology, LEAVER)
        published = neighbours.published()
        assert isinstance(published, MeshPublished)
        return neighbours, published

    def leave(self) -> None:
        """It joins, is lost, and its neighbours notice."""
        self.join()[0].close()
        self.await_loss(1)

    def await_loss(self, num_losses: int) -> None:
        """Returns when the neighbours know that a node has ended so many times."""
        ended = f"node {LEAVER} has ended: "
        for node in self.near:
            wait_until(lambda node=node: self.count(node, ended) == num_losses, f"node {node} notices")  # type: ignore[misc]

    def await_steps(self) -> None:
        """Returns when all others have taken further steps: nobody keeps them."""
        before = dict(self.steps)
        wait_until(lambda: all(self.steps[node] > before[node] + 3 for node in self.others), "the others go on")

    def ask_for_average(self) -> None:
        self._num_averages += 1

    def await_average(self, members: list[int]) -> None:
        wait_until(lambda: all(len(self.averaged[node]) == self._num_averages for node in self.others), "the average")
        assert {self.averaged[node][-1] for node in self.others} == {tuple(members)}

    def check_entry(self, x: torch.Tensor, step: int) -> None:
        """`x` is the mean of what neighbours gave, each at a step of its own."""
        last = f"node {LEAVER} has returned: it takes part from step "
        given = {}
        for node in self.near:
            lines = [line for line in self.news[node] if line.startswith(last)]
            given[node] = int(lines[-1].removeprefix(last).removesuffix(" on"))
        total = torch.zeros(SIZE)
        for node in self.near:
            total += self.offered[node, given[node]]
        assert torch.equal(x, total * (1 / len(self.near)))
        assert step == max(given.values())

    def check_pulls(self, published: Published, mark: float) -> None:
        """What either side publishes, the other one takes."""
        published.publish(torch.full((SIZE,), mark).view(torch.uint8))
        for node in self.near:
            before = max(0, self.steps[node] - 1)  # it may have yet to publish what it has counted
            wait_until(lambda node=node: self.last_seen(node) == mark, f"node {node} takes")  # type: ignore[misc]
            theirs = taken(published, node)
            assert theirs is not None
            assert any(torch.equal(theirs, self.offered[node, s]) for s in range(before, self.steps[node] + 1))

    def last_seen(self, node: int) -> float | None:
        """What a node took last from the one that returns, all of whose values are equal."""
        seen = self.seen.get((node, LEAVER))
        return None if seen is None else float(seen.unique().item())

    def count(self, node: int, beginning: str) -> int:
        return sum(line.startswith(beginning) for line in self.news[node])

    def _go_on(self, node: int) -> MeshNeighbours:
        neighbours = join(self._store, self.topology, node)
        published = neighbours.published()
        x = torch.full((SIZE,), float(node))
        while not self._has_ended.is_set():
            self.offered[node, self.steps[node]] = x
            neighbours.offer(x, self.steps[node])
            published.publish(x.view(torch.uint8))
            for peer in sorted({*self.topology.neighbours(node), *self.topology.receivers(node)}):
                if (theirs := taken(published, peer)) is not None:
                    self.seen[node, peer] = theirs
            if len(self.averaged[node]) < self._num_averages:
                neighbours.average(x.clone())
                self.averaged[node].append(neighbours.averaged_over)
            x = x + 0.001 * (node + 1)
            self.steps[node] += 1
            self.news[node] += neighbours.take_events()
        assert not neighbours.lost
        return neighbours


@pytest.fixture(
    params=[
        ("ring", 4),
        pytest.param(("full", 4), marks=pytest.mark.slow),
        pytest.param(("exponential", 5), marks=pytest.mark.slow),
    ],
    ids=lambda graph: graph[0],
)
def swarm(request: pytest.FixtureRequest, store: KeptStore) -> Swarm:
    return Swarm(store, make_topology(*request.param))


def test_a_node_returns_twice_while_nobody_waits(swarm: Swarm) -> None:
    def leave_and_return() -> MeshNeighbours:
        neighbours, published = swarm.join()
        swarm.check_pulls(published, -1.0)
        for number in (1, 2):
            neighbours.close()
            swarm.await_loss(number)
            swarm.await_steps()
            neighbours, published = swarm.join()
            assert neighbours.is_returning
            swarm.await_steps()  # while this one is connected, and does nothing
            step = neighbours.enter(x := torch.full((SIZE,), torch.nan))
            swarm.await_steps()
            swarm.check_entry(x, step)
            neighbours.offer(x, step)
            swarm.check_pulls(published, -1.0 - number)
        return neighbours

    swarm.run(leave_and_return)


def test_the_average_of_all_nodes_goes_with_those_who_are_in(swarm: Swarm) -> None:
    everybody = sorted([*swarm.others, LEAVER])

    def average_with_all(neighbours: MeshNeighbours) -> None:
        swarm.ask_for_average()
        neighbours.average(torch.zeros(SIZE))
        assert neighbours.averaged_over == tuple(everybody)
        swarm.await_average(everybody)

    def leave_and_return() -> MeshNeighbours:
        neighbours, _ = swarm.join()
        average_with_all(neighbours)
        neighbours.close()
        swarm.ask_for_average()
        swarm.await_average(swarm.others)
        neighbours, _ = swarm.join()
        swarm.ask_for_average()
        swarm.await_average(swarm.others)
        neighbours.enter(torch.empty(SIZE))
        for _ in range(2):
            average_with_all(neighbours)
        return neighbours

    swarm.run(leave_and_return)


def test_who_returns_while_others_wait_in_an_average_is_waited_for_there(
    store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 3 and 4 have seen it go, and are no neighbours of it: they do not see it come."""
    monkeypatch.setattr(average, "SUSPECT_SECONDS", 0.1)
    topology = make_topology("ring", 5)
    board = Board(store.client(), "gossip")
    has_left, has_returned = threading.Event(), threading.Event()

    def have_come(*nodes: int) -> Callable[[], bool]:
        return lambda: all(board.has(f"average2/{node}") for node in nodes)

    def live(node: int) -> MeshNeighbours:
        neighbours = join(store, topology, node)
        neighbours.published()
        neighbours.average(torch.zeros(SIZE))
        if node == LEAVER:
            neighbours.close()
            has_left.set()
            wait_until(have_come(3, 4), "the others wait")
            neighbours = join(store, topology, node)
            neighbours.published()
            neighbours.enter(torch.empty(SIZE))
            has_returned.set()
            wait_until(have_come(0, 2), "its neighbours wait for it, too")
            time.sleep(0.5)  # its step takes longer than a suspect is waited for
        elif node in topology.neighbours(LEAVER):
            has_left.wait(LONG)

            def admit() -> bool:
                neighbours.offer(torch.zeros(SIZE), 0)
                return has_returned.is_set()

            wait_until(admit, "it returns")
        else:
            has_left.wait(LONG)
        neighbours.average(torch.zeros(SIZE))
        assert neighbours.averaged_over == (0, 1, 2, 3, 4)
        return neighbours

    for neighbours in run_islands(5, live):
        neighbours.close()


@pytest.mark.parametrize("gone", ["before links", "before it asks"])
def test_a_node_that_is_lost_on_its_way_back_does_no_harm(gone: str, store: KeptStore) -> None:
    swarm = Swarm(store, make_topology("ring", 3))

    def leave_and_return() -> MeshNeighbours:
        swarm.leave()
        join(store, swarm.topology, LEAVER).close() if gone == "before links" else swarm.join()[0].close()
        swarm.await_steps()
        neighbours, published = swarm.join()
        step = neighbours.enter(x := torch.empty(SIZE))
        swarm.await_steps()
        swarm.check_entry(x, step)
        swarm.check_pulls(published, -1.0)
        return neighbours

    swarm.run(leave_and_return)


def test_who_loses_a_link_on_its_way_back_is_taken_by_that_neighbour_when_it_is_started_again(
    store: KeptStore,
) -> None:
    """An edge without links would be of no use, and would keep the neighbour from looking for the node."""
    swarm = Swarm(store, make_topology("ring", 3))

    def leave_and_return() -> MeshNeighbours:
        swarm.leave()
        neighbours, published = swarm.join()
        published.drop(0)
        neighbours.enter(torch.empty(SIZE))
        wait_until(lambda: swarm.count(2, "node 1 has returned"), "the other neighbour lets it in")
        neighbours.close()
        neighbours, published = swarm.join()
        neighbours.enter(torch.empty(SIZE))
        swarm.check_pulls(published, -1.0)
        return neighbours

    swarm.run(leave_and_return)


def test_who_has_no_other_neighbour_goes_on_alone_and_lets_it_in(store: KeptStore) -> None:
    swarm = Swarm(store, make_topology("ring", 2))

    def leave_and_return() -> MeshNeighbours:
        swarm.leave()
        swarm.await_steps()
        neighbours, published = swarm.join()
        step = neighbours.enter(x := torch.empty(SIZE))
        swarm.await_steps()
        swarm.check_entry(x, step)
        swarm.check_pulls(published, -1.0)
        return neighbours

    swarm.run(leave_and_return)


def test_a_node_that_all_have_given_up_ends(store: KeptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hung for too long; started again, it would return."""
    topology = make_topology("ring", 2)
    held = threading.Lock()
    both = threading.Barrier(2)

    def run(node: int) -> None:
        neighbours = join(store, topology, node, exchange_timeout=0.5)
        published = neighbours.published()
        published.publish(torch.zeros(SIZE, dtype=torch.uint8))
        if node == LEAVER:
            monkeypatch.setattr(published._versioned, "_lock", held)
        both.wait(LONG)
        if node == LEAVER:
            with pytest.raises(IslandLostError, match="given up node 1, which took too long"):
                wait_until(lambda: neighbours.offer(torch.zeros(SIZE), 0), "it is told")
        else:
            assert published.pull(LEAVER)[0] is None
            neighbours.offer(torch.zeros(SIZE), 0)
            assert neighbours.lost == {LEAVER: "it did not answer within 0.5 s"}
            held.release()  # it goes on
        both.wait(LONG)
        neighbours.close()

    held.acquire()
    run_islands(2, run)


def test_nodes_whose_only_connection_breaks_connect_again(store: KeptStore) -> None:
    """Neither has given up the other, whose report of the loss it reads in the store."""
    topology = make_topology("ring", 2)
    news: dict[int, list[str]] = {0: [], 1: []}
    both = threading.Barrier(2)

    def run(node: int) -> None:
        neighbours = join(store, topology, node)
        published = neighbours.published()
        assert isinstance(published, MeshPublished)

        def step(waits_for: str) -> bool:
            neighbours.offer(torch.zeros(SIZE), 0)
            published.publish(torch.zeros(SIZE, dtype=torch.uint8))
            published.pull(1 - node)
            news[node] += neighbours.take_events()
            return any(waits_for in line for line in news[node])

        both.wait(LONG)
        for edge in (published._links[1 - node].asked, published._links[1 - node].answered):
            edge.wake()
        for event in ("its connection broke", "is connected again"):
            wait_until(lambda event=event: step(event), f"{event!r} on node {node}")  # type: ignore[misc]
        both.wait(LONG)
        assert published.pull(1 - node)[0] is not None
        both.wait(LONG)
        neighbours.close()

    run_islands(2, run)
