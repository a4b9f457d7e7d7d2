"""Vectors that travel as coded differences: against NumPy, to the mean, over sockets, with nodes that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings as limits, strategies as st
from numpy.typing import NDArray

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.gossip import choco as replicas
from hf_diloco.gossip.choco import Differences, with_payload
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours, Neighbours
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.topology import PeriodicTopology, Topology, make_topology
from hf_diloco.trainer.gossip_start import check_gossip
from hf_diloco.transport.base import Traffic
from tests.clocks import LONG
from tests.gossip_meshes import join, talk_together
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[np.float64]
CODED = ["bf16", "fp16", "int8", "int4", "fp4"]
T = TypeVar("T")


def values(node: int, step: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + node))


def mixed(neighbours: Neighbours, vector: torch.Tensor, step: int = 0) -> torch.Tensor:
    neighbours.mix((vector,), (out := torch.full_like(vector, torch.nan),), step)
    return out


def coded(inner: Neighbours, payload: str) -> Neighbours:
    neighbours = with_payload(inner, payload)
    assert neighbours.coding is not None
    return neighbours


def replicas_of(end: Neighbours) -> list[replicas.Replicas]:
    assert end.coding is not None
    return end.coding.replicas


def repeat(topology: Topology, start: Sequence[torch.Tensor], payload: str, num_steps: int) -> tuple[Array, list[Any]]:
    """Averages again and again; what all nodes held after each step, [steps + 1, n, d], and their ends."""
    graph = MemoryGraph(topology)
    ends = [coded(graph.node(node), payload) for node in range(topology.num_nodes)]
    history = np.empty((num_steps + 1, len(ends), start[0].numel()))

    def node(number: int) -> None:
        x = start[number]
        history[0, number] = x
        for step in range(num_steps):
            x = mixed(ends[number], x, step)
            history[step + 1, number] = x

    run_islands(len(ends), node)
    return history, ends


def check_replicas(ends: Sequence[Neighbours]) -> None:
    """What a node holds of another is what that one holds of itself, bit for bit."""
    for end in ends:
        for number, mine in enumerate(replicas_of(end)):
            for peer, other in mine.others.items():
                assert torch.equal(other, replicas_of(ends[peer])[number].own), (end.node, peer, number)


# Fixed vectors


@pytest.mark.parametrize("payload", CODED)
@pytest.mark.parametrize(
    ("graph", "num_nodes"), [("ring", 4), ("grid", 6), ("hypercube", 8), ("exponential", 8), ("full", 5)]
)
def test_repeated_averages_reach_the_mean(graph: str, num_nodes: int, payload: str) -> None:
    """As fast as without codes in the long run, and to the last digits: the noise goes with the differences."""
    topology = make_topology(graph, num_nodes)
    start = [values(node, 0, 1500) for node in range(num_nodes)]
    history, ends = repeat(topology, start, payload, 60)
    mean = history[0].mean(0)
    errors = np.sqrt(((history - mean) ** 2).mean((1, 2)))
    assert np.abs(history.mean(1) - mean).max() < 1e-6
    assert errors[-1] < 2e-6 + 4 * topology.rho**60
    assert errors[1] == pytest.approx(np.sqrt(((topology.weights() @ history[0] - mean) ** 2).mean()), abs=1e-6)
    for step in range(1, 31, 5):  # five steps at a time
        slack = 1e-6 + (0.05 * errors[0] if graph == "full" and step == 1 else 0)  # at once, then noise of the first
        assert errors[step + 5] <= 0.75 * errors[step] + slack
    check_replicas(ends)


def test_equal_nodes_stay_equal_to_the_last_bit() -> None:
    start = [values(0, 0, 5000)] * 6
    history, _ = repeat(make_topology("grid", 6), start, "fp4", 20)
    assert (history == history[0, 0]).all()


@limits(deadline=None, max_examples=25)
@given(
    st.sampled_from(["ring", "grid", "star", "exponential", "full"]),
    st.integers(1, 7),
    st.integers(0, 1200),
    st.sampled_from(CODED),
    st.floats(-30, 30),
)
def test_the_mean_stays_and_replicas_agree(graph: str, num_nodes: int, size: int, payload: str, scale: float) -> None:
    """Of whatever size, in several pieces, and with vectors that change between the exchanges."""
    topology = make_topology(graph, num_nodes)
    memory = MemoryGraph(topology)
    ends = [coded(memory.node(node), payload) for node in range(num_nodes)]
    given_, taken = np.empty((2, 5, num_nodes, size))

    def node(number: int) -> None:
        for step in range(5):
            vector = values(number, step, size) * 2.0 ** (scale if payload != "fp16" else 0)
            given_[step, number] = vector
            taken[step, number] = mixed(ends[number], vector, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "PIECE_VALUES", 512)
        run_islands(num_nodes, node)
    if size:
        np.testing.assert_allclose(taken.mean(1), given_.mean(1), rtol=0, atol=4e-6 * np.abs(given_).max())
    check_replicas(ends)


class Whole(Codec):
    """A value is rounded to a whole number from -127 to 127, a byte each."""

    name, block_values, block_bytes = "whole", 1, 1

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        code.view(torch.int8).copy_(values.round().clamp(-127, 127))

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code.view(torch.int8))


@pytest.mark.parametrize("graph", ["hypercube", "exponential"])
def test_it_is_its_equation(graph: str) -> None:
    """Where no operation rounds, but for the code: the same numbers, to the last bit. Weights are quarters."""
    topology, num_steps = make_topology(graph, 8), 6
    W, rng = topology.weights(), np.random.default_rng(0)
    pushes = rng.integers(-400, 400, (num_steps, 8, 300)).astype(float)
    x, known = np.zeros((8, 300)), pushes[0].copy()
    expected = []
    for step, push in enumerate(pushes):
        x = x + push
        if step:  # in the first exchange the replicas are the vectors
            known = known + np.clip(np.round(x - known), -127, 127)
        x = x + np.einsum("ij,ijd->id", W, known[None, :] - known[:, None])
        expected.append(x)
    memory = MemoryGraph(topology)

    def node(number: int) -> list[Array]:
        neighbours, mine, outs = memory.node(number), torch.zeros(300), []
        neighbours.coding = Differences(neighbours, Whole())
        for push in pushes:
            mine = mixed(neighbours, mine + torch.from_numpy(push[number]).float())
            outs.append(mine.double().numpy())
        return outs

    for number, outs in enumerate(run_islands(8, node)):
        for step, out in enumerate(outs):
            np.testing.assert_array_equal(out, expected[step][number])


def test_fp32_is_what_it_was() -> None:
    inner = MemoryGraph(make_topology("random-matching", 4)).node(0)
    assert with_payload(inner, "fp32").coding is None


# Methods


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dsgd", {}),
    ("dmsgd", {"momentum": 0.5, "combine_first": True}),
    ("da-dmsgd", {"momentum": 0.5}),
    ("decentlam", {"momentum": 0.8}),
    ("qg-dmsgd", {"momentum": 0.5}),
    ("d2", {}),
    ("momentum-consensus", {"momentum": 0.5}),
]


def descend(method: str, settings: dict[str, Any], payload: str, num_steps: int = 150) -> Array:
    """Where least squares with full gradients ends: four nodes on a ring, each with a solution of its own."""
    graph = MemoryGraph(make_topology("ring", 4))

    def node(number: int) -> Array:
        rng = np.random.default_rng(number)
        h, s = (torch.from_numpy(rng.uniform(low, high, 300)).float() for low, high in ((0.8, 1.2), (-2.0, 2.0)))
        x = torch.nn.Parameter(torch.zeros(300))
        optimizer = make_optimizer(method, [x], with_payload(graph.node(number), payload), 0.2, **settings)
        for _ in range(num_steps):
            x.grad = h * (x.detach() - s)
            optimizer.step()
        return x.detach().double().numpy()

    return np.array(run_islands(4, node))


@pytest.mark.parametrize(("method", "settings"), METHODS, ids=[method for method, _ in METHODS])
def test_methods_end_where_they_end_without_codes(method: str, settings: dict[str, Any]) -> None:
    """The solution that nodes disagree about, with its bias; differences are rounding, which D2 adds up."""
    payload = "int4" if method == "decentlam" else "int8"
    exact, ours = descend(method, settings, "fp32"), descend(method, settings, payload)
    assert np.abs(exact - exact.mean(0)).max() > 0.01 or method == "d2"
    assert np.abs(ours - exact).max() < (1e-4 if method == "d2" else 1e-5)


# Sockets


def in_mesh(store: KeptStore, topology: Topology, payload: str, talk: Callable[[int, Neighbours], T]) -> list[T]:
    return talk_together(topology.num_nodes, lambda node: coded(join(store, topology, node), payload), talk)


@pytest.mark.parametrize("payload", CODED)
@pytest.mark.parametrize(("graph", "num_nodes"), [("ring", 4), ("exponential", 5), ("ring", 1)])
def test_a_mesh_computes_what_memory_computes(
    graph: str, num_nodes: int, payload: str, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: two vectors and one that travels as it is, more pieces than are in flight, and a key in between."""
    monkeypatch.setattr(replicas, "PIECE_VALUES", 512)
    topology, sizes = make_topology(graph, num_nodes), (9 * 512 + 77, 300, 1)

    def talk(node: int, neighbours: Neighbours) -> list[Any]:
        results: list[Any] = []
        for step in range(6):
            if step == 4:
                neighbours.rekey()
            vectors = [values(node, 10 * step + index, size) for index, size in enumerate(sizes)]
            before = [vector.clone() for vector in vectors]
            outs = [torch.full_like(vector, torch.nan) for vector in vectors]
            results.append((neighbours.mix(vectors, outs, step), outs))
            assert all(map(torch.equal, vectors, before))
        return results

    memory = MemoryGraph(topology)
    expected = run_islands(num_nodes, lambda node: talk(node, coded(memory.node(node), payload)))
    code = sum(CODECS[payload].num_bytes(size) for size in sizes[:2]) + 4
    num_sent = len(topology.receivers(0))
    for ours, theirs in zip(in_mesh(store, topology, payload, talk), expected, strict=True):
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            num_bytes = num_sent * (4 * sum(sizes) if step in (0, 4) else code)
            assert mine[0] == other[0] == Traffic(num_bytes, num_bytes)
            assert all(map(torch.equal, mine[1], other[1]))


