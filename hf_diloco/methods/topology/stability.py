"""The graphs and the largest momentum for which DecentLaM (arXiv 2104.11981) and momentum consensus are stable.

As the learning rate γ → 0 both are x⁺ = W x + β ((1 - ω) I + ω W) (x - x⁻), where ω is the share of the momentum that
is averaged with the neighbours: 0 in DecentLaM, `omega` in momentum consensus. Each eigenvalue λ of W has the roots of

    r² - (λ + βμ) r + βμ = 0,    μ = (1 - ω) + ωλ

and the method is stable iff they lie inside the unit circle for every eigenvalue except the 1 of the average, which
only gradients move. For a symmetric W this means 1 + λ + 2βμ > 0, which holds for every ω up to ½, but with ω = 1 only
if λ > -1 / (1 + 2β), which a hypercube does not satisfy. For ω = 0 and λ = p + iq the condition is

    ((p + β) / (1 + β))² + (q / (1 - β))² < 1

Directed graphs need a smaller momentum; for some, no momentum is stable.

Weights that change have no such eigenvalues. For them (x⁺, x) = C (x, x⁻) with C = [[W + βM, -βM], [I, 0]] and
M = (1 - ω) I + ωW, and stability depends on the spectral radius of the product of C over a period; for random
matchings, on the growth of E‖x‖². It is not enough that every W(t) is symmetric: on random matchings DecentLaM
diverges with momentum 0.8, and on the symmetrised one-peer exponential graph of 16 nodes with 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_diloco.errors import ConfigError
from hf_diloco.methods.topology.base import Topology
from hf_diloco.methods.topology.matching import RandomMatching

Matrices = NDArray[np.inexact[Any]]

_MOMENTA = (*np.linspace(0, 1, 64, endpoint=False).tolist(), 0.999)  # scanned before bisection
_BISECTIONS = 30
_ROUNDING = 1e-6  # rounding error of the bisection's result, in thousandths

SAFE_OMEGA = 0.5
"""Up to this share of averaged momentum, every momentum is stable on every symmetric graph that does not change."""


def growth(topology: Topology, beta: float, omega: float = 0.0) -> float:
    """Returns the long-run growth of the nodes' differences per step: below 1 if and only if the method is stable.

    Args:
        topology: weights with a period, or random matchings, for which the result is the root mean square factor.
        beta: the momentum, from 0 to below 1.
        omega: the share of the momentum that is averaged; 0: DecentLaM.

    Raises:
        ConfigError: the weights are drawn, and are no random matchings.
    """
    return _growth(topology, omega)(beta)


def largest_stable_beta(topology: Topology, omega: float = 0.0) -> float:
    """Returns the momentum below which a method is stable on a graph; 1 if every momentum is (checked up to 0.999).

    NaN if that is not known, as for a user's own graph whose weights are drawn. For the arguments see `growth`.
    """
    if topology.is_static and topology.is_symmetric and omega <= SAFE_OMEGA:
        return 1.0
    if topology.period is None and not isinstance(topology, RandomMatching):
        return math.nan
    growth_with = _growth(topology, omega)
    low = 0.0
    for high in _MOMENTA:  # for a fixed W one bisection would do, as each λ has one limit; products may have several
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
    """Raises `ConfigError` if DecentLaM diverges on a graph (as for `growth`), however small the learning rate.

    The momentum is from 0 to below 1, or raises `ConfigError`, too.
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
    """Like `check_decentlam`, for momentum consensus with the share omega, from 0 to 1, of averaged momentum."""
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
    """Returns the limit of stable momentum if `beta` reaches it; raises `ConfigError` if that limit is not known."""
    if not 0 <= beta < 1:
        raise ConfigError(f"momentum {beta}: give a number from 0 to below 1")
    largest = largest_stable_beta(topology, omega)
    if beta and math.isnan(largest):
        growth(topology, beta, omega)  # which says why it is not known
    return largest if beta >= largest else None


def floor_digits(beta: float) -> str:
    """Formats the limit of stable momentum with three digits, rounded down so that the printed value is stable."""
    return f"{math.floor(1000 * beta - _ROUNDING) / 1000:.3f}"


def _growth(topology: Topology, omega: float) -> Callable[[float], float]:
    """Returns `growth` as a function of the momentum; computes the parts that do not depend on it once."""
    if isinstance(topology, RandomMatching):
        return lambda beta: math.sqrt(_spectral_radius(_second_moments(topology.rho**2, beta, omega)))
    if topology.period is None:
        raise ConfigError(
            f"{topology.name}: its weights are drawn, and the momentum that is stable with such weights is known of "
            "random matchings alone; give it a period, or take QG-DmSGD, which has no such limit"
        )
    modes = _modes(np.stack([topology.weights(step) for step in range(topology.period)]))

    def grow(beta: float) -> float:
        product = _companion(modes[0], beta, omega)
        for matrices in modes[1:]:
            product = _companion(matrices, beta, omega) @ product
        return float(_spectral_radius(product) ** (1 / len(modes)))

    return grow


def _modes(weights: Matrices) -> Matrices:
    """Returns the weights of each step as independent blocks: [period, num_blocks, size, size].

    They are those of W - 11ᵀ/n, which has the eigenvalues of W with 0 instead of the 1 of the average; 0 is never the
    least stable. Circulant matrices, such as those of exponential graphs, share the Fourier modes, so they are n
    blocks of one number. A single matrix is n blocks, too, by its eigenvectors. All others are one block of n x n.
    """
    period, num_nodes, _ = weights.shape
    first_rows, nodes = weights[:, 0], np.arange(num_nodes)
    if np.array_equal(weights, first_rows[:, (nodes - nodes[:, None]) % num_nodes]):
        eigenvalues = np.fft.fft(first_rows)
        eigenvalues[:, 0] = 0  # the average
        return eigenvalues[:, :, None, None]
    differences = weights - 1 / num_nodes
    return np.linalg.eigvals(differences)[:, :, None, None] if period == 1 else differences[:, None]


def _companion(matrices: Matrices, beta: float, omega: float) -> Matrices:
    """C = [[W + βM, -βM], [I, 0]] of each block: [num_blocks, size, size] → [num_blocks, 2 size, 2 size]."""
    identity = np.broadcast_to(np.eye(matrices.shape[-1]), matrices.shape)
    momentum = beta * ((1 - omega) * identity + omega * matrices)
    return np.block([[matrices + momentum, -momentum], [identity, 0 * identity]])


def _second_moments(mean: float, beta: float, omega: float) -> Matrices:
    """Returns the matrix of one step on E‖x‖², E⟨x, x⁻⟩ and E‖x⁻‖², where x is without the average: [3, 3].

    Each step draws new pairs, and W is symmetric with W² = W: a projection. With v = x - x⁻ a step is
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
