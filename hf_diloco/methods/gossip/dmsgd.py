"""DmSGD: decentralised SGD with each node's own momentum (as in arXiv 2104.11981).

    m_i ← β m_i + g_i
    adapt-then-combine   x_i ← Σ_j w_ij (x_j - γ m_j)
    combine-then-adapt   x_i ← Σ_j w_ij x_j - γ m_i

Nesterov replaces m_i by g_i + β m_i, as `torch.optim.SGD` does. Sends d values to each neighbour. Momentum amplifies
the effect of differences between the nodes' data: the limit is that of DSGD at γ / (1 - β), whose squared distance
from the solution is 1 / (1 - β)² times that at γ.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.momentum import MomentumOptimizer


class DmSGD(MomentumOptimizer):
    """Equations and sources above. m is in units of gradients: a change of γ applies to all of m at once."""

    name = "dmsgd"
    paper = "1705.09056"

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        combine_first: bool = False,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
            nesterov: whether the momentum looks ahead.
            combine_first: combine-then-adapt.
        """
        self.combine_first = combine_first
        self.nesterov = nesterov
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)

    def sent_ahead(self, x: torch.Tensor) -> tuple[Vectors, Vectors] | None:
        return ((x,), (self.received,)) if self.combine_first else None

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        if self.combine_first:
            self.descend(self.mix(x, out=self.received), g, out=x)
        else:
            self.descend(x, g, out=g)
            self.mix(g, out=x)
