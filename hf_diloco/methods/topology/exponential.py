"""Directed exponential graphs: node i receives from i + 1, i + 2, i + 4, … (arXiv 2110.13363).

τ = ⌈log2 n⌉ offsets 2^0 … 2^(τ-1) reach every node in τ steps. Numbers go round: node n is node 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_diloco.methods.topology.base import PeriodicTopology, Weights, check_num_nodes


def exponential(num_nodes: int) -> PeriodicTopology:
    """All offsets at each step: 1/(τ + 1) for itself and for each i + 2^k. Not symmetric for n > 3."""
    check_num_nodes(num_nodes, "exponential")
    return PeriodicTopology("exponential", _circulant(num_nodes, _offsets(num_nodes)))


def one_peer_exponential(num_nodes: int) -> PeriodicTopology:
    """One offset after the other: at step t, ½ for itself and ½ for i + 2^(t mod τ). Not symmetric for n > 2.

    One vector a node and step. After τ steps all nodes hold the exact average, if n is a power of two.
    """
    check_num_nodes(num_nodes, "one-peer-exponential")
    steps = [_circulant(num_nodes, [offset]) for offset in _offsets(num_nodes)]
    return PeriodicTopology("one-peer-exponential", np.stack(steps or [np.eye(num_nodes)]))


def _offsets(num_nodes: int) -> list[int]:
    """2^0 … 2^(τ-1); none for a single node."""
    return [2**k for k in range((num_nodes - 1).bit_length())]


def _circulant(num_nodes: int, offsets: Sequence[int]) -> Weights:
    """Equal weights for itself and for the nodes that so far follow: float64 [num_nodes, num_nodes]."""
    nodes = np.arange(num_nodes)
    weights = np.zeros((num_nodes, num_nodes))
    for offset in (0, *offsets):
        weights[nodes, (nodes + offset) % num_nodes] = 1 / (len(offsets) + 1)
    return weights
