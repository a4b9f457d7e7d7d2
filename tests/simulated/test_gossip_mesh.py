"""Nodes joined by sockets against nodes that read each other's memory; here each is a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import pytest
import torch

from hf_diloco.errors import (
    ConfigError,
    ExchangeError,
    ForgedError,
    IslandLostError,
    PayloadError,
    UnsupportedError,
)
from hf_diloco.gossip import neighbours as neighbours_module
from hf_diloco.gossip.averages import mix_
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.mesh import MeshNeighbours, joining
from hf_diloco.gossip.mesh.edges import Edge, Endpoint, connect_edges
from hf_diloco.gossip.neighbours import MemoryGraph, Neighbours
from hf_diloco.gossip.records import MAX_RECORD_BYTES
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.topology import Topology, make_topology
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.transport import meeting
from hf_diloco.transport.base import RateLimit, Traffic
from hf_diloco.transport.mesh import CHUNK_VALUES
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import AT_ONCE, LONG, FastClock
from tests.gossip_meshes import LOCALHOST, join, talk_together
from tests.islands import run_islands, try_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread", "compiled_averages")

SHORT = 3.0  # where somebody is late
T = TypeVar("T")
Talk = Callable[[int, Neighbours], T]


def in_mesh(
    store: KeptStore, topology: Topology, talk: Callable[[int, MeshNeighbours], T], **settings: Any
) -> list[T]:
    """What `talk` returns at each node; none leaves before all have ended."""
    return talk_together(topology.num_nodes, lambda node: join(store, topology, node, **settings), talk)


def in_memory(topology: Topology, talk: Talk[T]) -> list[T]:
    graph = MemoryGraph(topology)
    return run_islands(topology.num_nodes, lambda node: talk(node, graph.node(node)))


def values(node: int, step: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + node), dtype=dtype)


def equal(left: object, right: object) -> bool:
    """Bit for bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(map(equal, left, right))
    return left == right


# What comes out


GRAPHS = [
    ("ring", 2),
    ("ring", 4),
    ("ring", 1),
    ("grid", 6),
    ("exponential", 5),
    ("one-peer-exponential", 4),
    ("random-matching", 5),
    ("full", 4),
]


