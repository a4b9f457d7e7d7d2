"""Random matchings: at each step nodes pair off anew, and each pair averages."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from hf_diloco.gossip.topology.base import Topology, Weights, check_num_nodes


class RandomMatching(Topology):
    """½, ½ for a node and its partner of the step. If their number is odd, one node has none, and keeps its vector.

    The pairs of a step follow from `seed`, the step and the number of nodes alone: nodes are sorted by a hash, and the
    first two are a pair, the next two, and so on. So nodes need not agree, whatever their machines and versions are.
    All matchings are equally likely. There is no period.

    `rho` is the root mean square factor of a step, √‖E[WᵀW] - 11ᵀ/n‖: W is a projection, so WᵀW = W, and E[W] has the
    weight 1 / (2 (n - 1)) for every other node (n odd: 1 / (2n)).
    """

    name = "random-matching"
    period = None
    is_symmetric = True

    def __init__(self, num_nodes: int, seed: int = 0) -> None:
        """
        Args:
            num_nodes: n, at least 1.
            seed: any number; other seeds give other pairs.

        Raises:
            ConfigError: no nodes.
        """
        check_num_nodes(num_nodes, self.name)
        self.num_nodes = num_nodes
        self.seed = seed

    def pairs(self, step: int = 0) -> list[tuple[int, int]]:
        """Who averages with whom at a step; n // 2 pairs."""
        order = sorted(range(self.num_nodes), key=lambda node: self._hash(step, node))
        return list(zip(order[::2], order[1::2], strict=False))  # the last of an odd number is left over

    def weights(self, step: int = 0) -> Weights:
        weights = np.eye(self.num_nodes)
        for one, other in self.pairs(step):
            weights[one, one] = weights[other, other] = weights[one, other] = weights[other, one] = 0.5
        weights.setflags(write=False)
        return weights

    @property
    def rho(self) -> float:
        if self.num_nodes == 1:
            return 0.0
        weight = 1 / (2 * (self.num_nodes - 1 + self.num_nodes % 2))  # of E[W], for each other node
        return math.sqrt(1 - self.num_nodes * weight)

    def _hash(self, step: int, node: int) -> bytes:
        # Not NumPy's generators: their permutations may change from one version to the next.
        return hashlib.blake2b(f"{self.seed} {step} {node}".encode(), digest_size=16).digest()
