"""SwarmSGD against NumPy written from its equation, its special cases, and what quantisation does to it.

Without waiting, nodes step in one thread, in an order that the test gives.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hf_diloco.codecs.lattice import CHECK_VALUES
from hf_diloco.errors import CheckpointError, ConfigError, ExchangeError, UnsupportedError
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours, Neighbours
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.gossip.swarmsgd import SwarmSGD
from hf_diloco.methods.topology import RandomMatching, Topology, make_topology
from hf_diloco.methods.topology.matching import RandomEdgeMatching, links
from hf_diloco.store.values import ValueStore
from tests.islands import run_islands

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[np.float64]
Gradient = Callable[[int, Array, int], Array]  # of a node at its x and its step

N, D = 8, 5


class Nodes:
    """All nodes of a graph in one thread, each with one parameter of its own in fp64."""

    def __init__(self, topology: Topology, start: Array, lr: float = 0.1, **settings: Any) -> None:
        self.graph = MemoryGraph(topology)
        self.x = [torch.nn.Parameter(torch.tensor(row)) for row in start]
        self.optimizers = [self.make(number, lr, settings) for number in range(len(start))]

    def make(self, number: int, lr: float, settings: dict[str, Any]) -> SwarmSGD:
        optimizer = make_optimizer("swarm-sgd", [self.x[number]], self.graph.node(number), lr, **settings)
        assert isinstance(optimizer, SwarmSGD)
        return optimizer

    def step(self, node: int, gradient: Gradient) -> None:
        x, optimizer = self.x[node], self.optimizers[node]
        x.grad = torch.tensor(gradient(node, x.detach().numpy().copy(), optimizer.num_steps))
        optimizer.step()

    def run(self, order: Sequence[int], gradient: Gradient) -> Array:
        for node in order:
            self.step(node, gradient)
        return self.values()

    def run_together(self, num_steps: int, gradient: Gradient) -> Array:
        """Each node in a thread of its own."""

        def run(node: int) -> None:
            for _ in range(num_steps):
                self.step(node, gradient)

        run_islands(len(self.x), run)
        return self.values()

    def values(self) -> Array:
        return np.stack([x.detach().numpy().copy() for x in self.x])


def least_squares(n: int = N, d: int = D, spread: float = 1.0) -> tuple[Gradient, Array]:
    """½ Σ h (x - c_i)², a node's own c_i; and the solution of all."""
    rng = np.random.default_rng(1)
    curvature, solutions = np.linspace(0.5, 1.5, d), spread * rng.standard_normal((n, d))
    return lambda node, x, step: curvature * (x - solutions[node]), solutions.mean(0)


def apart(n: int = N, d: int = D) -> Array:
    return np.random.default_rng(2).standard_normal((n, d))


def hashed(seed: int, *numbers: int, size: int) -> bytes:
    return hashlib.blake2b(" ".join(map(str, (seed, *numbers))).encode(), digest_size=size).digest()


