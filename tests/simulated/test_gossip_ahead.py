"""Exchanges that begin before the gradient is known: the same bits, behind the computation, and nothing left over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from hf_diloco.errors import ExchangeError, IslandLostError, UnsupportedError
from hf_diloco.gossip import neighbours as neighbours_module
from hf_diloco.gossip.averages import Vectors, mix_
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.mesh.store import lost_key
from hf_diloco.gossip.neighbours import MemoryGraph, Neighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.records import Record
from hf_diloco.gossip.threads import THREAD_NAME, Ahead, Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.gossip import METHODS, GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import Topology, make_topology
from hf_diloco.trainer.record import NodeRecord
from hf_diloco.transport.base import Traffic
from tests.clocks import LONG
from tests.gossip_meshes import join, talk_together
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.1
SIZE = 1001
COMBINE_FIRST: dict[str, dict[str, Any]] = {
    "dsgd": {"combine_first": True},
    "dmsgd": {"combine_first": True, "nesterov": True},
    "momentum-consensus": {"omega": 0.5},
}
MESHES = itertools.count()
T = TypeVar("T")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


class Node:
    """An optimizer of one vector, on a node whose gradients depend on the step and on where it is."""

    def __init__(self, neighbours: Neighbours, method: str, turns: Turns | None = None, **settings: Any) -> None:
        number = neighbours.node
        self.inner = neighbours
        self.neighbours = NodeNeighbours(neighbours, neighbours.topology, number, IslandGroup(), turns)
        self.x = torch.nn.Parameter(values(number, SIZE))
        self.optimizer: GossipOptimizer = make_optimizer(method, [self.x], self.neighbours, LR, **settings)

    def close(self) -> None:
        self.neighbours.close()

    def gradient(self, step: int) -> torch.Tensor:
        return self.x.detach() * values(100 + self.inner.node + 10 * step, SIZE)

    def step(self, step: int, begins: bool) -> torch.Tensor:
        if begins:
            self.optimizer.begin_exchange()
        self.x.grad = self.gradient(step)
        self.optimizer.step()
        return self.x.detach().clone()


def values(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def in_mesh(
    store: KeptStore, topology: Topology, talk: Callable[[Node], T], method: str = "dsgd", **settings: Any
) -> list[T]:
    """What `talk` returns at each node; none leaves before all have ended."""
    name = f"mesh-{next(MESHES)}"

    def enter(number: int) -> Node:
        return Node(join(store, topology, number, name=name), method, **(settings or COMBINE_FIRST[method]))

    return talk_together(topology.num_nodes, enter, lambda _, node: talk(node))


# What comes out


@pytest.mark.parametrize("method", list(COMBINE_FIRST))
@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential"])
def test_every_bit_is_the_same(graph: str, method: str, store: KeptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours_module, "CHUNK_VALUES", 96)
    topology = make_topology(graph, 4)

    def steps(begins: Callable[[int, int], bool]) -> Callable[[Node], list[Any]]:
        def talk(node: Node) -> list[Any]:
            history: list[Any] = []
            for step in range(7):
                x = node.step(step, begins(node.inner.node, step))
                history.append((x, node.optimizer.traffic))
            assert node.neighbours.total.bytes_sent == sum(traffic.bytes_sent for _, traffic in history)
            return history

        return talk

    expected = in_mesh(store, topology, steps(lambda node, step: False), method)
    some_begin = in_mesh(store, topology, steps(lambda node, step: (node + step) % 2 == 0), method)
    all_begin = in_mesh(store, topology, steps(lambda node, step: True), method)
    graph_in_memory, turns = MemoryGraph(topology), Turns()

    def simulate(number: int) -> list[Any]:
        with turns.mine():
            return steps(lambda node, step: True)(
                Node(graph_in_memory.node(number), method, turns, **COMBINE_FIRST[method])
            )

    for found in (some_begin, all_begin, run_islands(4, simulate)):
        for ours, theirs in zip(found, expected, strict=True):
            for (x, traffic), (expected_x, expected_traffic) in zip(ours, theirs, strict=True):
                assert torch.equal(x, expected_x)
                assert traffic == expected_traffic


def test_an_average_in_between_changes_nothing(store: KeptStore) -> None:
    topology = make_topology("ring", 3)

    def talk(averages: bool) -> Callable[[Node], list[torch.Tensor]]:
        def steps(node: Node) -> list[torch.Tensor]:
            history = []
            for step in range(3):
                node.optimizer.begin_exchange()
                if averages:
                    with node.optimizer.averaged_weights():
                        history.append(node.x.detach().clone())
                    node.neighbours.share("topic", {})
                history.append(node.step(step, begins=True))
            return history

        return steps

    expected, found = (in_mesh(store, topology, talk(averages)) for averages in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x, other) for x, other in zip(ours[1::2], theirs, strict=True))
    means = [ours[::2] for ours in found]
    assert all(torch.equal(mean, other) for ours in means for mean, other in zip(ours, means[0], strict=True))


def test_it_travels_while_a_node_computes(store: KeptStore) -> None:
    """Node 1 is late; its whole step takes place while node 0 has not yet asked for what it has begun."""
    has_begun, has_stepped = threading.Event(), threading.Event()

    def talk(node: Node) -> tuple[float, float]:
        if node.inner.node == 1:
            assert has_begun.wait(LONG)
            node.step(0, begins=False)
            has_stepped.set()
        else:
            node.optimizer.begin_exchange()
            has_begun.set()
            assert has_stepped.wait(LONG)  # this is what it computes
            node.step(0, begins=False)
        return node.neighbours.seconds, node.neighbours.seconds_hidden

    (_, hidden), (stood_still, not_hidden) = in_mesh(store, make_topology("ring", 2), talk)
    assert hidden > 0
    assert stood_still > 0
    assert not_hidden == 0


# Who is lost


def test_a_neighbour_that_leaves_is_left_out(store: KeptStore) -> None:
    have_begun, has_left = threading.Barrier(3), threading.Event()
    topology = make_topology("ring", 3)

    def talk(node: Node) -> tuple[torch.Tensor, list[str]]:
        if node.inner.node == 2:
            have_begun.wait(LONG)
            node.neighbours.close()
            has_left.set()
            return torch.empty(0), []
        node.optimizer.begin_exchange()
        have_begun.wait(LONG)
        assert has_left.wait(LONG)
        return node.step(0, begins=False), node.neighbours.take_events()

    outcomes = in_mesh(store, topology, talk)
    for number in (0, 1):
        x, news = outcomes[number]
        own, other = values(number, SIZE), values(1 - number, SIZE)
        expected = torch.empty(SIZE)
        mix_(expected, own, [(float(topology.weights(0)[number, 1 - number]), other)])
        expected.add_(own * values(100 + number, SIZE), alpha=-LR)
        assert torch.equal(x, expected)
        assert "node 2 was lost (its connection broke)" in news[0]


def test_who_is_left_alone_is_told_at_the_step(store: KeptStore) -> None:
    has_begun = threading.Event()

    def talk(node: Node) -> None:
        if node.inner.node == 1:
            assert has_begun.wait(LONG)
            node.neighbours.close()
            return
        node.optimizer.begin_exchange()
        has_begun.set()
        with pytest.raises(IslandLostError, match="all neighbours of node 0 are lost"):
            node.step(0, begins=False)

    in_mesh(store, make_topology("ring", 2), talk)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_node_that_is_closed_ends_its_exchange_and_accuses_nobody(is_waited_for: bool, store: KeptStore) -> None:
    """As after Ctrl-C in the backward pass; nobody waits for `exchange_timeout`."""
    may_close, has_closed = threading.Event(), threading.Event()

    def talk(node: Node) -> None:
        mesh = node.inner
        assert isinstance(mesh, MeshNeighbours)
        if mesh.node == 0:
            node.optimizer.begin_exchange()
            assert may_close.wait(LONG)
            begun = time.monotonic()
            node.neighbours.close()
            node.neighbours.close()
            assert time.monotonic() - begun < LONG / 2
            has_closed.set()
            assert node.neighbours.take_events() == []
            return
        while is_waited_for and not mesh._board.has("waits/0"):
            time.sleep(0.02)
        may_close.set()
        assert has_closed.wait(LONG), "it has waited for this one"
        with pytest.raises(IslandLostError, match="its connection broke"):  # noqa: PT012 - what was sent may have come
            while True:
                node.step(0, begins=False)
        assert mesh._board.has(lost_key(0))
        assert not mesh._board.has(lost_key(1))

    in_mesh(store, make_topology("ring", 2), talk)


# Where it is not as planned


class Stub(Neighbours):
    """The only node of two; `mix` gives its own vectors back, or raises."""

    is_on_host = True

    def __init__(self) -> None:
        self.topology = make_topology("ring", 2)
        self.node, self.num_nodes = 0, 2
        self.log: list[str] = []
        self.error: Exception | None = None

    def mix(self, vectors: Vectors, outs: Vectors, step: int, *, topology: Topology | None = None) -> Traffic:
        self.log.append(f"mix {step}")
        if self.error:
            raise self.error
        for vector, out in zip(vectors, outs, strict=True):
            out.copy_(vector)
        return Traffic(1, 1)

    def average(self, vector: torch.Tensor) -> Traffic:
        return Traffic()

    def share(self, topic: str, record: Record) -> list[Record]:
        return [record]

    def offer(self, x: torch.Tensor, step: int) -> None:
        self.log.append(f"offer {step}")

    def close(self) -> None:
        self.log.append("close")


def test_each_step_is_offered_and_exchanged_once() -> None:
    stub = Stub()
    node = Node(stub, "dsgd", combine_first=True)
    for _ in range(2):
        node.optimizer.begin_exchange()
    node.step(0, begins=False)
    node.step(1, begins=False)
    node.step(2, begins=True)
    node.neighbours.close()
    assert stub.log == ["offer 0", "mix 0", "offer 1", "mix 1", "offer 2", "mix 2", "close"]


def test_what_is_on_a_device_is_copied_to_the_host_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def buffers(self: NodeNeighbours, name: str, vectors: Vectors) -> list[torch.Tensor]:
        return [torch.empty_like(vector) for vector in vectors]

    monkeypatch.setattr(NodeNeighbours, "_room_on_host", buffers)
    node = Node(Stub(), "dsgd", combine_first=True)
    before, gradient = node.x.detach().clone(), node.gradient(0)
    node.optimizer.begin_exchange()
    node.x.grad = gradient
    node.optimizer.received.fill_(torch.nan)  # to which only `step` brings what has come
    node.x.data.fill_(torch.nan)  # of which a copy travels
    node.optimizer.step()
    assert torch.equal(node.x.detach(), before.add(gradient, alpha=-LR))
    node.neighbours.close()


@pytest.mark.parametrize("method", [*sorted(METHODS.keys() - COMBINE_FIRST.keys() - {"swarm-sgd"}), "dsgd", "dmsgd"])
def test_nothing_begins_where_the_gradient_is_sent(method: str) -> None:
    stub = Stub()
    node = Node(stub, method)
    node.optimizer.begin_exchange()
    assert stub.log == []
    node.optimizer.load_state_dict(node.optimizer.state_dict())
    node.neighbours.close()


@pytest.mark.parametrize("error", [ExchangeError("no way"), RuntimeError("no way")], ids=lambda error: type(error))
def test_errors_are_raised_by_the_step(error: Exception) -> None:
    stub = Stub()
    node = Node(stub, "momentum-consensus")
    stub.error = error
    node.optimizer.begin_exchange()
    node.neighbours.drain()
    with pytest.raises(type(error), match="no way"):
        node.step(0, begins=False)
    node.neighbours.close()


def test_another_state_is_refused_once_an_exchange_has_begun() -> None:
    node = Node(Stub(), "dmsgd", combine_first=True)
    state = node.optimizer.state_dict()
    node.optimizer.begin_exchange()
    with pytest.raises(UnsupportedError, match="take that step"):
        node.optimizer.load_state_dict(state)
    with pytest.raises(UnsupportedError, match="take that step"):
        node.optimizer.begin_at(lambda x: 5)
    node.step(0, begins=False)
    node.optimizer.load_state_dict(state)
    node.neighbours.close()


def test_a_wish_to_end_travels_with_what_has_begun() -> None:
    node = Node(Stub(), "dsgd", combine_first=True)
    node.neighbours.end.wish()
    node.step(0, begins=True)
    assert node.neighbours.end.has_come(2)
    node.neighbours.close()


def test_the_record_says_what_was_hidden() -> None:
    node = Node(Stub(), "dsgd", combine_first=True)
    record = NodeRecord(None, node.neighbours, 0)
    node.optimizer.begin_exchange()
    node.neighbours.drain()
    node.step(0, begins=False)
    record.mix(1)  # as a checkpoint does
    logs = record.take_for_trackers(1)
    assert 0 <= logs["gossip/seconds_hidden"] <= logs["gossip/seconds_exchanging"]
    assert logs["gossip/seconds_hidden"] == node.neighbours.seconds_hidden
    assert logs["gossip/seconds_exchanging"] == pytest.approx(node.neighbours.seconds + node.neighbours.seconds_hidden)
    node.neighbours.close()


def test_the_thread_leaves_other_threads_their_cores() -> None:
    torch.set_num_threads(3)
    ahead = Ahead()
    seen: list[int] = []

    def look() -> Traffic:
        seen.append(torch.get_num_threads())
        return Traffic()

    ahead.start(look)
    ahead.take()
    look()
    later = threading.Thread(target=look)
    later.start()
    later.join()
    ahead.close()
    assert seen == [1, 3, 3]


def test_who_forgets_to_close_leaves_no_thread() -> None:
    ahead = Ahead()
    ahead.start(Traffic)
    ahead.take()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    del ahead
    thread.join(LONG)
    assert not thread.is_alive()
