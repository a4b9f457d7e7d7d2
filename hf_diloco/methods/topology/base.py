"""A graph: the weights with which each node averages its neighbours' vectors, and checks that averaging converges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import name_all

Weights = NDArray[np.float64]

TOLERANCE = 1e-9
"""Tolerance of row and column sums. Larger errors would scale all parameters: by 0.1 % in a million steps."""


class Topology(ABC):
    """A graph of nodes, which may change from step to step.

    After step t node i has x_i = Σ_j w_ij(t) x_j. Every W(t) is doubly stochastic: rows sum to 1, so that equal nodes
    stay equal; columns sum to 1, so that averaging preserves the mean of all nodes.

    Attributes:
        name: the graph's name in messages.
        num_nodes: n; nodes are numbered from 0.
        period: steps after which the weights repeat; 1 if they never change; None if they are drawn at random at each
            step.
        is_symmetric: whether W(t) is symmetric at every step: links go both ways, with equal weights.
    """

    name: str
    num_nodes: int
    period: int | None
    is_symmetric: bool

    @abstractmethod
    def weights(self, step: int = 0) -> Weights:
        """Returns W at a step, from 0, the same on all nodes.

        Returns:
            float64 [num_nodes, num_nodes], read-only; entry (i, j) is the weight that node i gives to node j's vector.
        """

    @property
    @abstractmethod
    def rho(self) -> float:
        """The factor by which one averaging step shrinks the nodes' distance from their mean: below 1, 0 is best.

        For weights with a period: the spectral radius of the product over one period, minus the average, to the power
        1 / period, which is the mean factor of a step in the long run. If weights never change, it is the second
        largest modulus of W's eigenvalues. For weights drawn at random: the root mean square over the draws.
        """

    @property
    def spectral_gap(self) -> float:
        """1 - rho."""
        return 1.0 - self.rho

    @property
    def is_static(self) -> bool:
        """Whether the weights are the same at every step."""
        return self.period == 1

    def neighbours(self, node: int, step: int = 0) -> tuple[int, ...]:
        """The nodes from which a node receives at a step, in order, without itself."""
        return self._others(self.weights(step)[node], node)

    def receivers(self, node: int, step: int = 0) -> tuple[int, ...]:
        """The nodes to which a node sends at a step, in order, without itself; on a symmetric graph its neighbours."""
        return self._others(self.weights(step)[:, node], node)

    def peers(self, node: int) -> tuple[int, ...]:
        """The nodes that a node ever sends to or receives from, in order; all others if weights are drawn."""
        if self.period is None:
            return tuple(other for other in range(self.num_nodes) if other != node)
        steps = range(self.period)
        return tuple(sorted({one for t in steps for one in (*self.neighbours(node, t), *self.receivers(node, t))}))

    def steps_to_all(self) -> int:
        """Returns the number of steps, from any step on, in which news from every node reaches every other.

        If weights never change, it is the number of nodes, which is enough even if some are lost. If they are drawn at
        random, nothing is certain: news misses a node once in many thousand times.
        """
        if self.is_static:
            return self.num_nodes
        if self.period is None:
            return 4 * self.num_nodes + 16
        return max(self._steps_from(first) for first in range(self.period))

    def _steps_from(self, first: int) -> int:
        heard, last = np.eye(self.num_nodes), first + self.num_nodes * (self.period or 1)
        for step in range(first, last):
            if heard.all():
                return step - first
            heard = np.sign(heard + self.weights(step) @ heard)
        return last - first

    def check(self) -> None:
        """Raises `ConfigError` unless weights are doubly stochastic, and averaging brings all nodes to their mean."""
        matrices = [self.weights(step) for step in range(self.period or 1)]
        for matrix in matrices:
            check_weights(matrix, self.name)
        if self.period is None:
            return
        if apart := _apart(np.any([matrix > 0 for matrix in matrices], axis=0)):
            raise ConfigError(
                f"{self.name}: not connected: nothing goes between node 0 and {name_all(apart, 'node')}; add weights "
                "that join them"
            )
        if self.rho > 1 - TOLERANCE:
            raise ConfigError(
                f"{self.name}: rho is {self.rho:.12g}: nodes pass vectors on and come no closer; give each a weight "
                "for itself"
            )

    def _others(self, weights: Weights, node: int) -> tuple[int, ...]:
        return tuple(int(other) for other in np.flatnonzero(weights) if other != node)

    def __repr__(self) -> str:
        return f"<{self.name} of {self.num_nodes} nodes>"


_ROUNDING = 1e-12  # below it a product counts as the exact average: its root would magnify rounding errors


class PeriodicTopology(Topology):
    """Weights that repeat after a number of steps, or never change. Call `check` to validate them.

    Args:
        matrices: float64 [period, num_nodes, num_nodes], or [num_nodes, num_nodes] for weights that never change. The
            attribute is read-only, and always has the first form.
    """

    period: int

    def __init__(self, name: str, matrices: Weights) -> None:
        self.name = name
        self.matrices = np.array(matrices, dtype=np.float64, ndmin=3)
        self.matrices.setflags(write=False)
        self.period, self.num_nodes, _ = self.matrices.shape
        self.is_symmetric = np.allclose(self.matrices, self.matrices.transpose(0, 2, 1), rtol=0, atol=TOLERANCE)

    def weights(self, step: int = 0) -> Weights:
        weights: Weights = self.matrices[step % self.period]
        return weights

    @cached_property
    def rho(self) -> float:
        product = np.eye(self.num_nodes)
        for matrix in self.matrices:
            product = matrix @ product
        distance = product - 1 / self.num_nodes
        is_symmetric = np.allclose(distance, distance.T, rtol=0, atol=TOLERANCE)
        eigenvalues = np.linalg.eigvalsh(distance) if is_symmetric else np.linalg.eigvals(distance)
        radius = float(np.abs(eigenvalues).max())
        return 0.0 if radius < _ROUNDING else radius ** (1 / self.period)


GRAPHS: dict[str, Callable[..., Topology]] = {}
"""Functions or classes that make each graph from the number of its nodes, and from a `seed` if they take one."""

Maker = TypeVar("Maker", bound=Callable[..., Topology])


def graph(name: str) -> Callable[[Maker], Maker]:
    """Registers a function or a class as the maker of the graph of that name."""

    def register(make: Maker) -> Maker:
        GRAPHS[name] = make
        return make

    return register


def check_num_nodes(num_nodes: int, name: str) -> None:
    """Raises `ConfigError` if a graph would have no node."""
    if num_nodes < 1:
        raise ConfigError(f"num_nodes={num_nodes}: a graph ({name}) has at least one node; give how many take part")


def check_weights(weights: Weights, name: str) -> None:
    """Raises `ConfigError` unless the weights of a step are square, finite, not negative and doubly stochastic."""
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not weights.size:
        raise ConfigError(f"{name}: weights of shape {weights.shape}: give a row and a column for each node")
    for fault, wrong in (("not finite", ~np.isfinite(weights)), ("negative", weights < 0)):
        if wrong.any():
            node, other = (int(index) for index in np.argwhere(wrong)[0])
            value = weights[node, other]
            raise ConfigError(f"{name}: weight [{node}, {other}] is {value}: {fault}; give numbers from 0 to 1")
    for line, axis in (("row", 1), ("column", 0)):
        sums = weights.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ConfigError(
                f"{name}: {line} {worst} sums to {sums[worst]:.12g}; make rows and columns sum to 1 within "
                f"{TOLERANCE:g} (all digits of float64), or give a networkx graph, for which weights are computed"
            )


def _apart(heard: NDArray[np.bool_]) -> list[int]:
    """The nodes from which nothing ever reaches node 0. As all sums are 1, nothing from node 0 reaches them either."""
    known = np.arange(len(heard)) == 0
    while True:
        more = known | heard[known].any(axis=0)
        if (more == known).all():
            return [int(node) for node in np.flatnonzero(~known)]
        known = more
