"""DecentLaM: decentralised SGD with momentum, without the bias that momentum adds (arXiv 2104.11981).

    y_i = x_i - γ g_i
    g̃_i = (x_i - Σ_j w_ij y_j) / γ
    m_i ← β m_i + g̃_i
    x_i ← x_i - γ m_i

DSGD is gradient descent with the gradient g̃; DecentLaM is momentum SGD with it. Sends y: d values to each neighbour.
In the limit g̃ = 0, so the limit is that of DSGD, for any β; with β = 0 DecentLaM is DSGD. At constant γ it equals the
heavy ball x⁺ = W (x - γ g) + β (x - x⁻).

Directed graphs need a small β (see `hf_diloco.methods.topology.stability`); a graph and a β that diverge are refused.
There is no Nesterov form: the source defines none, and momentum that looks ahead on g̃, x⁺ = x - γ (g̃ + β m), diverges
as γ → 0 if W has an eigenvalue of -1 / (1 + 2β) or less. For β = 0.9, a hypercube of 8 nodes has one (-½).
"""

from __future__ import annotations

import torch

from hf_diloco.methods.gossip.momentum import MomentumOptimizer
from hf_diloco.methods.topology import check_decentlam


class DecentLaM(MomentumOptimizer):
    """Equations and source above.

    m is in units of gradients, and each step divides and multiplies by its own γ. So the heavy ball's β becomes
    β γ / γ⁻ at a step where γ changes, or 2 β if γ more than doubles, as at a warm restart of a cosine schedule (see
    `Part.shrinkage`). If γ is 0, as at the first step of a warm-up, the division is skipped: the nodes average, m only
    decays, and m does not move x.
    """

    name = "decentlam"
    paper = "2104.11981"

    def check_graph(self) -> None:
        for beta in {float(group["momentum"]) for group in self.param_groups}:
            check_decentlam(self.neighbours.topology, beta)

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        momentum = self.vector("momentum_buffer")
        for part in self.parts():
            torch.add(x[part.where], g[part.where], alpha=-part.lr, out=g[part.where])
        mixed = self.mix(g, out=self.received)
        for part in self.parts():
            mine, m = x[part.where], momentum[part.where].mul_(part.momentum * part.shrinkage)
            if part.lr:
                m.add_(mixed[part.where].sub_(mine), alpha=-1 / part.lr)
                mine.add_(m, alpha=-part.lr)
            else:
                mine.copy_(mixed[part.where])
