"""Where momentum consensus is stable: the condition, against its recursion and its optimizer, and what is refused.

With omega 0 it is DecentLaM.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

import hf_diloco
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.gossip.momentum_consensus import MomentumConsensus
from hf_diloco.methods.topology import Topology, check_momentum_consensus, largest_stable_beta, make_topology
from hf_diloco.methods.topology.matching import RandomMatching
from hf_diloco.methods.topology.stability import floor_digits, growth
from hf_diloco.trainer.gossip_start import check_gossip
from tests.islands import run_islands

pytestmark = pytest.mark.usefixtures("one_thread")

DIVERGING = [("hypercube", 1.0), ("grid", 1.0), ("one-peer-exponential", 1.0), ("exponential", 0.5)]
"""Graphs of 8 nodes, and the share of momentum that is averaged, with momentum 0.9."""


def iterate(topology: Topology, beta: float, omega: float, num_steps: int) -> float:
    """The mean factor of a step of x⁺ = Wx + β((1 - ω)v + ωWv), without gradients."""
    x = np.random.default_rng(0).standard_normal(topology.num_nodes)
    x -= x.mean()
    v = np.zeros_like(x)
    logarithm = 0.0
    for step in range(num_steps):
        weights = topology.weights(step)
        new = weights @ x + beta * ((1 - omega) * v + omega * weights @ v)
        x, v = new - new.mean(), new - x - (new - x).mean()  # rounding errors
        size = math.hypot(float(np.linalg.norm(x)), float(np.linalg.norm(v)))
        logarithm += math.log(size)
        x, v = x / size, v / size
    return math.exp(logarithm / num_steps)


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("graph", ["ring", "grid", "hypercube", "exponential", "one-peer-exponential"])
def test_growth_is_that_of_the_recursion(graph: str, omega: float) -> None:
    topology = make_topology(graph, 8)
    assert iterate(topology, 0.9, omega, 2000) == pytest.approx(growth(topology, 0.9, omega), rel=5e-3)


def test_matchings_are_unstable_though_symmetric() -> None:
    topology = RandomMatching(8)
    assert floor_digits(largest_stable_beta(topology)) == "0.743"
    assert iterate(topology, 0.9, 0.0, 2000) > 1.03  # not only in the mean square
    assert iterate(topology, 0.7, 0.0, 2000) < growth(topology, 0.7) < 1
    assert growth(topology, 0.0) == pytest.approx(topology.rho)


@pytest.mark.parametrize(("beta", "omega"), [(0.7, 0.0), (0.9, 0.0), (0.3, 0.5), (0.9, 0.5), (0.9, 1.0)])
@pytest.mark.parametrize("num_nodes", [3, 4])
def test_second_moments_of_matchings_are_those_of_the_product(num_nodes: int, beta: float, omega: float) -> None:
    """E[C ⊗ C] over all matchings of few nodes."""
    average, identity = np.full((num_nodes, num_nodes), 1 / num_nodes), np.eye(num_nodes)
    orders = list(permutations(range(num_nodes)))
    mean: Any = 0
    for order in orders:
        weights = np.eye(num_nodes)
        for one, other in zip(order[::2], order[1::2], strict=False):
            weights[[one, one, other, other], [one, other, one, other]] = 0.5
        momentum = beta * ((1 - omega) * identity + omega * (weights - average))
        step = np.block([[weights - average + momentum, -momentum], [identity, 0 * identity]])
        mean = mean + np.kron(step, step) / len(orders)
    radius = np.abs(np.linalg.eigvals(mean)).max()
    assert growth(RandomMatching(num_nodes), beta, omega) ** 2 == pytest.approx(radius, rel=1e-6)


def test_the_largest_momentum_of_symmetric_graphs_follows_from_the_smallest_eigenvalue() -> None:
    """1 + w + 2β((1 - ω) + ωw) > 0: with ω = 1 w > -1 / (1 + 2β), with ω up to ½ any w."""
    for graph in ("ring", "grid", "star", "hypercube", "symmetric-exponential"):
        topology = make_topology(graph, 16)
        smallest = float(np.linalg.eigvalsh(topology.weights()).min())
        bound = (1 + smallest) / (-2 * smallest) if smallest < 0 else 1.0
        assert largest_stable_beta(topology, 1.0) == pytest.approx(min(1.0, bound), abs=1e-6)
        assert largest_stable_beta(topology, 0.5) == 1
        assert growth(topology, 0.999, 0.5) < 1


def after(graph: str, num_steps: int, **settings: Any) -> float:
    """The largest value of 8 nodes after so many steps on f_i(x) = ½|x - c_i|²; the momentum is set behind the check,
    as a schedule would."""
    ground = MemoryGraph(make_topology(graph, 8))
    solutions = torch.tensor(np.random.default_rng(1).standard_normal((8, 3)))

    def node(number: int) -> float:
        x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = make_optimizer("momentum-consensus", [x], ground.node(number), 0.05, momentum=0.0, **settings)
        optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(num_steps):
            x.grad = x.detach() - solutions[number]
            optimizer.step()
        return float(x.detach().abs().max())

    return max(run_islands(8, node))


def test_the_defaults_come_to_rest_on_a_hypercube_where_full_sharing_diverges() -> None:
    assert after("hypercube", 200) < 2
    assert after("hypercube", 200, omega=1.0) > 1e6


@pytest.mark.parametrize(("graph", "omega"), DIVERGING)
def test_a_pair_that_diverges_is_refused_by_optimizer_run_file_and_callback(graph: str, omega: float) -> None:
    x = [torch.nn.Parameter(torch.zeros(2))]
    node = MemoryGraph(make_topology(graph, 8)).node(0)
    words = f"momentum consensus diverges on {graph} with 8 nodes"
    with pytest.raises(ConfigError, match=words):
        MomentumConsensus(x, node, 0.1, omega=omega)
    with pytest.raises(ConfigError, match=words):
        MomentumConsensus([{"params": x, "momentum": 0.9}], node, 0.1, momentum=0.0, omega=omega)
    settings: dict[str, Any] = {
        "method": "momentum-consensus",
        "topology": graph,
        "options": {"omega": omega},
        "num_nodes": 8,
        "rendezvous": "tcp://127.0.0.1:29400",
    }
    with pytest.raises(ConfigError, match=words):
        check_gossip(GossipConfig(**settings))
    with pytest.raises(ConfigError, match=words):
        hf_diloco.GossipCallback(**settings)


def test_the_remedy_is_one_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"take options: \{omega: 0\.5\}; or momentum up to 0\.499; or QG-DmSGD"):
        check_momentum_consensus(make_topology("hypercube", 8), 0.9, 1.0)
    check_momentum_consensus(make_topology("hypercube", 8), 0.9, 0.5)
    check_momentum_consensus(make_topology("hypercube", 8), 0.499, 1.0)
    with pytest.raises(ConfigError, match=r"take a symmetric graph that does not change; or momentum up to 0\.740"):
        check_momentum_consensus(make_topology("exponential", 8), 0.9, 0.5)
    check_momentum_consensus(make_topology("symmetric-exponential", 8), 0.9, 0.5)
