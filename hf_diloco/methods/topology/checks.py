"""Checks that averaging with given weights works."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import numbers, plural

TOLERANCE = 1e-9
"""How far sums may be from 1. More would shrink or swell all parameters over a run: by 0.1 % in a million steps."""


def check_weights(weights: NDArray[np.float64], name: str) -> None:
    """Raises `ConfigError` unless the weights of a step are square, finite, not negative and doubly stochastic.

    Args:
        weights: float64, to be [num_nodes, num_nodes].
        name: whose they are, for the message.
    """
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


def check_mixing(matrices: Sequence[NDArray[np.float64]], rho: float, name: str) -> None:
    """Raises `ConfigError` unless repeated averaging brings all nodes to their mean.

    Args:
        matrices: the weights of each step of a period, doubly stochastic.
        rho: as `Topology.rho`.
        name: whose they are, for the message.
    """
    apart = _apart(np.any([matrix > 0 for matrix in matrices], axis=0))
    if apart:
        raise ConfigError(
            f"{name}: not connected: nothing goes between node 0 and {plural('node', len(apart))} {numbers(apart)}; "
            "add weights that join them"
        )
    if rho > 1 - TOLERANCE:
        raise ConfigError(
            f"{name}: rho is {rho:.12g}: nodes pass vectors on and come no closer; give each a weight for itself"
        )


def _apart(heard: NDArray[np.bool_]) -> list[int]:
    """The nodes that node 0 never hears from, however many steps it waits; where sums are 1, nor they from it."""
    known = np.arange(len(heard)) == 0
    while True:
        more = known | heard[known].any(axis=0)
        if (more == known).all():
            return [int(node) for node in np.flatnonzero(~known)]
        known = more