def equation(
    topology: Topology, vectors: list[torch.Tensor], known: list[torch.Tensor], node: int, lost: set[int]
) -> torch.Tensor:
    out = vectors[node].double()
    for peer in topology.neighbours(node):
        if peer not in lost:
            out += float(topology.weights()[node, peer]) * (known[peer].double() - known[node].double())
    return out


@pytest.mark.parametrize(("graph", "num_nodes"), [("ring", 5), ("exponential", 5)])
def test_the_others_go_on_without_a_node_that_leaves(graph: str, num_nodes: int, store: KeptStore) -> None:
    """Its weight stays with the others, who drop its replica."""
    topology, leaver, codec = make_topology(graph, num_nodes), 2, CODECS["int8"]
    known = [values(node, 0, 1000) for node in range(num_nodes)]
    expected = []
    for step in range(6):
        vectors = [values(node, step, 1000) for node in range(num_nodes)]
        if step:
            for vector, replica in zip(vectors, known, strict=True):
                codec.round_trip(vector - replica, difference := torch.empty(1000))
                replica += difference
        lost = {leaver} if step >= 3 else set()
        expected.append([equation(topology, vectors, known, node, lost) for node in range(num_nodes)])

    def talk(node: int, neighbours: Neighbours) -> None:
        for step in range(6):
            if node == leaver and step == 3:
                neighbours.close()
                return
            out = mixed(neighbours, values(node, step, 1000), step)
            torch.testing.assert_close(out.double(), expected[step][node], rtol=0, atol=1e-6)
        assert leaver not in replicas_of(neighbours)[0].others
        assert all(torch.equal(other, known[peer]) for peer, other in replicas_of(neighbours)[0].others.items())

    in_mesh(store, topology, "int8", talk)


