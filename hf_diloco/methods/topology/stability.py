"""On which graphs, and up to which momentum, DecentLaM (arXiv 2104.11981) and momentum consensus are stable.

As the learning rate γ → 0 both are x⁺ = W x + β ((1 - ω) I + ω W) (x - x⁻), where ω is the share of the momentum that
is averaged with the neighbours: 0 in DecentLaM, `omega` in momentum consensus. Each eigenvalue λ of W has the roots of

    r² - (λ + βμ) r + βμ = 0,    μ = (1 - ω) + ωλ

and the method is stable iff they lie inside the unit circle for every eigenvalue but the 1 of the average, which moves
by gradients alone. For a symmetric W that is 1 + λ + 2βμ > 0: true of every ω up to ½, but with ω = 1 only where
λ > -1 / (1 + 2β), which a hypercube does not meet. For ω = 0 and λ = p + iq it is

    ((p + β) / (1 + β))² + (q / (1 - β))² < 1

Directed graphs need a smaller momentum, or none will do.

Weights that change have no such eigenvalues. There (x⁺, x) = C (x, x⁻) with C = [[W + βM, -βM], [I, 0]] and
M = (1 - ω) I + ωW, and what counts is the spectral radius of the product of C over a period; of random matchings, the
growth of E‖x‖². That every W(t) is symmetric is not enough: on random matchings DecentLaM diverges with momentum 0.8,
and on the symmetrised one-peer exponential graph of 16 nodes with 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import PeriodicTopology, Topology
from hf_diloco.methods.topology.matching import RandomMatching

Matrices = NDArray[np.inexact[Any]]

_MOMENTA = (*np.linspace(0, 1, 64, endpoint=False).tolist(), 0.999)  # looked at before bisection
_BISECTIONS = 30
_ROUNDING = 1e-6  # of what bisection finds, in thousandths

SAFE_OMEGA = 0.5
"""Momentum that is averaged up to this share is stable on every symmetric graph that does not change."""


def growth(topology: Topology, beta: float, omega: float = 0.0) -> float:
    """The factor by which what nodes differ in grows in one step, in the long run: below 1 where a method is stable.

    Args:
        topology: weights with a period, or random matchings; for these it is the root mean square factor.
        beta: the momentum, from 0 to below 1.
        omega: the share of the momentum that is averaged; 0: DecentLaM.
    """
    return _growth(topology, omega)(beta)


def largest_stable_beta(topology: Topology, omega: float = 0.0) -> float:
    """The momentum below which a method is stable on a graph; 1 if it is for every momentum (looked at up to 0.999).

    Args:
        topology: as for `growth`.
        omega: the share of the momentum that is averaged; 0: DecentLaM.
    """
    if topology.is_static and topology.is_symmetric and omega <= SAFE_OMEGA:
        return 1.0
    growth_with = _growth(topology, omega)
    low = 0.0
    for high in _MOMENTA:  # of a fixed W one bisection would do: each λ has one limit; of products that is not known
        if growth_with(high) >= 1:
            break
        low = high
    else:
        return 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if growth_with(middle) < 1 else (low, middle)
    return low


def check_decentlam(topology: Topology, beta: float) -> None:
    """Raises `ConfigError` if DecentLaM diverges on a graph, however small the learning rate.

    Args:
        topology: as for `growth`.
        beta: the momentum; from 0 to below 1, or that is the error.
    """
    largest = _largest_below(topology, beta, omega=0.0)
    if largest is not None:
        symmetrised = "(W + Wᵀ)/2 as own weights; or " if topology.is_static else ""
        raise ConfigError(
            f"momentum {beta}: DecentLaM diverges on {topology.name} with {topology.num_nodes} nodes; take a "
            f"symmetric graph that does not change, as symmetric-exponential; or {symmetrised}momentum up to "
            f"{floor_digits(largest)}; or QG-DmSGD, which is stable there and sends as much"
        )


def check_momentum_consensus(topology: Topology, beta: float, omega: float) -> None:
    """Raises `ConfigError` if momentum consensus diverges on a graph, however small the learning rate.

    Args:
        topology: as for `growth`.
        beta: the momentum; from 0 to below 1, or that is the error.
        omega: the share of the momentum that is averaged, from 0 to 1.
    """
    largest = _largest_below(topology, beta, omega)
    if largest is not None:
        safe_is_stable = omega != SAFE_OMEGA and beta < largest_stable_beta(topology, SAFE_OMEGA)
        shared = f"options: {{omega: {SAFE_OMEGA}}}" if safe_is_stable else "a symmetric graph that does not change"
        raise ConfigError(
            f"momentum {beta} with omega {omega}: momentum consensus diverges on {topology.name} with "
            f"{topology.num_nodes} nodes; take {shared}; or momentum up to {floor_digits(largest)}; or "
            "QG-DmSGD, which is stable there and sends half as much"
        )


def _largest_below(topology: Topology, beta: float, omega: float) -> float | None:
    """The largest stable momentum if `beta` is not below it, else None; raises `ConfigError` if `beta` is none."""
    if not 0 <= beta < 1:
        raise ConfigError(f"momentum {beta}: give a number from 0 to below 1")
    largest = largest_stable_beta(topology, omega)
    return largest if beta >= largest else None


def floor_digits(beta: float) -> str:
    """The first momentum that is not stable, in three digits below it: what they say is stable."""
    return f"{math.floor(1000 * beta - _ROUNDING) / 1000:.3f}"


def _growth(topology: Topology, omega: float) -> Callable[[float], float]:
    """`growth` by momentum; what does not depend on that is computed once."""
    if isinstance(topology, RandomMatching):
        return lambda beta: math.sqrt(_spectral_radius(_second_moments(topology.rho**2, beta, omega)))
    if not isinstance(topology, PeriodicTopology):
        raise TypeError(f"{topology!r}: neither weights with a period nor random matchings")
    modes = _modes(topology)

    def grow(beta: float) -> float:
        product = _companion(modes[0], beta, omega)
        for matrices in modes[1:]:
            product = _companion(matrices, beta, omega) @ product
        return float(_spectral_radius(product) ** (1 / len(modes)))

    return grow


def _modes(topology: PeriodicTopology) -> Matrices:
    """The weights of each step as blocks that do not mix: [period, num_blocks, size, size].

    They are W - 11ᵀ/n, with the eigenvalues of W but 0 in place of the 1 of the average; 0 is never the least stable.
    Circulant matrices, as those of exponential graphs, share the Fourier modes: n blocks of one number. So does a
    single matrix its eigenvectors. Others are one block of n x n.
    """
    first_rows = topology.matrices[:, 0]
    nodes = np.arange(topology.num_nodes)
    if np.array_equal(topology.matrices, first_rows[:, (nodes - nodes[:, None]) % topology.num_nodes]):
        eigenvalues = np.fft.fft(first_rows)
        eigenvalues[:, 0] = 0  # the average
        return eigenvalues[:, :, None, None]
    differences = topology.matrices - 1 / topology.num_nodes
    return np.linalg.eigvals(differences)[:, :, None, None] if topology.is_static else differences[:, None]


def _companion(matrices: Matrices, beta: float, omega: float) -> Matrices:
    """C = [[W + βM, -βM], [I, 0]] of each block: [num_blocks, size, size] → [num_blocks, 2 size, 2 size]."""
    identity = np.broadcast_to(np.eye(matrices.shape[-1]), matrices.shape)
    momentum = beta * ((1 - omega) * identity + omega * matrices)
    return np.block([[matrices + momentum, -momentum], [identity, 0 * identity]])


def _second_moments(mean: float, beta: float, omega: float) -> Matrices:
    """What a step makes of E‖x‖², E⟨x, x⁻⟩ and E‖x⁻‖², x without the average: [3, 3].

    The pairs of a step are drawn anew, and W is symmetric with W² = W: a projection. With v = x - x⁻ a step is
    x⁺ = W (x + βv) + (1 - ω) β (I - W) v, whose two parts are orthogonal. With E[W] = λI, the argument `mean`,

        E‖x⁺‖²   = λ E‖x + βv‖²     + (1 - λ) (1 - ω)² β² E‖v‖²
        E⟨x⁺, x⟩ = λ E⟨x + βv, x⟩   + (1 - λ) (1 - ω) β E⟨v, x⟩
    """
    rest, own = 1 - mean, (1 - omega) * beta
    return np.array(
        [
            [
                mean * (1 + beta) ** 2 + rest * own**2,
                -2 * (mean * beta * (1 + beta) + rest * own**2),
                mean * beta**2 + rest * own**2,
            ],
            [mean * (1 + beta) + rest * own, -(mean * beta + rest * own), 0],
            [1, 0, 0],
        ]
    )


def _spectral_radius(matrices: Matrices) -> float:
    return float(np.abs(np.linalg.eigvals(matrices)).max())
