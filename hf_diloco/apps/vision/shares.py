"""Which examples belong to which node: disjoint shares of equal size, alike or with other proportions of the classes.

Every node computes the shares of all from the same numbers. They are drawn with numpy's `RandomState`, whose stream is
frozen (NEP 19), so that nodes with other versions of numpy agree.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from hf_diloco.apps.vision.pictures import IntArray
from hf_diloco.errors import ConfigError

CountMatrix: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
_FloatMatrix: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.float64]]"

_NUM_TURNS = 100  # in which the nodes take their examples


def assign_shares(
    labels: IntArray, num_nodes: int, kind: Literal["iid", "dirichlet"], alpha: float, seed: int
) -> list[IntArray]:
    """The examples of every node, sorted.

    Every node gets examples // num_nodes, so that all take the same steps; the fewer than `num_nodes` that are left
    belong to none. `dirichlet` is the partition of Hsu et al. (arXiv 1909.06335): each node draws the proportions of
    its classes from Dir(alpha * p), with p those of all data, and takes its examples without replacement; when a class
    runs out, it goes on with its proportions of the other classes. There a node takes its whole share before the next
    one, and the last get what is left; here they take hundredths of it in turn. All examples are used, so some classes
    do run out, and the shares are a little more alike than the draws. Papers that write the concentration of one class
    mean `alpha` / number of classes.

    Args:
        labels: int64 [examples].
        num_nodes: number of shares.
        kind: iid or dirichlet.
        alpha: above 0; small: few classes a node; large: as iid.
        seed: the same on all nodes.

    Raises:
        ConfigError: when there are fewer examples than nodes.
    """
    size = len(labels) // num_nodes
    if size == 0:
        raise ConfigError(
            f"data: {len(labels)} training examples cannot be divided among {num_nodes} nodes; use more examples or "
            "fewer nodes"
        )
    generator = np.random.RandomState(seed % 2**32)
    if kind == "iid" or num_nodes == 1:
        order = generator.permutation(len(labels))
        return [np.sort(order[node * size : (node + 1) * size]).astype(np.int64) for node in range(num_nodes)]
    available = np.bincount(labels).astype(np.int64)
    counts = _take_in_turns(draw_proportions(available, num_nodes, alpha, generator), available, size, generator)
    return _choose(labels, counts, generator)


def draw_proportions(
    available: IntArray, num_nodes: int, alpha: float, generator: np.random.RandomState
) -> _FloatMatrix:
    """The proportions of the classes that each node wants.

    Args:
        available: int64 [classes], examples of each class.
        num_nodes: number of nodes.
        alpha: above 0.
        generator: its state advances.

    Returns:
        fp64 [nodes, classes], rows from Dir(alpha * p) that sum to 1, with p the classes' parts of all examples.
    """
    concentration = alpha * available / available.sum()
    gammas = generator.standard_gamma(concentration, size=(num_nodes, len(available)))
    ones = generator.choice(len(available), size=num_nodes, p=available / available.sum())
    for node in np.flatnonzero(gammas.sum(axis=1) == 0):  # all too small for a float: the limit for alpha to 0
        gammas[node, ones[node]] = 1.0
    proportions: _FloatMatrix = gammas / gammas.sum(axis=1, keepdims=True)
    return proportions


def _take_in_turns(
    proportions: _FloatMatrix, available: IntArray, size: int, generator: np.random.RandomState
) -> CountMatrix:
    """How many examples of each class each node gets; every row sums to `size`."""
    rest = available.copy()
    counts = np.zeros(proportions.shape, dtype=np.int64)
    turn = max(1, size // _NUM_TURNS)
    while (missing := size - counts.sum(axis=1)).any():
        for node in np.flatnonzero(missing):
            weights = proportions[node] * (rest > 0)
            if weights.sum() == 0:  # all of its classes have run out
                weights = rest.astype(np.float64)
            wanted = generator.multinomial(min(turn, missing[node]), weights / weights.sum())
            taken = np.minimum(wanted, rest)
            counts[node] += taken
            rest -= taken
    return counts


def _choose(labels: IntArray, counts: CountMatrix, generator: np.random.RandomState) -> list[IntArray]:
    """Deals out each class at random in these numbers."""
    shares: list[list[IntArray]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        shuffled = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        ends = np.cumsum(counts[:, label])
        for node, part in enumerate(np.split(shuffled, ends)[: len(counts)]):
            shares[node].append(part)
    return [np.sort(np.concatenate(parts)) for parts in shares]