@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_a_node_returns_and_is_known_again(graph: str, store: KeptStore) -> None:
    """At the step at which it enters replicas go over its edges, and codes over all others."""
    num_nodes, leaver, num_more, size, payload = 5, 1, 4, 1000, "int4"
    topology, code = make_topology(graph, num_nodes), CODECS[payload].num_bytes(1000)
    ended, last, entered = threading.Barrier(num_nodes), [10**6], [0]
    traffic: dict[tuple[int, int], Traffic] = {}

    def step_once(neighbours: Neighbours, x: torch.Tensor, step: int) -> torch.Tensor:
        neighbours.offer(x, step)
        traffic[neighbours.node, step] = neighbours.mix((x,), (out := torch.empty_like(x),), step)
        return out + 0.01 * values(neighbours.node, step, size)

    def survive(node: int) -> Neighbours:
        neighbours, x, step = coded(join(store, topology, node), payload), values(node, 0, size), 0
        neighbours.share("join", {"node": node})
        while step < last[0]:
            x = step_once(neighbours, x, step)
            step += 1
        return neighbours

    def leave_and_return() -> Neighbours:
        neighbours, x = coded(join(store, topology, leaver), payload), values(leaver, 0, size)
        neighbours.share("join", {"node": leaver})
        for step in range(4):
            x = step_once(neighbours, x, step)
        neighbours.close()
        neighbours = coded(join(store, topology, leaver), payload)
        assert neighbours.is_returning
        assert neighbours.recall("join") == [{"node": node} for node in range(num_nodes) if node != leaver]
        step = entered[0] = neighbours.enter(x)
        assert not neighbours.is_returning
        last[0] = step + num_more
        while step < last[0]:
            x = step_once(neighbours, x, step)
            step += 1
        return neighbours

    def talk(node: int) -> Neighbours:
        neighbours = leave_and_return() if node == leaver else survive(node)
        ended.wait(LONG)
        neighbours.close()
        return neighbours

    check_replicas(run_islands(num_nodes, talk))
    for node in range(num_nodes):
        receivers = topology.receivers(node)
        num_new = len(receivers) if node == leaver else receivers.count(leaver)
        at_entry, later = traffic[node, entered[0]], traffic[node, entered[0] + 1]
        assert at_entry.bytes_sent == num_new * 4 * size + (len(receivers) - num_new) * code
        assert later.bytes_sent == len(receivers) * code


