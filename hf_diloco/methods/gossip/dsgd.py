"""DSGD: decentralised SGD without momentum.

    adapt-then-combine   x_i ← Σ_j w_ij (x_j - γ g_j)           (diffusion, arXiv 1111.0034)
    combine-then-adapt   x_i ← Σ_j w_ij x_j - γ g_i             (D-PSGD, arXiv 1705.09056)

Sends d values to each neighbour. If the nodes' data differ, a constant γ leaves a bias: the squared distance from the
solution is O(γ² b² / (1 - ρ)²) with b² = mean_i ‖∇f_i(x*)‖². In the second form the sent vector is known before the
gradient, so it travels while the gradient is computed (`begin_exchange`); its bias is larger.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.base import GossipOptimizer


class DSGD(GossipOptimizer):
    """Equations and sources above. There is no state that a change of γ would affect."""

    name = "dsgd"
    paper = "1705.09056"

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        combine_first: bool = False,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, weight_decay, lars: see `GossipOptimizer`.
            combine_first: combine-then-adapt.
        """
        self.combine_first = combine_first
        super().__init__(params, neighbours, lr, weight_decay=weight_decay, lars=lars)

    def sent_ahead(self, x: torch.Tensor) -> tuple[Vectors, Vectors] | None:
        return ((x,), (self.received,)) if self.combine_first else None

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        if self.combine_first:
            mixed = self.mix(x, out=self.received)
            for part in self.parts():
                torch.add(mixed[part.where], g[part.where], alpha=-part.lr, out=x[part.where])
        else:
            for part in self.parts():
                torch.add(x[part.where], g[part.where], alpha=-part.lr, out=g[part.where])
            self.mix(g, out=x)
