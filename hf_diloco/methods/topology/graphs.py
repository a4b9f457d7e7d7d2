"""The named graphs, except random matchings.

Most of them never change, and their links go both ways: they have Metropolis weights. Exponential graphs are directed:
node i receives from i + 1, i + 2, i + 4, … (arXiv 2110.13363). The τ = ⌈log2 n⌉ offsets 2^0 … 2^(τ-1) reach every node
in τ steps. Node numbers are modulo n: node n is node 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import PeriodicTopology, Weights, check_num_nodes, graph

if TYPE_CHECKING:
    from networkx import Graph


def metropolis(graph: Graph) -> Weights:
    """Returns Metropolis-Hastings weights: symmetric and doubly stochastic on any graph.

        w_ij = 1 / max(d_i, d_j) for neighbours i, j;  w_ii = 1 - Σ_j w_ij

    with degrees d that count the node itself. So on a regular graph a node gives itself and each neighbour the same
    weight. Loops, parallel edges and edge weights are ignored.

    Args:
        graph: undirected; rows and columns of the result, float64 [num_nodes, num_nodes], are in its order.
    """
    number = {node: index for index, node in enumerate(graph)}
    degrees = {node: len({node, *graph[node]}) for node in graph}
    weights = np.zeros((len(number), len(number)))
    for one, other in graph.edges():
        if one != other:
            weight = 1 / max(degrees[one], degrees[other])
            weights[number[one], number[other]] = weights[number[other], number[one]] = weight
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


@graph("ring")
def ring(num_nodes: int) -> PeriodicTopology:
    """Each node and the nodes on either side: ⅓ each. 1 - rho falls with the square of the number of nodes."""
    return _metropolis("ring", num_nodes, lambda nx: nx.cycle_graph(num_nodes))


@graph("grid")
def grid(num_nodes: int) -> PeriodicTopology:
    """Rows and columns, as close to a square as the factors of `num_nodes` allow, numbered by row; a prime: a line.

    Nodes on the border have fewer neighbours: 2 to 4.
    """
    return _metropolis("grid", num_nodes, lambda nx: nx.grid_2d_graph(*grid_shape(num_nodes)))


def grid_shape(num_nodes: int) -> tuple[int, int]:
    """Returns rows and columns of the grid: the two factors that are closest, the smaller one first."""
    rows = next(rows for rows in range(math.isqrt(num_nodes), 0, -1) if num_nodes % rows == 0)
    return rows, num_nodes // rows


@graph("star")
def star(num_nodes: int) -> PeriodicTopology:
    """Node 0 and all others, 1/n for each link. Node 0 sends and receives n - 1 vectors."""
    return _metropolis("star", num_nodes, lambda nx: nx.star_graph(num_nodes - 1))


@graph("hypercube")
def hypercube(num_nodes: int) -> PeriodicTopology:
    """Each node and the nodes whose numbers differ from its own in one bit: 1/(τ + 1) each.

    Raises:
        ConfigError: `num_nodes` is not a power of two, 2^τ.
    """
    dimension = num_nodes.bit_length() - 1
    if num_nodes > 0 and num_nodes != 2**dimension:
        raise ConfigError(
            f"num_nodes={num_nodes}: a hypercube has a power of two: take {2**dimension} or {2 ** (dimension + 1)}, "
            "or symmetric-exponential, which has any number"
        )
    return _metropolis(
        "hypercube", num_nodes, lambda nx: nx.hypercube_graph(dimension) if dimension else nx.empty_graph(1)
    )


@graph("symmetric-exponential")
def symmetric_exponential(num_nodes: int) -> PeriodicTopology:
    """Each node and the nodes 1, 2, 4, … (below `num_nodes`) away on either side: equal weights."""
    return _metropolis(
        "symmetric-exponential", num_nodes, lambda nx: nx.circulant_graph(num_nodes, _offsets(num_nodes))
    )


@graph("full")
def full(num_nodes: int) -> PeriodicTopology:
    """Each node and all others: 1/n each. Every step gives the exact average; each node sends n - 1 vectors."""
    return _metropolis("full", num_nodes, lambda nx: nx.complete_graph(num_nodes))


@graph("exponential")
def exponential(num_nodes: int) -> PeriodicTopology:
    """All offsets at each step: 1/(τ + 1) for node i itself and for each node i + 2^k. Not symmetric for n > 3."""
    check_num_nodes(num_nodes, "exponential")
    return PeriodicTopology("exponential", _circulant(num_nodes, _offsets(num_nodes)))


@graph("one-peer-exponential")
def one_peer_exponential(num_nodes: int) -> PeriodicTopology:
    """One offset per step: at step t, ½ for node i itself and ½ for node i + 2^(t mod τ). Not symmetric for n > 2.

    Each node sends one vector per step. If n is a power of two, all nodes hold the exact average after τ steps.
    """
    check_num_nodes(num_nodes, "one-peer-exponential")
    steps = [_circulant(num_nodes, [offset]) for offset in _offsets(num_nodes)]
    return PeriodicTopology("one-peer-exponential", np.stack(steps or [np.eye(num_nodes)]))


def _metropolis(name: str, num_nodes: int, make: Callable[[Any], Graph]) -> PeriodicTopology:
    """Makes a graph with Metropolis weights. Nodes are numbered in sorted order: a grid by row, a hypercube by bits.

    `make` gets the module networkx, which is not imported with this file.
    """
    import networkx as nx

    check_num_nodes(num_nodes, name)
    return PeriodicTopology(name, metropolis(nx.convert_node_labels_to_integers(make(nx), ordering="sorted")))


def _offsets(num_nodes: int) -> list[int]:
    """Returns 2^0 … 2^(τ-1); nothing for a single node."""
    return [2**k for k in range((num_nodes - 1).bit_length())]


def _circulant(num_nodes: int, offsets: Sequence[int]) -> Weights:
    """Returns equal weights for each node and the nodes at these offsets: float64 [num_nodes, num_nodes]."""
    nodes = np.arange(num_nodes)
    weights = np.zeros((num_nodes, num_nodes))
    for offset in (0, *offsets):
        weights[nodes, (nodes + offset) % num_nodes] = 1 / (len(offsets) + 1)
    return weights
