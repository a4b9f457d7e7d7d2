"""Momentum consensus: neighbours share parameters and momentum (Balu et al., arXiv 2010.11166).

    v_i = x_i - x_i⁻
    x_i⁺ = Σ_j w_ij x_j - γ g_i + β ((1 - ω) v_i + ω Σ_j w_ij v_j)

After the published description: both parameters and momentum are shared with the neighbours; ω = 0 keeps a node's own
momentum, ω = 1 shares it fully. Sends 2d values to each neighbour, x and v, in one message. (They come in the same
combination at every node, so one vector, x + βωv, would do; sent is what the source sends.) The limit, where nothing
moves, is that of DSGD, combine-then-adapt, for any β and ω: not amplified by momentum, but on well connected graphs
many times that of DSGD, adapt-then-combine.

ω decides on which graphs it is stable (see `hf_diloco.methods.topology.stability`): up to ½ on all symmetric ones that
do not change; with 1 not on a hypercube, whose eigenvalue -½ is too small. A pair that diverges is refused. A large ω
also bears smaller learning rates only: on a ring of 8 with β = 0.9, γ times the curvature up to 0.067 with ω = 1, and
up to 1.27 with ω = ½.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.codecs.compiled import Array, compiled_with_fma, is_compiled_for
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.momentum import MomentumOptimizer
from hf_diloco.methods.topology import check_momentum_consensus


class MomentumConsensus(MomentumOptimizer):
    """Equations and source above. v is in units of parameters: a γ that changes acts on new gradients only."""

    name = "momentum-consensus"
    paper = "2010.11166"
    num_vectors = 2

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        omega: float = 0.5,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
            omega: ω, the share of the momentum that is the neighbours', from 0 to 1.

        Raises:
            ConfigError: a setting is out of its range, or it diverges on the graph.
        """
        if not 0 <= omega <= 1:
            raise ConfigError(f"omega={omega}: give a share from 0 to 1")
        self.omega = omega
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)

    def check_graph(self) -> None:
        for beta in {float(group["momentum"]) for group in self.param_groups}:
            check_momentum_consensus(self.neighbours.topology, beta, self.omega)

    @cached_property
    def received_momentum(self) -> torch.Tensor:
        """A buffer for the neighbours' momentum, d values."""
        return torch.empty_like(self.received)

    def sent_ahead(self, x: torch.Tensor) -> tuple[Vectors, Vectors]:
        return (x, self.vector("momentum_buffer")), (self.received, self.received_momentum)

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        momentum = self.vector("momentum_buffer")
        mixed_x, mixed_momentum = self.received, self.received_momentum
        self.mix_together((x, momentum), (mixed_x, mixed_momentum))
        for part in self.parts():
            where = part.where
            mine, mixed, shared = x[where], mixed_x[where], mixed_momentum[where]
            if self.omega != 1:
                torch.lerp(momentum[where], shared, self.omega, out=shared)  # (1 - ω) v_i + ω Σ_j w_ij v_j
            if is_compiled_for(x):
                arrays = mine.numpy(), g[where].numpy(), mixed.numpy(), shared.numpy()
                kind = arrays[0].dtype.type
                move_on_processor(*arrays, kind(part.lr), kind(part.momentum))
            else:
                move_in_passes(mine, g[where], mixed, shared, part.lr, part.momentum)
        # The new v takes the place of what was received, which is in the cache; its own old one is far away.
        self.received_momentum = self.replace_vector("momentum_buffer", mixed_momentum)


def move_in_passes(
    x: torch.Tensor, g: torch.Tensor, mixed: torch.Tensor, v: torch.Tensor, lr: float, momentum: float
) -> None:
    """x⁺ = mixed + β v - γ g, in the place of x, and v⁺ = x⁺ - x, in that of v. Overwrites `mixed`."""
    mixed.add_(v, alpha=momentum).add_(g, alpha=-lr)
    torch.sub(mixed, x, out=v)
    x.copy_(mixed)


@compiled_with_fma
def move_on_processor(x: Array, g: Array, mixed: Array, v: Array, lr: np.floating, momentum: np.floating) -> None:
    """As `move_in_passes`, in one pass over memory; with the same bits where the processor has FMA."""
    for i in range(x.shape[0]):
        new = (mixed[i] + momentum * v[i]) - lr * g[i]
        v[i] = new - x[i]
        x[i] = new
