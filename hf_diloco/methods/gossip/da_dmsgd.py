"""DA-DmSGD: decentralised SGD that also averages the momentum, "double averaging" (arXiv 1905.03817).

    m̂_i = β m_i + g_i
    x_i ← Σ_j w_ij (x_j - γ m̂_j)
    m_i ← Σ_j w_ij m̂_j

Sends 2d values to each neighbour, in one message. In the limit m̂ = (I - βW)⁻¹ g: momentum amplifies the common part of
the gradients, as it should, and amplifies their differences less than DmSGD does.
"""

from __future__ import annotations

import torch

from hf_diloco.methods.gossip.momentum import MomentumOptimizer


class DADmSGD(MomentumOptimizer):
    """Equations and source above. m is in units of gradients: a change of γ applies to all of m at once."""

    name = "da-dmsgd"
    paper = "1905.03817"
    num_vectors = 2

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        momentum, ahead = self.vector("momentum_buffer"), self.received
        for part in self.parts():
            where = part.where
            torch.add(g[where], momentum[where], alpha=part.momentum, out=ahead[where])
            torch.add(x[where], ahead[where], alpha=-part.lr, out=g[where])
        self.mix_together((g, ahead), (x, momentum))