@pytest.mark.parametrize(("graph", "num_nodes"), GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mesh_mixes_what_memory_mixes(
    graph: str, num_nodes: int, dtype: torch.dtype, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of nothing, of a part of a chunk, of more chunks than are in flight; one, and two together."""
    chunk = 96  # as whole blocks are, a multiple of what a processor adds at once
    monkeypatch.setattr(neighbours_module, "CHUNK_VALUES", chunk)
    topology = make_topology(graph, num_nodes)
    sizes = [(0,), (1,), (chunk,), (7, 3 * chunk + 5), (20 * chunk + 1,), (0, 4)]

    def talk(node: int, neighbours: Neighbours) -> list[object]:
        results: list[object] = []
        for step, sizes_now in enumerate(sizes):
            vectors = [values(node, 10 * step + index, size, dtype) for index, size in enumerate(sizes_now)]
            before = [vector.clone() for vector in vectors]
            outs = [torch.full_like(vector, torch.nan) for vector in vectors]
            traffic = neighbours.mix(vectors, outs, step)
            assert equal(vectors, before)
            results.append((outs, traffic))
        return results

    assert equal(in_mesh(store, topology, talk), in_memory(topology, talk))


def test_whole_chunks_as_they_are(store: KeptStore) -> None:
    """Bits do not depend on where a vector is cut."""
    topology = make_topology("ring", 3)

    def talk(node: int, neighbours: Neighbours) -> torch.Tensor:
        vector = values(node, 0, 2 * CHUNK_VALUES + 12_345)
        neighbours.mix([vector], [out := torch.empty_like(vector)], 0)
        return out

    assert equal(in_mesh(store, topology, talk), in_memory(topology, talk))


@pytest.mark.parametrize(("graph", "num_sent"), [("ring", 2), ("exponential", 3), ("one-peer-exponential", 1)])
def test_each_neighbour_is_sent_the_vector_once(graph: str, num_sent: int, store: KeptStore) -> None:
    def talk(node: int, neighbours: Neighbours) -> Traffic:
        vector = torch.ones(1001, dtype=torch.float64)
        return neighbours.mix([vector], [torch.empty_like(vector)], 0)

    num_bytes = 1001 * 8 * num_sent
    assert in_mesh(store, make_topology(graph, 8), talk) == [Traffic(num_bytes, num_bytes)] * 8


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
def test_a_mesh_averages_what_memory_averages(num_nodes: int, store: KeptStore) -> None:
    def talk(node: int, neighbours: Neighbours) -> list[object]:
        results: list[object] = []
        for step, size in enumerate([1, 0, 1000, 300_001]):
            vector = values(node, step, size)
            neighbours.average(vector)
            results.append(vector)
        return results

    topology = make_topology("ring", num_nodes)
    ours = in_mesh(store, topology, talk)
    assert equal(ours, in_memory(topology, talk))
    assert all(equal(one, ours[0]) for one in ours)


def test_who_was_averaged_and_how_much_was_sent(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> tuple[object, ...]:
        traffic = neighbours.average(torch.ones(4000))
        return neighbours.averaged_over, neighbours.take_events(), traffic

    assert in_mesh(store, make_topology("ring", 4), talk) == [((0, 1, 2, 3), [], Traffic(24_000, 24_000))] * 4


def test_only_float32_is_averaged(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> None:
        with pytest.raises(UnsupportedError, match="float64"):
            neighbours.average(torch.ones(3, dtype=torch.float64))
        weights = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        with pytest.raises(UnsupportedError, match="float64"):  # before the first step
            make_optimizer("dsgd", weights, neighbours, 0.1, slowmo=SlowMoSettings(sync_every=5))
        with pytest.raises(UnsupportedError, match="float64"):
            make_optimizer("pmsgd", weights, neighbours, 0.1)

    in_mesh(store, make_topology("ring", 2), talk)


# Who is lost


def mean_without(topology: Topology, node: int, step: int, lost: set[int], size: int = 100) -> torch.Tensor:
    out = torch.empty(size)
    weights = topology.weights(step)[node]
    others = [
        (float(weights[peer]), values(peer, step, size))
        for peer in topology.neighbours(node, step)
        if peer not in lost
    ]
    mix_(out, values(node, step, size), others)
    return out


def mixed(neighbours: Neighbours, step: int, size: int = 100) -> torch.Tensor:
    out = torch.empty(size)
    neighbours.mix([values(neighbours.node, step, size)], [out], step)
    return out


@pytest.mark.parametrize(("graph", "num_nodes"), [("ring", 5), ("full", 4), ("exponential", 5)])
def test_the_others_go_on_without_a_node_that_leaves(graph: str, num_nodes: int, store: KeptStore) -> None:
    topology, leaver = make_topology(graph, num_nodes), 2

    def talk(node: int, neighbours: MeshNeighbours) -> list[str]:
        for step in range(6):
            if node == leaver and step == 3:
                neighbours.close()
                return []
            expected = mean_without(topology, node, step, {leaver} if step >= 3 else set())
            assert equal(mixed(neighbours, step), expected), (node, step)
        average = values(node, 0, 1000)
        neighbours.average(average)
        left = [other for other in range(num_nodes) if other != leaver]
        assert neighbours.averaged_over == tuple(left)
        total = values(left[0], 0, 1000)
        for other in left[1:]:
            total += values(other, 0, 1000)
        assert equal(average, total * (1 / len(left)))
        return neighbours.take_events()

    begun = time.monotonic()
    news = in_mesh(store, topology, talk)
    assert time.monotonic() - begun < LONG, "a broken connection is not waited for"
    for node, lines in enumerate(news):
        if node == leaver:
            continue
        is_near = leaver in topology.neighbours(node) or node in topology.neighbours(leaver)
        lost = [f"node {leaver} was lost (its connection broke): its weight stays with this node until it returns"]
        assert lines[:-1] == (lost if is_near else [])
        assert f"without node {leaver}" in lines[-1]


def test_a_node_that_leaves_before_the_average_is_left_out_of_it(store: KeptStore) -> None:
    """It was in the group."""

    def talk(node: int, neighbours: MeshNeighbours) -> tuple[object, ...]:
        vector = values(node, 0, 5000)
        neighbours.average(vector)
        if node == 3:
            neighbours.close()
            return ()
        again = values(node, 0, 5000)
        neighbours.average(again)
        third = again.clone()
        neighbours.average(third)
        return again, third, neighbours.averaged_over

    first, *others, _ = in_mesh(store, make_topology("ring", 4), talk)
    assert first[2] == (0, 1, 2)
    assert all(equal(first, other) for other in others)
    total = values(0, 0, 5000) + values(1, 0, 5000) + values(2, 0, 5000)
    assert equal(first[0], total * (1 / 3))


def test_who_came_too_late_keeps_the_others_from_no_later_average(store: KeptStore) -> None:
    """It tries again, alone; then another node is lost, and the rest forms a new group."""
    left_out, has_tried = threading.Event(), threading.Event()

    def talk(node: int, neighbours: MeshNeighbours) -> tuple[int, ...]:
        if node == 3:
            assert left_out.wait(LONG)
            for message in ("nodes 0-2 average without this one", "nodes 0-2 did not join the average"):
                with pytest.raises(IslandLostError, match=message):
                    neighbours.average(values(node, 0, 4))
            has_tried.set()
            return ()
        neighbours.average(values(node, 0, 4))
        left_out.set()
        assert has_tried.wait(LONG)
        if node == 2:
            neighbours.close()
            return ()
        neighbours.average(values(node, 0, 4))
        return neighbours.averaged_over

    assert in_mesh(store, make_topology("full", 4), talk, exchange_timeout=1.0)[:2] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("have_averaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_is_not_in_step_and_came_too_late_comes_to_a_later_average(have_averaged: bool, store: KeptStore) -> None:
    """Its neighbours keep it, and all wait for it the next time; but not each time if it is always late."""
    late, everybody, num_missed = 3, (0, 1, 2, 3), 4
    are_through, has_missed = threading.Barrier(4), threading.Barrier(4)

    def talk(node: int, neighbours: MeshNeighbours) -> list[bool]:
        neighbours.published()
        average, awaited = neighbours._group, []
        if have_averaged:
            neighbours.average(values(node, 9, 4))
        for number in range(num_missed):
            if node == late:
                are_through.wait(LONG)
                problem = r"average without this one|did not join the average"
                with pytest.raises(IslandLostError, match=f"({problem}).*This node goes on, and joins the next"):
                    neighbours.average(values(node, number, 4))
            else:
                group = average._group
                neighbours.average(values(node, number, 4))
                awaited.append(average._group is not group)
                assert neighbours.averaged_over == (0, 1, 2)
                are_through.wait(LONG)
            has_missed.wait(LONG)
        vector = values(node, 7, 4)
        neighbours.average(vector)
        assert neighbours.averaged_over == everybody
        mean = sum((values(other, 7, 4) for other in everybody), torch.zeros(4)) * 0.25
        torch.testing.assert_close(vector, mean, rtol=1e-6, atol=1e-6)
        assert not neighbours.lost
        return awaited

    *others, _ = in_mesh(store, make_topology("ring", 4), talk, exchange_timeout=1.0)
    assert others == [[True, True, True, False]] * 3


@pytest.mark.parametrize("lacking", [0, 1])
def test_nobody_goes_on_while_another_is_without_the_mean(
    lacking: int, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that breaks while one has the mean, and the other has not."""

    def talk(node: int, neighbours: MeshNeighbours) -> list[object]:
        results: list[object] = []
        group = neighbours._group
        inner = group._transfer if node == lacking else group._vote
        calls = []

        def fail_once(*arguments: Any) -> Any:
            result = inner(*arguments)
            calls.append(1)
            if len(calls) == 2:
                raise ExchangeError("as if the other had gone")
            return result

        monkeypatch.setattr(group, inner.__name__, fail_once)
        for step in range(4):
            vector = values(node, step, 1000)
            neighbours.average(vector)
            results.append(vector)
        return results

    topology = make_topology("ring", 2)

    def expect(node: int, neighbours: Neighbours) -> list[object]:
        results: list[object] = []
        for step in range(4):
            vector = values(node, step, 1000)
            neighbours.average(vector)
            results.append(vector)
        return results

    assert equal(in_mesh(store, topology, talk), in_memory(topology, expect))


def test_a_late_node_is_lost_and_finds_that_all_are(store: KeptStore) -> None:
    topology, late = make_topology("ring", 4), 1
    woken = threading.Event()

    def talk(node: int, neighbours: MeshNeighbours) -> list[str]:
        assert equal(mixed(neighbours, 0), mean_without(topology, node, 0, set()))
        if node == late:
            woken.wait(LONG)
            with pytest.raises(IslandLostError, match="all neighbours of node 1 are lost") as caught:
                mixed(neighbours, 1)
            assert caught.value.islands == (0, 2)
            return []
        for step in range(1, 5):
            assert equal(mixed(neighbours, step), mean_without(topology, node, step, {late}))
        if node == 0:
            woken.set()
        return neighbours.take_events()

    news = in_mesh(store, topology, talk, exchange_timeout=SHORT)
    assert news[0] == [
        "node 1 was lost (it did not come within 3 s): its weight stays with this node until it returns"
    ]
    assert news[2] == news[0]
    assert news[3] == [], "who waits for those who wait for the late one is not late"


def test_what_an_interrupted_exchange_left_is_not_taken_for_the_next(
    store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = 0

    def interrupt(*_: object) -> Traffic:
        raise KeyboardInterrupt

    def talk(node: int, neighbours: MeshNeighbours) -> None:
        if node == interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(neighbours._straggler_timeout, "wait_for", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    mixed(neighbours, 0)
        else:
            with suppress(IslandLostError):  # it may have all of the first exchange by then
                mixed(neighbours, 0)
        with pytest.raises(IslandLostError, match=f"all neighbours of node {node} are lost"):
            mixed(neighbours, 1)

    in_mesh(store, make_topology("ring", 2), talk)


def test_a_neighbour_that_goes_before_it_publishes_is_not_waited_for(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> None:
        if node == 1:
            neighbours.close()
            return
        with pytest.raises(IslandLostError, match="nodes 0 and 1 did not connect"):
            neighbours.published()

    begun = time.monotonic()
    in_mesh(store, make_topology("ring", 2), talk)
    assert time.monotonic() - begun < AT_ONCE


def test_who_has_no_neighbour_at_a_step_keeps_its_vector(store: KeptStore) -> None:
    """Of an odd number one is left over by a matching, and loses nobody."""
    topology = make_topology("random-matching", 3)

    def talk(node: int, neighbours: MeshNeighbours) -> None:
        for step in range(8):
            assert equal(mixed(neighbours, step), mean_without(topology, node, step, set()))

    in_mesh(store, topology, talk)


def test_nodes_that_do_not_come_at_the_start_are_named(store: KeptStore) -> None:
    topology = make_topology("full", 4)
    with FastClock() as clock:
        outcomes = try_islands(2, lambda node: join(store, topology, node, notes=WaitNotes(node, "node", clock=clock)))
    for outcome in outcomes:
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (2, 3)
        assert "nodes 2, 3 did not connect" in str(outcome)


def test_a_store_that_is_gone_is_said() -> None:
    topology = make_topology("ring", 2)
    keepers = [KeptStore()]
    nodes = run_islands(2, lambda node: join(keepers[0], topology, node))
    keepers.clear()

    def average(node: int) -> None:
        nodes[node].average(torch.ones(3))

    for outcome in try_islands(2, average):
        assert isinstance(outcome, IslandLostError)
        assert "rendezvous" in str(outcome)
        assert "node 0" in str(outcome)
    for one in nodes:
        one.close()


def test_a_limit_that_cannot_be_kept_is_refused(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> None:
        with pytest.raises(ExchangeError, match=r"rate_limit.*take 4 s.*exchange_timeout is 3 s"):
            mixed(neighbours, 0, 100_000)

    in_mesh(store, make_topology("ring", 2), talk, exchange_timeout=SHORT, rate_limit=RateLimit(1e5))


def test_a_node_that_the_graph_has_not(store: KeptStore) -> None:
    topology = make_topology("ring", 4)
    with pytest.raises(ConfigError, match="node 4"):
        join(store, topology, 4)
    with pytest.raises(ConfigError, match="node 4"):
        MemoryGraph(topology).node(4)


# Records


def test_all_see_all_records_in_order(store: KeptStore) -> None:
    topology = make_topology("ring", 3)

    def talk(node: int, neighbours: Neighbours) -> list[object]:
        first = neighbours.share("model", {"node": node, "text": "β" * node})
        return [first, neighbours.share("model", {"again": [node, None, 0.5]}), neighbours.share("other", {})]

    ours = in_mesh(store, topology, talk)
    assert ours == in_memory(topology, talk)
    assert ours[0][0] == [{"node": 0, "text": ""}, {"node": 1, "text": "β"}, {"node": 2, "text": "ββ"}]
    assert MemoryGraph(topology).node(0).recall("model") == [], "no thread is started again alone"


def test_what_was_shown_last_can_be_read_again(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> list[object]:
        for number in range(2):
            neighbours.share("model", {"node": node, "number": number})
        return [neighbours.recall("model"), neighbours.recall("other")]

    last = in_mesh(store, make_topology("ring", 3), talk)[1]
    assert last == [[{"node": 0, "number": 1}, {"node": 2, "number": 1}], []]


def test_who_returns_reads_what_was_shown_last_and_shows_its_next_with_the_others(store: KeptStore) -> None:
    """As they have begun another training meanwhile."""
    is_back = threading.Event()

    def talk(node: int, neighbours: MeshNeighbours) -> object:
        for number in range(2):
            neighbours.share("model", {"node": node, "number": number})
        if node == 0:
            with suppress(IslandLostError):  # it is alone
                mixed(neighbours, 0)
            while not is_back.wait(0.02):
                neighbours.offer(torch.zeros(100), 1)
            return neighbours.share("model", {"node": node, "number": 2})
        neighbours.close()
        again = join(store, make_topology("ring", 2), node)
        assert again.recall("model") == [{"node": 0, "number": 1}]
        is_back.set()
        shown = again.share("model", {"node": node, "number": 2})
        again.close()
        return shown

    both = [{"node": 0, "number": 2}, {"node": 1, "number": 2}]
    assert in_mesh(store, make_topology("ring", 2), talk) == [both, both]


@pytest.mark.parametrize("where", ["mesh", "memory"])
def test_records_that_cannot_be_shown(where: str, store: KeptStore) -> None:
    def talk(node: int, neighbours: Neighbours) -> None:
        with pytest.raises(PayloadError, match="JSON"):
            neighbours.share("a", {"tensor": torch.ones(1)})
        with pytest.raises(PayloadError, match="65,536"):
            neighbours.share("b", {"text": "x" * MAX_RECORD_BYTES})

    topology = make_topology("ring", 2)
    if where == "mesh":
        in_mesh(store, topology, talk)
    else:
        in_memory(topology, talk)


@pytest.mark.parametrize(
    "rubbish", ["", "[1]", "{", "\udc80".encode(errors="surrogateescape"), "[" * 60_000, "x" * 70_000]
)
def test_rubbish_in_the_store_is_refused(rubbish: str | bytes, store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> None:
        if node == 0:
            store.client().set("gossip/share/model/1/0", rubbish)
            return
        with pytest.raises(PayloadError, match="node 0"):
            neighbours.share("model", {})

    in_mesh(store, make_topology("ring", 2), talk)


def test_records_that_do_not_come_are_named(store: KeptStore) -> None:
    def talk(node: int, neighbours: MeshNeighbours) -> None:
        if node == 0:
            neighbours._connect_timeout = 0.5
            with pytest.raises(IslandLostError, match=r"nodes 1, 2 did not publish the record 'model'") as caught:
                neighbours.share("model", {})
            assert caught.value.islands == (1, 2)

    in_mesh(store, make_topology("ring", 3), talk)


def test_who_begins_a_further_training_alone_is_told_how_to_return(store: KeptStore) -> None:
    """Its own training ended in an error, and the others go on."""

    def talk(node: int, neighbours: MeshNeighbours) -> None:
        neighbours.offer(torch.zeros(1), 0)
        if node == 1:
            neighbours._connect_timeout = 0.5
            with pytest.raises(IslandLostError, match=r"on all nodes alike.*Start node 1 again, alone"):
                neighbours.share("join", {})

    in_mesh(store, make_topology("ring", 3), talk)


def test_who_goes_away_before_training_begins_is_not_waited_for(store: KeptStore) -> None:
    """As one that runs out of memory while it loads the model; nodes 3 and 4 are no neighbours of it."""
    gone = 1

    def talk(node: int, neighbours: MeshNeighbours) -> float:
        begun = time.monotonic()
        if node == gone:
            neighbours.close()
        else:
            with pytest.raises(IslandLostError, match="node 1 went away before training began") as caught:
                neighbours.share("join", {})
            assert caught.value.islands == (gone,)
        return time.monotonic() - begun

    assert max(in_mesh(store, make_topology("ring", 5), talk)) < AT_ONCE


# Who returns


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("ring", marks=pytest.mark.slow),
        pytest.param("exponential", marks=pytest.mark.slow),
        "one-peer-exponential",  # whose neighbours change
    ],
)
def test_a_node_returns_twice_while_others_hurry_on(graph: str, store: KeptStore) -> None:
    """Steps take less time than agreeing on one; at the entry step the newcomer holds its neighbours' mean."""
    num_nodes, leaver, num_steps = 5 if graph != "one-peer-exponential" else 4, 1, 6
    topology = make_topology(graph, num_nodes)
    offered: dict[tuple[int, int], torch.Tensor] = {}
    ended = threading.Barrier(num_nodes)
    last: list[int] = []

    def step_once(neighbours: MeshNeighbours, x: torch.Tensor, step: int) -> torch.Tensor:
        offered[neighbours.node, step] = x
        neighbours.offer(x, step)
        neighbours.mix([x], [out := torch.empty_like(x)], step)
        return out + 0.001 * neighbours.node

    def survive(node: int) -> list[str]:
        neighbours = join(store, topology, node)
        x, step = values(node, 0, 100), 0
        while not last or step < last[0]:
            x = step_once(neighbours, x, step)
            step += 1
        neighbours.average(x)
        assert neighbours.averaged_over == tuple(range(num_nodes))
        assert not neighbours.lost
        ended.wait(LONG)
        neighbours.close()
        return neighbours.take_events()

    def leave_and_return() -> list[int]:
        neighbours = join(store, topology, leaver)
        assert not neighbours.is_returning
        x, step = values(leaver, 0, 100), 0
        entered = []
        for _ in range(2):
            for _ in range(num_steps):
                x = step_once(neighbours, x, step)
                step += 1
            neighbours.close()
            neighbours = join(store, topology, leaver)
            assert neighbours.is_returning
            x = torch.full((100,), torch.nan)
            step = neighbours.enter(x)
            entered.append(step)
            near = sorted({*topology.neighbours(leaver), *neighbours.peers})
            total = offered[near[0], step].clone()
            for peer in near[1:]:
                total += offered[peer, step]
            assert equal(x, total * (1 / len(near)))
        last.append(step + num_steps)
        while step < last[0]:
            x = step_once(neighbours, x, step)
            step += 1
        neighbours.average(x)
        assert neighbours.averaged_over == tuple(range(num_nodes))
        ended.wait(LONG)
        neighbours.close()
        return entered

    outcomes = run_islands(
        num_nodes,
        lambda node: leave_and_return() if node == leaver else survive(node),
        timeout=3 * LONG,  # those who hurry leave a single core little time for whoever returns
    )
    entered = outcomes[leaver]
    for node in range(num_nodes):
        if node in topology.neighbours(leaver) and node in topology.receivers(leaver):
            returns = [line for line in outcomes[node] if "returned" in str(line)]
            assert returns == [f"node 1 has returned: it takes part from step {step} on" for step in entered]


def test_who_cannot_join_lets_go_of_those_it_connected_to(store: KeptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other neighbours go on at once."""
    nodes, given_up = make_topology("ring", 3), threading.Event()

    def connect(endpoint: Endpoint, *others: Any) -> tuple[dict[int, Edge], list[int]]:
        edges, missing = connect_edges(endpoint, *others)
        if endpoint.node == 2:
            edges.pop(0).close()  # node 0 breaks off
            missing.append(0)
        return edges, missing

    def run(node: int) -> None:
        if node == 2:
            try:
                join(store, nodes, node)
            finally:
                given_up.set()
        neighbours = join(store, nodes, node)
        given_up.wait(LONG)
        neighbours.mix([torch.ones(2)], [torch.empty(2)], 0)
        assert neighbours.lost.keys() == {2}

    monkeypatch.setattr(joining, "connect_edges", connect)
    started = time.monotonic()
    *others, error = try_islands(3, run)
    assert others == [None, None]
    with pytest.raises(IslandLostError, match=r"node 0 broke off after \d+\.\d s, while connecting"):
        raise cast(BaseException, error)
    assert time.monotonic() - started < AT_ONCE


def test_who_ends_over_a_forged_neighbour_lets_go_of_the_others(
    store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it until an exchange's time is over, as long as anybody holds the error."""
    monkeypatch.setattr(meeting, "FORGED_SECONDS", 0.5)
    keys, lives = [LinkKey(b"a" * 32), LinkKey(b"b" * 32), LinkKey(b"a" * 32)], {1: "1.1", 2: "1.1"}
    have_ended = threading.Barrier(3)

    def run(node: int) -> None:
        endpoint = Endpoint(store.client(), node, LOCALHOST, LONG, key=keys[node])
        try:
            edges, _ = connect_edges(endpoint, "gossip", {0: "1.1"} if node else lives, LONG)
            if node == 2 and 0 in edges:  # else it was let go before it was connected
                until_broken(edges[0])
        finally:
            have_ended.wait(LONG)

    first, second, third = try_islands(3, run)
    assert isinstance(first, ForgedError)
    assert isinstance(second, ForgedError)
    assert third is None


def until_broken(edge: Edge) -> None:
    deadline = time.monotonic() + AT_ONCE
    while not edge._links.find_broken():
        assert time.monotonic() < deadline, "it stands"
        time.sleep(0.05)
    edge.close()