def swarm(
    x: Array,
    gradient: Gradient,
    order: Sequence[int],
    neighbours: list[list[int]],
    lr: float,
    momentum: float,
    local_steps: int,
    nesterov: bool = False,
    seed: int = 0,
) -> tuple[Array, int]:
    """The form without waiting, one node after another; and how many averages were left out."""
    x, m, steps, num_left_out = x.copy(), np.zeros_like(x), [0] * len(x), 0
    published: dict[int, Array] = {}
    for i in order:
        published.setdefault(i, x[i].copy())
        g = gradient(i, x[i].copy(), steps[i])
        m[i] = momentum * m[i] + g
        x[i] = x[i] - lr * (g + momentum * m[i] if nesterov else m[i])
        steps[i] += 1
        if steps[i] % local_steps == 0:
            draw = int.from_bytes(hashed(seed, i, steps[i] // local_steps - 1, size=8), "little")
            j = neighbours[i][draw % len(neighbours[i])]
            if j in published:
                x[i] = (x[i] + published[j]) / 2
            else:
                num_left_out += 1
            published[i] = x[i].copy()
    return x, num_left_out


def swarm_in_pairs(
    x: Array,
    gradient: Gradient,
    num_steps: int,
    pairs: Callable[[int], list[tuple[int, int]]],
    lr: float,
    momentum: float,
    local_steps: int,
) -> Array:
    x, m = x.copy(), np.zeros_like(x)
    for step in range(num_steps):
        for i in range(len(x)):
            m[i] = momentum * m[i] + gradient(i, x[i].copy(), step)
        x = x - lr * m
        if (step + 1) % local_steps == 0:
            for i, j in pairs(step // local_steps):
                x[i] = x[j] = (x[i] + x[j]) / 2
    return x


def greedy(edges: list[tuple[int, int]], seed: int) -> Callable[[int], list[tuple[int, int]]]:
    def pairs(number: int) -> list[tuple[int, int]]:
        left, chosen = sorted(edges, key=lambda edge: hashed(seed, number, *edge, size=16)), []
        while left:
            chosen.append(left[0])
            left = [edge for edge in left if not set(edge) & set(chosen[-1])]
        return chosen

    return pairs


RING = [sorted([(i - 1) % N, (i + 1) % N]) for i in range(N)]
EVERYBODY = [[j for j in range(N) if j != i] for i in range(N)]


def in_turns(num_steps: int, n: int = N) -> list[int]:
    return list(range(n)) * num_steps


def shuffled(num_steps: int) -> list[int]:
    """Nodes at their own pace."""
    return np.random.default_rng(3).integers(0, N, N * num_steps).tolist()


# The equation


@pytest.mark.parametrize("make_order", [in_turns, shuffled])
@pytest.mark.parametrize(
    ("graph", "neighbours"), [("ring", RING), ("full", EVERYBODY), ("random-matching", EVERYBODY)]
)
@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "seed": 5}])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_without_waiting_it_is_its_equation(
    make_order: Callable[[int], list[int]],
    graph: str,
    neighbours: list[list[int]],
    settings: dict[str, Any],
    local_steps: int,
) -> None:
    gradient, _ = least_squares()
    order = make_order(30)
    nodes = Nodes(make_topology(graph, N), apart(), momentum=0.8, local_steps=local_steps, **settings)
    ours = nodes.run(order, gradient)
    theirs, num_left_out = swarm(
        apart(), gradient, order, neighbours, lr=0.1, momentum=0.8, local_steps=local_steps, **settings
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert sum(optimizer.num_left_out for optimizer in nodes.optimizers) == num_left_out


@pytest.mark.parametrize("graph", ["ring", "full", "star"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_in_pairs_it_is_its_equation(graph: str, local_steps: int) -> None:
    gradient, _ = least_squares()
    topology, seed = make_topology(graph, N), 4
    pairs: Callable[[int], list[tuple[int, int]]]
    if graph == "full":
        pairs = RandomMatching(N, seed).pairs
    elif graph == "star":
        pairs = greedy([(0, j) for j in range(1, N)], seed)
    else:
        pairs = greedy([(i, i + 1) for i in range(N - 1)] + [(0, N - 1)], seed)
    nodes = Nodes(topology, apart(), momentum=0.8, local_steps=local_steps, blocking=True, seed=seed)
    ours = nodes.run_together(20, gradient)
    theirs = swarm_in_pairs(apart(), gradient, 20, pairs, lr=0.1, momentum=0.8, local_steps=local_steps)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_partners_are_neighbours_drawn_evenly() -> None:
    nodes = Nodes(make_topology("grid", 9), apart(9), seed=1)
    drawn = Counter(nodes.optimizers[4].partner(number) for number in range(4000))
    assert set(drawn) == {1, 3, 5, 7}
    assert all(abs(count - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for count in drawn.values())
    others = [[optimizer.partner(number) for number in range(50)] for optimizer in nodes.optimizers]
    assert len({tuple(draws) for draws in others}) == 9
    assert Nodes(make_topology("grid", 9), apart(9), seed=2).optimizers[4].partner(0) in drawn


def test_threads_that_wait_for_nobody_come_together() -> None:
    """At whatever pace, once all have begun."""
    nodes, have_begun = Nodes(make_topology("ring", N), apart(), lr=0.0, local_steps=2), threading.Barrier(N)

    def run(node: int) -> None:
        nodes.step(node, lambda *_: np.zeros(D))
        have_begun.wait(60)
        for _ in range(499):
            nodes.step(node, lambda *_: np.zeros(D))

    run_islands(N, run)
    assert all(optimizer.num_left_out == 0 for optimizer in nodes.optimizers)
    values = nodes.values()
    assert np.ptp(values, axis=0).max() < np.ptp(apart(), axis=0).min() / 2


def test_a_step_does_not_wait_for_nodes_that_never_come() -> None:
    gradient, _ = least_squares()
    nodes = Nodes(make_topology("ring", N), apart(), local_steps=1)
    nodes.run([0] * 10, gradient)
    assert nodes.optimizers[0].num_left_out == 10


# Special cases


@pytest.mark.parametrize("blocking", [False, True])
def test_a_node_alone_is_momentum_sgd(blocking: bool) -> None:
    gradient, _ = least_squares(1)
    nodes = Nodes(make_topology("full", 1), apart(1), momentum=0.9, nesterov=True, blocking=blocking, weight_decay=0.1)
    x = torch.nn.Parameter(torch.tensor(apart(1)[0]))
    sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    for step in range(20):
        x.grad = torch.tensor(gradient(0, x.detach().numpy(), step))
        sgd.step()
    np.testing.assert_allclose(nodes.run([0] * 20, gradient)[0], x.detach().numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocking", [False, True])
def test_before_the_first_average_nodes_are_on_their_own(blocking: bool) -> None:
    gradient, _ = least_squares()
    nodes = Nodes(make_topology("ring", N), apart(), local_steps=21, blocking=blocking)
    ours = nodes.run(in_turns(20), gradient)  # in one thread: a node that waited would wait for ever
    alone = np.empty((N, D))
    for i in range(N):
        single = Nodes(make_topology("full", 1), apart()[i : i + 1])
        alone[i] = single.run([0] * 20, lambda _, x, step, i=i: gradient(i, x, step))[0]  # type: ignore[misc]
    assert (ours == alone).all()
    assert all(optimizer.traffic.bytes_sent == 0 for optimizer in nodes.optimizers)


def test_nodes_that_agree_stay_together_to_the_last_bit() -> None:
    nodes = Nodes(make_topology("ring", N), np.tile(apart(1), (N, 1)), blocking=True, local_steps=1)
    values = nodes.run_together(10, lambda node, x, step: np.sin(x + step))
    assert (values == values[:1]).all()


@pytest.mark.parametrize("quantization", ["none", "lattice-16", "lattice-8"])
def test_averages_of_equal_models_change_nothing(quantization: str) -> None:
    """Where models are rounded: of such as lie on the lattice."""
    start = np.tile(np.arange(D) / 64, (N, 1)) if quantization != "none" else np.tile(apart(1), (N, 1))
    nodes = Nodes(make_topology("ring", N), start, local_steps=1, quantization=quantization)
    assert (nodes.run(in_turns(5), lambda *_: np.zeros(D)) == start).all()


# Averages


@pytest.mark.parametrize("graph", ["ring", "full", "grid"])
def test_pairs_keep_the_mean(graph: str) -> None:
    nodes = Nodes(make_topology(graph, N), apart(), blocking=True, local_steps=1)
    for _ in range(10):
        values = nodes.run_together(1, lambda *_: np.zeros(D))
        np.testing.assert_allclose(values.mean(0), apart().mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("graph", ["ring", "full"])
def test_pairs_shrink_the_distance_as_rho_says(graph: str) -> None:
    """On the full graph the mean over the draws of |x - mean|² falls by rho² = 3/7; on others by that, or more."""
    topology, ratios = make_topology(graph, N), []
    for seed in range(80):
        nodes = Nodes(topology, apart(), blocking=True, local_steps=1, seed=seed)
        values = nodes.run_together(1, lambda *_: np.zeros(D))
        ratios.append(float(np.var(values, axis=0).sum() / np.var(apart(), axis=0).sum()))
    noise = 3 * float(np.std(ratios)) / math.sqrt(len(ratios))
    if graph == "full":
        assert RandomMatching(N).rho ** 2 == pytest.approx(3 / 7)
        assert np.mean(ratios) == pytest.approx(3 / 7, abs=noise)
    else:
        assert np.mean(ratios) < RandomEdgeMatching(topology).rho ** 2 + noise


def test_without_waiting_nodes_come_together_on_average() -> None:
    """Only averages: (x_i + x_j) / 2 keeps no mean, but stays between the nodes, and its mean moves little."""
    nodes, start = Nodes(make_topology("full", N), apart(), local_steps=1), apart()
    nodes.run(in_turns(1), lambda *_: np.zeros(D))
    before = float(np.var(nodes.values(), axis=0).sum())
    after = nodes.run(in_turns(10), lambda *_: np.zeros(D))
    assert float(np.var(after, axis=0).sum()) < 1e-3 * before
    assert (after >= start.min(0)).all()
    assert (after <= start.max(0)).all()
    final = [
        Nodes(make_topology("full", N), apart(), local_steps=1, seed=seed).run(in_turns(15), lambda *_: np.zeros(D))
        for seed in range(60)
    ]
    means = np.stack([values.mean(0) for values in final])
    error = means.std(0) / math.sqrt(len(final))
    assert (np.abs(means.mean(0) - start.mean(0)) < 6 * error + 0.1).all()


@pytest.mark.parametrize("graph", ["ring", "exponential", "one-peer-exponential"])
def test_matchings_are_of_neighbours_maximal_and_all_links_come_up(graph: str) -> None:
    topology = make_topology(graph, N)
    matching, edges = RandomEdgeMatching(topology, seed=3), links(topology)
    seen = set()
    for step in range(100):
        pairs = matching.pairs(step)
        taken = [node for pair in pairs for node in pair]
        assert len(taken) == len(set(taken))
        assert set(pairs) <= set(edges)
        assert not [edge for edge in edges if not set(edge) & set(taken)], "two neighbours are left over"
        seen.update(pairs)
        weights = matching.weights(step)
        assert np.allclose(weights @ weights, weights)
        assert (weights == weights.T).all()
        assert weights.sum() == N
    assert seen == set(edges)
    assert 0 < matching.rho < 1
    assert [RandomEdgeMatching(topology, seed=3).pairs(step) for step in range(5)] == [
        matching.pairs(step) for step in range(5)
    ]


def test_links_count_both_ways_and_at_all_steps() -> None:
    assert links(make_topology("ring", 4)) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert links(make_topology("random-matching", 3)) == [(0, 1), (0, 2), (1, 2)]
    ends = {(min(i, (i + k) % N), max(i, (i + k) % N)) for i in range(N) for k in (1, 2, 4)}
    assert links(make_topology("exponential", N)) == links(make_topology("one-peer-exponential", N)) == sorted(ends)


def test_the_mean_of_a_run_is_near_the_solution() -> None:
    gradient, solution = least_squares()
    for settings in ({"blocking": False}, {"blocking": True}):
        nodes = Nodes(make_topology("full", N), np.zeros((N, D)), lr=0.02, momentum=0.5, **settings)
        if settings["blocking"]:
            nodes.run_together(600, gradient)
        else:
            nodes.run(in_turns(600), gradient)
        assert np.abs(nodes.values().mean(0) - solution).max() < 0.1, settings


# Quantisation


@pytest.mark.parametrize(
    ("quantization", "step"), [("lattice-16", None), ("lattice-8", 2.0**-6), ("lattice-16", 1e-3)]
)
def test_quantised_runs_end_within_their_rounding(quantization: str, step: float | None) -> None:
    """Each average adds at most ε/4; momentum SGD and averages contract, so that it does not add up beyond a few ε."""
    gradient, _ = least_squares(spread=0.03)
    start, order = np.zeros((N, D)), in_turns(200)
    plain = Nodes(make_topology("ring", N), start, lr=0.05, momentum=0.5).run(order, gradient)
    nodes = Nodes(
        make_topology("ring", N),
        start,
        lr=0.05,
        momentum=0.5,
        quantization=quantization,
        **({} if step is None else {"lattice_step": step}),
    )
    ours = nodes.run(order, gradient)
    step = step or 2 / 65536
    assert sum(optimizer.num_out_of_range for optimizer in nodes.optimizers) == 0
    assert 0 < np.abs(ours - plain).max() < 8 * step


def test_out_of_range_is_left_out_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two blocks; the second is farther apart than 128 ε, and stays each node's own."""
    size = CHECK_VALUES + 10
    start = np.zeros((2, size))
    start[1, :CHECK_VALUES] = 0.1
    start[1, CHECK_VALUES:] = 5.0
    nodes = Nodes(
        make_topology("full", 2), start, quantization="lattice-8", lattice_step=0.01, local_steps=1, momentum=0.0
    )
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        nodes.run([1, 0, 1, 0], lambda *_: np.zeros(size))
    x, y = nodes.values()
    np.testing.assert_allclose(x[:CHECK_VALUES], 0.07, atol=0.03)
    assert (x[CHECK_VALUES:] == 0).all()
    assert (y[CHECK_VALUES:] == 5).all()
    assert [optimizer.num_out_of_range for optimizer in nodes.optimizers] == [2, 1]
    assert [optimizer.num_left_out for optimizer in nodes.optimizers] == [0, 1]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # each node once
    assert "1 of 2 blocks" in said[0]
    assert "lattice_step" in said[0]


def test_a_model_that_is_too_large_for_the_lattice_is_not_published() -> None:
    nodes = Nodes(make_topology("full", 2), apart(2), quantization="lattice-8", local_steps=1)
    nodes.step(1, lambda *_: np.zeros(D))
    with pytest.raises(UnsupportedError, match="too large for lattice_step"):
        nodes.step(0, lambda *_: np.full(D, 1e18))


def test_a_model_that_is_not_finite_is_not_published() -> None:
    nodes = Nodes(make_topology("full", 2), apart(2), local_steps=1)
    nodes.step(1, lambda *_: np.zeros(D))
    nodes.optimizers[0].flat_parameters[0] = torch.nan
    with pytest.raises(ExchangeError, match="the parameters of node 0 are beyond all bounds"):
        nodes.step(0, lambda *_: np.zeros(D))


@pytest.mark.parametrize(("quantization", "num_bytes"), [("none", 8000), ("lattice-16", 2008), ("lattice-8", 1008)])
def test_bytes_are_counted_where_they_are_taken(quantization: str, num_bytes: int) -> None:
    nodes = Nodes(make_topology("full", 2), np.zeros((2, 1000)), quantization=quantization, local_steps=2)
    traffic = []
    for node in [0, 1, 0, 1, 0, 0]:
        nodes.step(node, lambda *_: np.zeros(1000))
        own = nodes.optimizers[node].traffic
        traffic.append((own.bytes_sent, own.bytes_received))
    assert traffic == [(0, 0), (0, 0), (0, num_bytes), (num_bytes, num_bytes), (0, 0), (num_bytes, num_bytes)]


# Over connections


@pytest.mark.parametrize("quantization", ["none", "lattice-16"])
def test_over_connections_it_has_the_bits_that_it_has_in_memory(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order of steps; and once a node is gone, the others go on without it."""
    gradient, _ = least_squares()
    topology, order = make_topology("ring", 4), in_turns(12, 4)
    settings: dict[str, Any] = {"quantization": quantization, "local_steps": 2}
    expected = Nodes(topology, apart(4) / 10, **settings).run(order, gradient)
    store = ValueStore.in_memory()

    def join(node: int) -> MeshPublished:
        end = MeshPublished(Endpoint(store, node, "127.0.0.1", 30), topology.neighbours(node))
        for peer in topology.neighbours(node):
            end.connect(peer, "1.1", 30)
        return end

    ends = run_islands(4, join)
    monkeypatch.setattr(MemoryNeighbours, "published", lambda self: ends[self.node])
    nodes = Nodes(topology, apart(4) / 10, **settings)
    assert (nodes.run(order, gradient) == expected).all()
    ends[3].close()
    nodes.run([0, 1, 2] * 40, gradient)
    left_out = [optimizer.num_left_out for optimizer in nodes.optimizers]
    assert left_out[0] > 1
    assert left_out[1] <= 1, "both of its neighbours are there; it began before one of them"
    for end in ends:
        end.close()


# A torch optimizer


@pytest.mark.parametrize("quantization", ["none", "lattice-16"])
@pytest.mark.parametrize("resume_at", [6, 7])  # after an average, and between two
def test_a_resumed_run_goes_on_bit_for_bit(quantization: str, resume_at: int) -> None:
    gradient, _ = least_squares()
    topology = make_topology("ring", N)
    settings: dict[str, Any] = {"quantization": quantization, "local_steps": 3, "momentum": 0.7}
    straight = Nodes(topology, apart() / 40, **settings).run(in_turns(20), gradient)
    nodes = Nodes(topology, apart() / 40, **settings)
    nodes.run(in_turns(resume_at), gradient)
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in nodes.optimizers])
    resumed = Nodes(topology, nodes.values(), **settings)
    for optimizer, state in zip(resumed.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    assert (resumed.run(in_turns(20 - resume_at), gradient) == straight).all()


def test_a_checkpoint_is_read_without_pickled_objects(tmp_path: Any) -> None:
    nodes = Nodes(make_topology("ring", N), apart())
    nodes.run(in_turns(3), lambda *_: np.ones(D))
    torch.save(nodes.optimizers[0].state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["published"].numel() == 8 * D
    nodes.optimizers[0].load_state_dict(state)


@pytest.mark.parametrize("quantization", ["none", "lattice-8"])
def test_who_returns_begins_without_momentum_and_publishes_where_it_enters(quantization: str) -> None:
    nodes = Nodes(make_topology("ring", N), apart(), quantization=quantization, momentum=0.9)
    nodes.run(in_turns(3), lambda *_: np.ones(D))
    state = copy.deepcopy(nodes.optimizers[0].state_dict())
    back = Nodes(make_topology("ring", N), apart(), quantization=quantization, momentum=0.9)
    optimizer, published = back.optimizers[0], back.graph.node(0).published()
    optimizer.neighbours.is_returning = True
    optimizer.load_state_dict(state)
    assert published.own() is None, "others went on from what it had"
    assert optimizer.begin_at(lambda x: int(x.fill_(0.25).numel()) + 3) == D + 3
    assert optimizer.num_steps == D + 3
    assert published.own() is None
    back.step(0, lambda *_: np.ones(D))
    assert np.allclose(back.values()[0], 0.25 - 0.1)
    expected = Nodes(make_topology("ring", N), np.full((N, D), 0.25), quantization=quantization)
    expected.optimizers[0]._publish(expected.optimizers[0]._x)
    own, theirs = published.own(), expected.graph.node(0).published().own()
    assert own is not None
    assert theirs is not None
    assert torch.equal(own, theirs)


def test_a_state_published_with_another_quantization_is_refused() -> None:
    nodes = Nodes(make_topology("ring", N), apart())
    nodes.run([0], lambda *_: np.ones(D))
    other = Nodes(make_topology("ring", N), apart(), quantization="lattice-8")
    with pytest.raises(CheckpointError, match=r"40 bytes, not 13.*quantization"):
        other.optimizers[0].load_state_dict(nodes.optimizers[0].state_dict())


def test_a_state_without_a_published_model_may_be_loaded() -> None:
    blocking = Nodes(make_topology("ring", N), apart(), blocking=True)
    nodes = Nodes(make_topology("ring", N), apart())
    before = nodes.optimizers[0].param_groups[0]["params"][0].detach().clone()
    nodes.optimizers[0].load_state_dict(blocking.optimizers[0].state_dict())
    nodes.step(0, lambda *_: np.ones(D))
    assert not torch.equal(nodes.optimizers[0].param_groups[0]["params"][0], before)


def test_memory_is_one_vector_of_state_and_two_of_work() -> None:
    nodes = Nodes(make_topology("full", 2), np.zeros((2, 1000)), local_steps=1)
    nodes.run([0, 1, 0], lambda *_: np.zeros(1000))
    optimizer = nodes.optimizers[0]
    vectors = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    assert sum(vector.numel() for vector in vectors) == 2000  # parameters, gradients
    assert optimizer.state[nodes.x[0]]["momentum_buffer"].numel() == 1000


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_steps": 0}, ["local_steps=0", "at least 1"]),
        ({"quantization": "lattice-4"}, ["lattice-4", "none, lattice-16, lattice-8"]),
        ({"lattice_step": 0.1}, ["lattice_step=0.1", "without quantization"]),
        ({"quantization": "lattice-8", "lattice_step": -1.0}, ["lattice_step=-1.0", "positive"]),
        ({"quantization": "lattice-8", "blocking": True}, ["lattice-8", "blocking"]),
        ({"momentum": 1.0}, ["momentum=1.0"]),
        ({"localsteps": 2}, ["did you mean local_steps?"]),
    ],
)
def test_a_wrong_setting_is_one_clear_error(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Nodes(make_topology("ring", N), apart(), **settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_transport_that_cannot_serve_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryNeighbours, "published", Neighbours.published)
    with pytest.raises(UnsupportedError, match="blocking=True"):
        Nodes(make_topology("ring", N), apart())
    Nodes(make_topology("ring", N), apart(), blocking=True)


def test_default_reach() -> None:
    for quantization, reach in (("lattice-8", 0.125), ("lattice-16", 1.0)):
        codec = Nodes(make_topology("ring", N), apart(), quantization=quantization).optimizers[0]._codec
        assert codec is not None
        assert codec.reach == pytest.approx(reach, rel=0.01)


def test_every_pair_of_settings_that_is_allowed_runs() -> None:
    gradient, _ = least_squares()
    for quantization, nesterov, lars in itertools.product(("none", "lattice-8"), (False, True), (0.0, 0.01)):
        nodes = Nodes(
            make_topology("grid", 6), apart(6) / 100, quantization=quantization, nesterov=nesterov, lars=lars
        )
        assert np.isfinite(nodes.run(in_turns(6, 6), gradient)).all()
