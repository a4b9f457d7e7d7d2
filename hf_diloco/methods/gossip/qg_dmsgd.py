"""QG-DmSGD: decentralised SGD with quasi-global momentum (arXiv 2102.04761).

    x_i⁺ = Σ_j w_ij (x_j - γ (β m_j + g_j))
    m_i ← μ m_i + (1 - μ) (x_i - x_i⁺) / γ

The momentum follows the averaged movement of the parameters, not a node's own gradients. Sends d values to each
neighbour. In the limit nothing moves, so m = 0, and the limit is that of DSGD, for any β. Stable on directed graphs,
too.

Nesterov, as in the authors' code, replaces β m + g by g + β (β m + g). In the limit that is (1 + β) g: the limit is
then that of DSGD at γ (1 + β), not at γ.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.flat import check_below_1
from hf_diloco.methods.gossip.momentum import MomentumOptimizer


class QGDmSGD(MomentumOptimizer):
    """Equations and source above.

    m is in units of gradients; each step divides by its own γ. If γ more than doubles, as at a warm restart of a
    cosine schedule, m shrinks first, so that γ m only doubles (see `Part.shrinkage`). If γ is 0, as at the first step
    of a warm-up, the division is skipped: the nodes average, and m only decays.
    """

    name = "qg-dmsgd"
    paper = "2102.04761"

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        average_momentum: float | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
            average_momentum: μ, the decay of m; default: `momentum`, also when that changes.
            nesterov: whether the momentum looks ahead.
        """
        self.average_momentum = average_momentum
        self.nesterov = nesterov
        if average_momentum is not None:
            check_below_1("average_momentum", average_momentum)
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        momentum = self.vector("momentum_buffer")
        for part in self.parts():
            gradient, m = g[part.where], momentum[part.where]
            if part.shrinkage < 1:
                m.mul_(part.shrinkage)
            beta = part.momentum
            if self.nesterov:
                gradient.mul_(1 + beta).add_(m, alpha=beta * beta)
            else:
                gradient.add_(m, alpha=beta)
            torch.add(x[part.where], gradient, alpha=-part.lr, out=gradient)
        mixed = self.mix(g, out=self.received)
        for part in self.parts():
            mine, new = x[part.where], mixed[part.where]
            mu = part.momentum if self.average_momentum is None else self.average_momentum
            m = momentum[part.where].mul_(mu)
            if part.lr:
                m.add_(mine.sub_(new), alpha=(1 - mu) / part.lr)
            mine.copy_(new)
