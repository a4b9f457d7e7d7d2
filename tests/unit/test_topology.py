"""Graphs of decentralised training: their weights, what is refused, where DecentLaM is stable, and the command."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from hf_diloco.cli.main import app
from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology import (
    GRAPHS,
    PeriodicTopology,
    RandomMatching,
    Topology,
    check_decentlam,
    from_file,
    from_graph,
    from_weights,
    largest_stable_beta,
    make_topology,
)
from hf_diloco.methods.topology.base import Weights
from hf_diloco.methods.topology.drawing import draw
from hf_diloco.methods.topology.stability import floor_digits, growth
from tests.processes import ROOT, run

SIZES = (8, 16, 32, 64)
RHO = {
    "ring": ".8047/.9493/.9872/.9968",
    "grid": ".8536/.8686/.9658/.9677",
    "star": ".8750/.9375/.9688/.9844",
    "hypercube": ".5/.6/.6667/.7143",
    "exponential": ".5/.6/.6667/.7143",
    "symmetric-exponential": ".3333/.5/.6/.6667",
    "one-peer-exponential": "0/0/0/0",
    "random-matching": ".6547/.6831/.6956/.7015",
    "full": "0/0/0/0",
}
DIRECTED = {"exponential", "one-peer-exponential"}
CHANGING = {"one-peer-exponential", "random-matching"}

names = st.sampled_from(sorted(GRAPHS))
counts = st.integers(1, 40)


def make(name: str, num_nodes: int, seed: int = 0) -> Topology:
    """The graph; a hypercube of the next smaller power of two."""
    return make_topology(name, 2 ** (num_nodes.bit_length() - 1) if name == "hypercube" else num_nodes, seed)


# Weights


@pytest.mark.parametrize("name", GRAPHS)
def test_rho_is_that_of_the_table(name: str) -> None:
    assert RHO.keys() == GRAPHS.keys()
    for num_nodes, text in zip(SIZES, RHO[name].split("/"), strict=True):
        topology = make_topology(name, num_nodes)
        assert topology.rho == pytest.approx(float(text), abs=5.001e-5)
        assert topology.spectral_gap == 1 - topology.rho


@given(names, counts, st.integers(0, 3), st.integers(0, 50))
def test_weights_are_doubly_stochastic(name: str, num_nodes: int, seed: int, step: int) -> None:
    topology = make(name, num_nodes, seed)
    weights = topology.weights(step)
    assert weights.dtype == np.float64
    assert weights.shape == (topology.num_nodes, topology.num_nodes)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=0, atol=1e-14)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=0, atol=1e-14)
    assert (weights.diagonal() > 0).all()
    assert not weights.flags.writeable
    topology.check()


@given(names, counts)
def test_what_graphs_say_of_themselves_is_so(name: str, num_nodes: int) -> None:
    topology = make(name, num_nodes)
    assert topology.name == name
    assert topology.is_static == (topology.period == 1)
    if topology.num_nodes > 3:
        assert topology.is_static == (name not in CHANGING)
        assert topology.is_symmetric == (name not in DIRECTED)
    steps = [topology.weights(step) for step in range(topology.period or 5)]
    assert topology.is_symmetric == all(np.allclose(weights, weights.T, atol=1e-12) for weights in steps)
    assert 0 <= topology.rho < 1
    if topology.period is not None:
        assert topology.weights(topology.period) is not None
        np.testing.assert_array_equal(topology.weights(topology.period), topology.weights(0))


@given(names, counts, st.integers(0, 9))
def test_neighbours_are_those_with_weights(name: str, num_nodes: int, step: int) -> None:
    topology = make(name, num_nodes)
    weights = topology.weights(step)
    nodes = range(topology.num_nodes)
    for node in nodes:
        assert topology.neighbours(node, step) == tuple(j for j in nodes if weights[node, j] and j != node)
        assert topology.receivers(node, step) == tuple(j for j in nodes if weights[j, node] and j != node)


def metropolis_by_hand(edges: set[tuple[int, int]], num_nodes: int) -> Weights:
    links = edges | {(b, a) for a, b in edges}
    degrees = [1 + sum(a == node for a, _ in links) for node in range(num_nodes)]
    weights = np.zeros((num_nodes, num_nodes))
    for a, b in links:
        weights[a, b] = 1 / max(degrees[a], degrees[b])
    return weights + np.diag(1 - weights.sum(axis=1))


BY_HAND: list[tuple[str, int, Any]] = [
    ("ring", 2, [[0.5, 0.5], [0.5, 0.5]]),
    ("ring", 4, np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3),
    ("grid", 6, metropolis_by_hand({(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)}, 6)),
    ("grid", 3, metropolis_by_hand({(0, 1), (1, 2)}, 3)),
    ("star", 4, np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4),
    ("hypercube", 4, np.array([[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]) / 3),
    ("full", 2, [[0.5, 0.5], [0.5, 0.5]]),
]


@pytest.mark.parametrize(("name", "num_nodes", "expected"), BY_HAND)
def test_weights_by_hand(name: str, num_nodes: int, expected: Any) -> None:
    np.testing.assert_allclose(make_topology(name, num_nodes).weights(), expected, rtol=0, atol=1e-15)


def test_exponential_graphs_receive_from_powers_of_two_away() -> None:
    assert make_topology("exponential", 6).neighbours(3) == (1, 4, 5)  # 3 + 4, 3 + 1, 3 + 2
    assert make_topology("exponential", 6).receivers(3) == (1, 2, 5)
    assert make_topology("exponential", 6).weights()[3, 3] == 0.25
    assert make_topology("symmetric-exponential", 8).neighbours(0) == (1, 2, 4, 6, 7)
    assert make_topology("symmetric-exponential", 8).weights()[0, 4] == pytest.approx(1 / 6)
    one_peer = make_topology("one-peer-exponential", 6)
    assert one_peer.period == 3
    assert [one_peer.neighbours(3, step) for step in range(4)] == [(4,), (5,), (1,), (4,)]
    assert one_peer.weights(1)[3, 5] == 0.5
    assert make_topology("hypercube", 8).neighbours(5) == (1, 4, 7)


@pytest.mark.parametrize("exponent", range(1, 7))
def test_one_peer_exponential_is_the_exact_average_after_a_period(exponent: int) -> None:
    num_nodes = 2**exponent
    topology = make_topology("one-peer-exponential", num_nodes)
    assert topology.period == exponent
    values = np.random.default_rng(exponent).integers(0, 1000, size=(num_nodes, 3)).astype(np.float64)
    averaged = values
    for step in range(5, 5 + exponent):  # wherever it begins
        averaged = topology.weights(step) @ averaged
    np.testing.assert_array_equal(averaged, np.broadcast_to(values.mean(axis=0), values.shape))
    assert topology.rho == 0


def test_one_peer_exponential_of_other_numbers_is_not() -> None:
    topology = make_topology("one-peer-exponential", 6)
    product = topology.weights(2) @ topology.weights(1) @ topology.weights(0)
    distance = product - 1 / 6
    assert topology.rho == pytest.approx(np.abs(np.linalg.eigvals(distance)).max() ** (1 / 3))
    assert topology.rho > 0.5


# Random matchings


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 100))
def test_a_matching_is_an_involution(num_nodes: int, seed: int, step: int) -> None:
    topology = RandomMatching(num_nodes, seed)
    partner = {one: other for pair in topology.pairs(step) for one, other in (pair, pair[::-1])}
    assert all(partner[partner[node]] == node != partner[node] for node in partner)
    assert len(partner) == num_nodes - num_nodes % 2
    for node in range(num_nodes):
        assert topology.neighbours(node, step) == ((partner[node],) if node in partner else ())
    weights = topology.weights(step)
    np.testing.assert_array_equal(weights @ weights, weights)


def test_matchings_are_the_same_everywhere() -> None:
    assert RandomMatching(6).pairs(0) == [(3, 4), (2, 0), (1, 5)]
    assert RandomMatching(6, seed=1).pairs(0) == [(0, 1), (2, 5), (3, 4)]
    assert RandomMatching(5).pairs(7) == [(0, 1), (3, 2)]


@pytest.mark.parametrize("num_nodes", [4, 5])
def test_matchings_are_equally_likely_and_cover_over_time(num_nodes: int) -> None:
    topology = RandomMatching(num_nodes, seed=2)
    drawn = [frozenset(frozenset(pair) for pair in topology.pairs(step)) for step in range(3000)]
    every = {frozenset(frozenset(order[i : i + 2]) for i in (0, 2)) for order in permutations(range(num_nodes))}
    assert set(drawn) == every
    expected = len(drawn) / len(every)
    assert all(abs(drawn.count(matching) - expected) < 6 * math.sqrt(expected) for matching in every)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6])
def test_rho_of_matchings_is_the_root_mean_square(num_nodes: int) -> None:
    orders = list(permutations(range(num_nodes)))
    mean = np.zeros((num_nodes, num_nodes))
    for order in orders:
        weights = np.eye(num_nodes)
        for one, other in zip(order[::2], order[1::2], strict=False):
            weights[[one, one, other, other], [one, other, one, other]] = 0.5
        mean += weights.T @ weights / len(orders)
    assert make_topology("random-matching", num_nodes).rho ** 2 == pytest.approx(
        np.linalg.norm(mean - 1 / num_nodes, 2), abs=1e-12
    )


# Names


@pytest.mark.parametrize(
    ("name", "num_nodes", "message"),
    [
        ("rnig", 8, r"'rnig': no such graph \(did you mean ring\?\); there are ring, grid"),
        ("zzz", 8, r"'zzz': no such graph; there are ring"),
        ("hypercube", 12, "num_nodes=12: a hypercube has a power of two: take 8 or 16, or symmetric-exponential"),
        ("ring", None, "'ring': num_nodes is missing"),
        ("missing.csv", None, "missing.csv: No such file"),
        *((name, 0, "num_nodes=0") for name in GRAPHS),
    ],
)
def test_what_cannot_be_made(name: str, num_nodes: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_topology(name, num_nodes)


def test_underscores_will_do() -> None:
    assert make_topology("one_peer_exponential", 4).name == "one-peer-exponential"


# Own weights

PATH = [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]
SWAP = [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], r"shape \(2,\)"),
        ([], r"shape \(0,\)"),
        ([[[]]], r"shape \(1, 1, 0\)"),
        ([[0.5, 0.5], [1.0]], "no matrix of numbers"),
        ([["a"]], "no matrix of numbers"),
        ([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], r"shape \(2, 3\): give a row and a column for each node"),
        ([[0.5, math.nan], [0.5, 0.5]], r"\[0, 1\] is nan: not finite"),
        ([[0.5, 0.5], [math.inf, 0.5]], r"\[1, 0\] is inf: not finite"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"\[0, 1\] is -0.5: negative"),
        ([[0.5, 0.5], [0.4, 0.5]], "row 1 sums to 0.9"),
        ([[0.5, 0.5], [0.6, 0.4]], "column 0 sums to 1.1"),
        (np.full((3, 3), 1 / 3, dtype=np.float32), "within 1e-09"),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), "not connected: nothing goes between node 0 and nodes 2, 3; add"),
        (SWAP, "rho is 1: nodes pass vectors on"),
        ([SWAP, SWAP], "rho is 1"),
        ([PATH, np.eye(3) * 2], "row 0 sums to 2"),
    ],
)
def test_own_weights_are_refused_with_the_reason(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^mine: .*{message}"):
        from_weights(weights, "mine")


def test_own_weights_may_change() -> None:
    first, second = np.eye(4), np.eye(4)
    first[:2, :2] = first[2:, 2:] = 0.5
    second[np.ix_([0, 2], [0, 2])] = second[np.ix_([1, 3], [1, 3])] = 0.5
    topology = from_weights([first, second])  # neither is connected, both together are
    assert (topology.period, topology.is_static, topology.is_symmetric, topology.rho) == (2, False, True, 0)
    assert [topology.neighbours(0, step) for step in range(3)] == [(1,), (2,), (1,)]


def write_npy(path: Path) -> None:
    np.save(path, np.array(PATH))


def write_csv(path: Path) -> None:
    path.write_text("0.5,0.5,0\n0.5,0.25,.25\n0, 0.25, 0.75\n\n")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(PATH))


@pytest.mark.parametrize(("suffix", "write"), [(".npy", write_npy), (".csv", write_csv), (".json", write_json)])
def test_own_weights_from_files(tmp_path: Path, suffix: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    for topology in (from_file(path), make_topology(str(path)), make_topology(str(path), 3)):
        np.testing.assert_array_equal(topology.weights(), PATH)
        assert topology.name == str(path)
    with pytest.raises(ConfigError, match=r"num_nodes=4: .* has weights of 3 nodes"):
        make_topology(str(path), 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"0.5;0.5\n0.5;0.5\n", "not read as csv"),
        ("a.csv", b"0.5,0.5\n1\n", "not read as csv"),
        ("a.csv", b"", "shape"),
        ("a.json", b"[[1.0]", "not read as json"),
        ("a.json", b'{"a": 1}', "no matrix of numbers"),
        ("a.npy", b"\xff\xfe", "not read as npy"),
        ("a.txt", b"1", "files that end in .npy, .csv, .json"),
    ],
)
def test_files_that_hold_no_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npy"
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="not read as npy"):
        from_file(path)


def test_networkx_graphs_have_metropolis_weights() -> None:
    petersen = from_graph(nx.petersen_graph())
    assert petersen.neighbours(0) == (1, 4, 5)
    assert petersen.weights()[0, 0] == petersen.weights()[0, 1] == 0.25
    labelled = from_graph(nx.Graph([("b", "a"), ("a", "c"), ("a", "a")]))  # b, a, c: a line with a in the middle
    np.testing.assert_allclose(labelled.weights(), metropolis_by_hand({(0, 1), (1, 2)}, 3), atol=1e-15)
    shuffled = from_graph(nx.Graph([(2, 0), (0, 1)]))
    np.testing.assert_allclose(shuffled.weights(), metropolis_by_hand({(0, 1), (0, 2)}, 3), atol=1e-15)
    np.testing.assert_array_equal(from_graph(nx.cycle_graph(8)).weights(), make_topology("ring", 8).weights())


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.DiGraph([(0, 1), (1, 0)]), "directed"),
        (nx.Graph(), "without nodes"),
        (nx.Graph([(0, 1), (2, 3)]), "not connected"),
    ],
)
def test_networkx_graphs_that_are_refused(graph: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_graph(graph)


@given(st.integers(2, 12), st.integers(0, 1000))
def test_rho_is_how_fast_nodes_come_to_their_mean(num_nodes: int, seed: int) -> None:
    mixture = np.random.default_rng(seed).dirichlet(np.ones(4))
    matrices = [np.eye(num_nodes)[np.random.default_rng([seed, k]).permutation(num_nodes)] for k in range(3)]
    weights = sum((m * part for m, part in zip(matrices, mixture, strict=False)), start=mixture[3] * np.eye(num_nodes))
    topology = PeriodicTopology("mixture", weights)
    moduli = sorted(np.abs(np.linalg.eigvals(weights)))
    assert topology.rho == pytest.approx(moduli[-2], abs=1e-4)


# Stability of DecentLaM

STABLE = {  # by a scan in steps of 0.01; n = 4, 8, 16, 32
    "exponential": (0.63, 0.51, 0.49, 0.51),
    "one-peer-exponential": (0.76, 0.70, 0.55, 0.51),
}


@pytest.mark.parametrize("name", STABLE)
def test_largest_stable_momentum_is_that_which_is_known(name: str) -> None:
    for num_nodes, known in zip((4, 8, 16, 32), STABLE[name], strict=True):
        largest = largest_stable_beta(make_topology(name, num_nodes))
        assert math.floor(100 * largest) / 100 == known
        assert (
            growth(make_topology(name, num_nodes), largest - 1e-4)
            < 1
            < growth(make_topology(name, num_nodes), largest + 1e-4)
        )


@given(names.filter(lambda name: name not in CHANGING | DIRECTED), st.integers(1, 24))
def test_symmetric_graphs_that_do_not_change_are_stable(name: str, num_nodes: int) -> None:
    topology = make(name, num_nodes)
    assert largest_stable_beta(topology) == 1
    check_decentlam(topology, 0.99)
    assert growth(topology, 0.99) < 1


@given(st.complex_numbers(max_magnitude=1, allow_nan=False), st.floats(0, 0.999))
def test_the_condition_is_that_the_roots_are_inside_the_circle(eigenvalue: complex, beta: float) -> None:
    radius = np.abs(np.roots([1, -(eigenvalue + beta), beta])).max()
    if abs(radius - 1) > 1e-6:
        rotation = np.array([[eigenvalue.real, -eigenvalue.imag], [eigenvalue.imag, eigenvalue.real]])
        assert (growth(PeriodicTopology("of one eigenvalue", rotation + 1 / 2), beta) < 1) == (radius < 1)


def relabelled(topology: PeriodicTopology, seed: int) -> PeriodicTopology:
    """The same graph with other numbers, and so no longer circulant."""
    order = np.random.default_rng(seed).permutation(topology.num_nodes)
    return from_weights(topology.matrices[:, order][:, :, order])


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.6, 0.9])
def test_growth_does_not_depend_on_the_numbers_of_nodes(name: str, beta: float) -> None:
    topology = make_topology(name, 12)
    assert isinstance(topology, PeriodicTopology)
    assert growth(relabelled(topology, 1), beta) == pytest.approx(growth(topology, beta), rel=1e-6)


def test_remedies() -> None:
    topology = make_topology("exponential", 8)
    weights = topology.weights()
    with pytest.raises(ConfigError) as caught:
        check_decentlam(topology, 0.9)
    for words in ("0.9", "exponential with 8 nodes", "symmetric graph", "(W + Wᵀ)/2", "up to 0.519", "QG-DmSGD"):
        assert words in str(caught.value)
    check_decentlam(topology, 0.519)
    check_decentlam(from_weights((weights + weights.T) / 2), 0.9)
    with pytest.raises(ConfigError):
        check_decentlam(from_weights((np.eye(8) + weights) / 2), 0.9)  # which does not help
    with pytest.raises(ConfigError, match=r"up to 0\.743") as caught:
        check_decentlam(RandomMatching(8), 0.9)
    assert "(W + Wᵀ)/2" not in str(caught.value)
    one_peer = np.stack([make_topology("one-peer-exponential", 16).weights(step) for step in range(4)])
    assert floor_digits(largest_stable_beta(from_weights((one_peer + one_peer.transpose(0, 2, 1)) / 2))) == "0.588"
    for beta in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match="from 0 to below 1"):
            check_decentlam(topology, beta)


def test_stability_of_a_topology_of_an_unknown_kind() -> None:
    class Drawn(RandomMatching):
        pass

    class Other(Topology):
        name, num_nodes, is_symmetric, rho = "other", 8, False, 0.5

        def __init__(self, period: int | None) -> None:
            self.period = period

        def weights(self, step: int = 0) -> Weights:
            return like.weights(step)

    like = make_topology("one-peer-exponential", 8)
    assert growth(Drawn(4), 0.5) < 1
    assert growth(Other(like.period), 0.5) == growth(like, 0.5)
    with pytest.raises(ConfigError, match=r"other: its weights are drawn.*give it a period"):
        check_decentlam(Other(None), 0.5)
    check_decentlam(Other(None), 0.0)


# The package and the command


def command(*arguments: str | Path, width: int = 100) -> str:
    """What the command prints, in this process."""
    told = ["topology", *map(str, arguments)]
    return CliRunner().invoke(app, told, env={"NO_COLOR": "1", "COLUMNS": f"{width}"}, catch_exceptions=False).output


def lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip().splitlines()]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import hf_diloco.gossip", "numpy torch networkx matplotlib"),
        ("import hf_diloco.methods.topology as t; t.RandomMatching(4).weights()", "torch networkx matplotlib"),
        (
            "from hf_diloco.cli.main import app; app(['topology', '--help'], standalone_mode=False)",
            "numpy torch networkx matplotlib",
        ),
    ],
)
def test_imports_are_cheap(code: str, heavy: str) -> None:
    run(
        [sys.executable, "-c", f"import sys; {code}; assert not set('{heavy}'.split()) & set(sys.modules)"], timeout=60
    )


def test_the_command_prints_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "topology.md").read_text()
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    output = lines(command("ring", "--num-nodes", "8"))
    assert output[: len(lines(shown))] == lines(shown)
    assert output[-1] == "   7  1/3    ·    ·    ·    ·    ·  1/3  1/3   0, 6"
    assert lines(command("ring", width=40))[-1] == output[-1], "a narrow terminal breaks lines, and cuts no figures"


def test_the_command_shows_the_steps_of_weights_that_change() -> None:
    output = command("one-peer-exponential", "--parameters", "1b")
    assert "not symmetric, come again after 3 steps" in output
    assert "0.0000; spectral gap 1.0000: the exact average after 3 steps" in output
    assert "4.00 GB a step; in a ring all-reduce 7.00 GB" in output
    assert "stable with momentum up to 0.706" in output
    assert re.findall(r"^(step \d) .*sends to", output, re.MULTILINE) == ["step 0", "step 1", "step 2"]


def test_json_with_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "graph.png"
    output = command("star", "--num-nodes", "4", "--parameters", "1000", "--json", "--draw", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 3000
    assert f"wrote {path}\n" in output
    figures = json.loads(output.replace(f"wrote {path}\n", ""))
    assert figures["steps"][0]["weights"] == make_topology("star", 4).weights().tolist()
    assert figures["steps"][0]["sends_to"] == [[1, 2, 3], [0], [0], [0]]
    assert (figures["bytes_per_step"], figures["most_bytes_per_step"]) == (6000, 12000)
    assert figures["all_reduce_bytes"] == 6000
    assert (figures["period"], figures["largest_stable_beta"], figures["is_symmetric"]) == (1, 1.0, True)
    assert figures["rho"] == pytest.approx(0.75)


@pytest.mark.parametrize(("suffix", "head"), [(".svg", b"<?xml"), (".png", b"\x89PNG\r\n\x1a\n"), (".pdf", b"%PDF")])
@pytest.mark.parametrize("name", GRAPHS)
def test_pictures(name: str, suffix: str, head: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"graph{suffix}"
    draw(make_topology(name, 4), path)
    assert path.read_bytes().startswith(head)
    assert path.stat().st_size > 2000


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_pictures_of_few_nodes(num_nodes: int, tmp_path: Path) -> None:
    for name in GRAPHS:
        draw(make_topology(name, num_nodes), path := tmp_path / f"{name}.svg")
        assert path.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("name", ["grid", "one-peer-exponential", "random-matching"])
def test_equal_graphs_are_equal_pictures(name: str, tmp_path: Path) -> None:
    for file in ("a.svg", "b.svg"):
        draw(make_topology(name, 6), tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_command_takes_own_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    write_csv(path)
    output = command(path)
    assert re.search(r"3\s+nodes", output)
    assert "   1  1/2  1/4  1/4   0, 2" in output


def test_the_command_takes_an_own_graph_that_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from hf_diloco.methods.topology import RandomMatching, Topology\n"
        "class Own(Topology):\n"
        "    name, period, is_symmetric, rho = 'own', None, True, 0.5\n"
        "    def __init__(self, num_nodes):\n"
        "        self.num_nodes, self.drawn = num_nodes, RandomMatching(num_nodes)\n"
        "    def weights(self, step=0):\n"
        "        return self.drawn.weights(step)\n"
    )
    own = f"{tmp_path / 'own.py'}:Own"
    assert "not known with which momentum it is stable" in command(own)
    assert json.loads(command(own, "--json"))["largest_stable_beta"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnig"], "did you mean ring"),
        (["ring", "--draw", "missing/graph.png"], "there is no folder missing: create it, or give another file"),
        (["hypercube", "--num-nodes", "9"], "power of two"),
        (["ring", "--parameters", "inf"], "--parameters inf: give a number of parameters, as 350M, 7b"),
        (["nothing.json"], "nothing.json: No such file"),
        (["ring", "--draw", "ring.txt"], "ring.txt: pictures are files that end in .png, .svg, .pdf"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command(*arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# docs/topology.md


def rows_of_page(heading: str) -> dict[str, list[str]]:
    section = (ROOT / "docs" / "topology.md").read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    return {name: rest.strip(" |").split(" | ") for name, rest in re.findall(r"^\| `(\S+)` \|(.*)$", section, re.M)}


def test_the_page_has_every_graph_and_its_rho() -> None:
    rows = rows_of_page("The graphs")
    assert rows.keys() == GRAPHS.keys()
    for name, (_, _, symmetric, *rhos) in rows.items():
        topologies = [make_topology(name, num_nodes) for num_nodes in SIZES]
        assert rhos == [f"{topology.rho:.4f}" if topology.rho else "0" for topology in topologies]
        assert symmetric == ("yes" if topologies[0].is_symmetric else "no")


def test_the_page_has_the_largest_stable_momenta() -> None:
    rows = rows_of_page("Momentum: where DecentLaM is stable")
    assert rows.keys() == DIRECTED | CHANGING
    for name, shown in rows.items():
        topologies = [make_topology(name, num_nodes) for num_nodes in (4, 8, 16, 32)]
        assert shown == [floor_digits(largest_stable_beta(topology)) for topology in topologies]