# Refusals


def config(**settings: Any) -> GossipConfig:
    return GossipConfig(**{"num_nodes": 8, "rendezvous": "tcp://127.0.0.1:1", "payload": "int8", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"payload": "topk"}, "topk leaves out most .* consensus step below 1"),
        ({"payload": "sign"}, "sign leaves out most .* give one of fp32, bf16"),
        ({"payload": "int2"}, r"'int2': no such number format \(did you mean int\d\?\)"),
        ({"topology": "one-peer-exponential", "method": "dsgd"}, "int8 needs a graph that does not change.*take ring"),
        ({"topology": "random-matching", "method": "dsgd"}, "random-matching changes"),
        ({"method": "pmsgd"}, "pmsgd averages gradients over all nodes"),
        ({"method": "swarm-sgd"}, "quantization: lattice-8"),
        ({"method": "swarm-sgd", "options": {"blocking": True}}, "not with blocking"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gossip(config(**settings))


def test_what_goes_together() -> None:
    for graph in ("ring", "hypercube", "symmetric-exponential"):
        assert check_gossip(config(topology=graph)).is_static
    assert check_gossip(config(topology="one-peer-exponential", method="dsgd", payload="fp32")).period == 3


def test_what_is_no_parameter_vector_of_fp32() -> None:
    topology = make_topology("full", 1)
    node = coded(MemoryGraph(topology).node(0), "int8")
    with pytest.raises(UnsupportedError, match=r"torch\.float64.*keep parameters in float32"):
        mixed(node, torch.zeros(1000, dtype=torch.float64))
    one_of_four = coded(MemoryGraph(make_topology("ring", 4)).node(0), "int8")
    with pytest.raises(UnsupportedError, match="pairs that are drawn"):
        one_of_four.mix((torch.zeros(3),), (torch.zeros(3),), 0, topology=make_topology("full", 4))
    with pytest.raises(UnsupportedError, match="nodes that meet"):
        node.published()
    with pytest.raises(UnsupportedError, match="no node returns"):
        node.enter(torch.zeros(3))


def test_a_transport_without_swaps_is_refused() -> None:
    class Plain(MemoryNeighbours):
        swap = Neighbours.swap

    node = coded(Plain(MemoryGraph(make_topology("full", 1)), 0), "int8")
    with pytest.raises(UnsupportedError, match="Plain moves vectors as they are only"):
        mixed(node, torch.zeros(1000))


def test_own_weights_that_never_change() -> None:
    weights = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    history, ends = repeat(PeriodicTopology("mine", weights), [values(node, 0, 400) for node in range(3)], "int8", 60)
    assert np.abs(history[-1] - history[0].mean(0)).max() < 1e-6
    assert list(replicas_of(ends[0])[0].others) == [1]
