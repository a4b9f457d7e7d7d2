"""Random matchings: at each step the nodes form new random pairs, and each pair averages."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from functools import cached_property

import numpy as np

from hf_diloco.methods.topology.base import Topology, Weights, check_num_nodes, graph

_NUM_DRAWS = 1000


class _Matching(Topology):
    """Weights ½, ½ for a node and its partner of the step; a node without a partner keeps its vector."""

    period = None
    is_symmetric = True
    seed: int

    @abstractmethod
    def pairs(self, step: int = 0) -> list[tuple[int, int]]:
        """Returns the pairs of nodes that average at a step."""

    def weights(self, step: int = 0) -> Weights:
        weights = np.eye(self.num_nodes)
        for one, other in self.pairs(step):
            weights[one, one] = weights[other, other] = weights[one, other] = weights[other, one] = 0.5
        weights.setflags(write=False)
        return weights

    def _hash(self, *numbers: int) -> bytes:
        # Not NumPy's generators: their permutations may change between versions.
        text = " ".join(map(str, (self.seed, *numbers)))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@graph("random-matching")
class RandomMatching(_Matching):
    """Weights ½, ½ for a node and its partner of the step. If n is odd, one node has no partner, and keeps its vector.

    The pairs of a step depend only on `seed`, the step and the number of nodes: nodes are sorted by a hash; the first
    two are a pair, the next two are a pair, and so on. So all nodes compute the same pairs without communication, on
    any machine and with any version. All matchings are equally likely. There is no period.

    `rho` is the root mean square factor of a step, √‖E[WᵀW] - 11ᵀ/n‖: W is a projection, so WᵀW = W, and E[W] has the
    weight 1 / (2 (n - 1)) for every other node (n odd: 1 / (2n)).
    """

    name = "random-matching"

    def __init__(self, num_nodes: int, seed: int = 0) -> None:
        """Raises `ConfigError` if there are no nodes. Other seeds give other pairs."""
        check_num_nodes(num_nodes, self.name)
        self.num_nodes = num_nodes
        self.seed = seed

    def pairs(self, step: int = 0) -> list[tuple[int, int]]:
        order = sorted(range(self.num_nodes), key=lambda node: self._hash(step, node))
        return list(zip(order[::2], order[1::2], strict=False))  # drops the last node if n is odd

    @property
    def rho(self) -> float:
        if self.num_nodes == 1:
            return 0.0
        weight = 1 / (2 * (self.num_nodes - 1 + self.num_nodes % 2))  # of E[W], for each other node
        return math.sqrt(1 - self.num_nodes * weight)


class RandomEdgeMatching(_Matching):
    """Like `RandomMatching`, but of neighbours in a graph only: a node without a free neighbour keeps its vector.

    The links of the graph are sorted by a hash of `seed`, the step and their ends; in this order, each link whose ends
    are both free becomes a pair. So no two neighbours are both without a partner, but the matching may be smaller than
    the largest possible. Links count in both directions, also on a directed graph. If the graph changes, the links of
    all its steps count.

    `rho` is that of `RandomMatching`, with E[W] the mean over the first 1,000 steps.
    """

    def __init__(self, graph: Topology, seed: int = 0) -> None:
        self.name = f"random matching on {graph.name}"
        self.num_nodes = graph.num_nodes
        self.seed = seed
        self._links = links(graph)

    def pairs(self, step: int = 0) -> list[tuple[int, int]]:
        taken: set[int] = set()
        pairs = []
        for one, other in sorted(self._links, key=lambda link: self._hash(step, *link)):
            if one not in taken and other not in taken:
                taken |= {one, other}
                pairs.append((one, other))
        return pairs

    def steps_to_all(self) -> int:
        """See `Topology.steps_to_all`.

        A link is drawn if it comes first among the d_i + d_j - 1 links at its two ends, itself included, which has a
        probability of at least p = 1 / (d_i + d_j - 1). News needs D such draws to travel the largest distance D. The
        result is (2 D + 8) / p with the smallest p of all links: in that many steps 2 D + 8 draws are expected.
        """
        num_links = Counter(node for link in self._links for node in link)
        rarest = max((num_links[one] + num_links[other] - 1 for one, other in self._links), default=1)
        near = np.eye(self.num_nodes, dtype=bool)
        for one, other in self._links:
            near[one, other] = near[other, one] = True
        heard, distance = np.eye(self.num_nodes, dtype=bool), 0
        while not heard.all() and distance < self.num_nodes:
            heard, distance = heard @ near, distance + 1
        return (2 * distance + 8) * rarest

    @cached_property
    def rho(self) -> float:
        mean = sum(self.weights(step) for step in range(_NUM_DRAWS)) / _NUM_DRAWS
        return math.sqrt(float(np.linalg.norm(mean - 1 / self.num_nodes, 2)))


def random_pairs(graph: Topology, seed: int) -> Topology:
    """Makes random matchings of the neighbours in a graph."""
    is_full = all(len(graph.peers(node)) == graph.num_nodes - 1 for node in range(graph.num_nodes))
    return RandomMatching(graph.num_nodes, seed) if is_full else RandomEdgeMatching(graph, seed)


def links(graph: Topology) -> list[tuple[int, int]]:
    """Returns all pairs of nodes that are linked in either direction at any step, each with the lower number first."""
    return [(one, other) for one in range(graph.num_nodes) for other in graph.peers(one) if one < other]
