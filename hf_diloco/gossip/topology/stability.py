"""Where DecentLaM (arXiv 2104.11981) is stable: on which graphs, up to which momentum.

At constant learning rate γ DecentLaM is x⁺ = W(x - γg) + β(x - x⁻). As γ → 0, each eigenvalue λ = p + iq of W has the
roots of r² - (λ + β) r + β = 0. They lie inside the unit circle iff

    ((p + β) / (1 + β))² + (q / (1 - β))² < 1

for every eigenvalue but the 1 of the average, which moves by gradients alone. A symmetric W, with q = 0, is stable for
all β < 1. Directed graphs are not.

Weights that change have no such eigenvalues. There (x⁺, x) = C (x, x⁻) with C = [[W + βI, -βI], [I, 0]], and what
counts is the spectral radius of the product of C over a period; of random matchings, the growth of E‖x‖². That every
W(t) is symmetric is not enough: on random matchings DecentLaM diverges with momentum 0.8, and on the symmetrised
one-peer exponential graph of 16 nodes with 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_diloco.errors import ConfigError
from hf_diloco.gossip.topology.base import PeriodicTopology, Topology
from hf_diloco.gossip.topology.matching import RandomMatching

Matrices = NDArray[np.inexact[Any]]

_MOMENTA = (*np.linspace(0, 1, 64, endpoint=False).tolist(), 0.999)  # looked at before bisection
_BISECTIONS = 30


def is_stable(eigenvalues: Matrices, beta: float) -> bool:
    """Whether a fixed W is stable, by the inequality above.

    Args:
        eigenvalues: of W, [num_eigenvalues], without the 1 of the average.
        beta: the momentum, from 0 to below 1.
    """
    p, q = eigenvalues.real, eigenvalues.imag
    return bool((((p + beta) / (1 + beta)) ** 2 + (q / (1 - beta)) ** 2 < 1).all())


def growth(topology: Topology, beta: float) -> float:
    """The factor by which what nodes differ in grows in one step, in the long run: below 1 where DecentLaM is stable.

    Args:
        topology: weights with a period, or random matchings; for these it is the root mean square factor.
        beta: the momentum, from 0 to below 1.
    """
    if isinstance(topology, PeriodicTopology):
        return _growth_in_period(_modes(topology), beta)
    if isinstance(topology, RandomMatching):
        return math.sqrt(_spectral_radius(_second_moments(topology.rho**2, beta)))
    raise TypeError(f"{topology!r}: neither weights with a period nor random matchings")


def largest_stable_beta(topology: Topology) -> float:
    """The momentum below which DecentLaM is stable on a graph; 1 if it is for every momentum (looked at up to 0.999).

    Args:
        topology: as for `growth`.
    """
    if topology.is_static and topology.is_symmetric:
        return 1.0
    is_stable_with = _stability(topology)
    low = 0.0
    for high in _MOMENTA:  # of a fixed W one bisection would do: each λ has one limit; of products that is not known
        if not is_stable_with(high):
            break
        low = high
    else:
        return 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable_with(middle) else (low, middle)
    return low


def check_decentlam(topology: Topology, beta: float) -> None:
    """Raises `ConfigError` if DecentLaM diverges on a graph, however small the learning rate.

    Args:
        topology: as for `growth`.
        beta: the momentum; from 0 to below 1, or that is the error.
    """
    if not 0 <= beta < 1:
        raise ConfigError(f"momentum {beta}: give a number from 0 to below 1")
    largest = largest_stable_beta(topology)
    if beta >= largest:
        symmetrised = "(W + Wᵀ)/2 as own weights; or " if topology.is_static else ""
        raise ConfigError(
            f"momentum {beta}: DecentLaM diverges on {topology.name} with {topology.num_nodes} nodes; take a "
            f"symmetric graph that does not change, as symmetric-exponential; or {symmetrised}momentum up to "
            f"{floor_digits(largest)}; or QG-DmSGD, which is stable there and sends as much"
        )


def floor_digits(beta: float) -> str:
    """A largest momentum in three digits, rounded down: what it says is stable."""
    return f"{math.floor(1000 * beta) / 1000:.3f}"


def _stability(topology: Topology) -> Callable[[float], bool]:
    """Says of a momentum whether it is stable; what does not depend on it is computed once."""
    if not isinstance(topology, PeriodicTopology):
        return lambda beta: growth(topology, beta) < 1
    modes = _modes(topology)
    if not topology.is_static:
        return lambda beta: _growth_in_period(modes, beta) < 1
    eigenvalues = np.linalg.eigvals(modes[0]).ravel()
    return lambda beta: is_stable(eigenvalues, beta)


def _growth_in_period(modes: Matrices, beta: float) -> float:
    """The mean factor of a step, from the blocks of all steps of a period."""
    product = _companion(modes[0], beta)
    for matrices in modes[1:]:
        product = _companion(matrices, beta) @ product
    return _spectral_radius(product) ** (1 / len(modes))


def _modes(topology: PeriodicTopology) -> Matrices:
    """The weights of each step as blocks that do not mix: [period, num_blocks, size, size].

    They are W - 11ᵀ/n, with the eigenvalues of W but 0 in place of the 1 of the average; 0 is never the least stable.
    Circulant matrices, as those of exponential graphs, share the Fourier modes: n blocks of one number. Others are one
    block of n x n.
    """
    first_rows = topology.matrices[:, 0]
    nodes = np.arange(topology.num_nodes)
    if np.array_equal(topology.matrices, first_rows[:, (nodes - nodes[:, None]) % topology.num_nodes]):
        eigenvalues = np.fft.fft(first_rows)
        eigenvalues[:, 0] = 0  # the average
        return eigenvalues[:, :, None, None]
    return (topology.matrices - 1 / topology.num_nodes)[:, None]


def _companion(matrices: Matrices, beta: float) -> Matrices:
    """C = [[W + βI, -βI], [I, 0]] of each block: [num_blocks, size, size] → [num_blocks, 2 size, 2 size]."""
    identity = np.broadcast_to(np.eye(matrices.shape[-1]), matrices.shape)
    return np.block([[matrices + beta * identity, -beta * identity], [identity, 0 * identity]])


def _second_moments(mean: float, beta: float) -> Matrices:
    """What a step makes of E‖x‖², E⟨x, x⁻⟩ and E‖x⁻‖², x without the average: [3, 3].

    The pairs of a step are drawn anew, and WᵀW = W. So E‖Wx‖² = E⟨Wx, x⟩ = λ E‖x‖² and E⟨Wx, x⁻⟩ = λ E⟨x, x⁻⟩, where
    λ, the argument `mean`, is the eigenvalue of E[W] that is not the average's.
    """
    return np.array(
        [
            [mean + 2 * beta * mean + beta**2, -2 * beta * (mean + beta), beta**2],
            [mean + beta, -beta, 0],
            [1, 0, 0],
        ]
    )


def _spectral_radius(matrices: Matrices) -> float:
    return float(np.abs(np.linalg.eigvals(matrices)).max())
