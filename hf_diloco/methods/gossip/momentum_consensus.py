"""Momentum consensus: neighbours share parameters and momentum (Balu et al., arXiv 2010.11166).

    v_i = x_i - x_i⁻
    x_i⁺ = Σ_j w_ij x_j - γ g_i + β ((1 - ω) v_i + ω Σ_j w_ij v_j)

As in the published description, nodes share both parameters and momentum with their neighbours; ω = 0 keeps a node's
own momentum, ω = 1 shares it fully. Sends 2d values to each neighbour, x and v, in one message. (Every node combines
them in the same way, so one vector, x + βωv, would suffice; this implementation sends the same vectors as the source.)
The limit is that of DSGD, combine-then-adapt, for any β and ω: momentum does not amplify its bias, but on well
connected graphs the bias is many times that of DSGD, adapt-then-combine.

ω determines on which graphs the method is stable (see `hf_diloco.methods.topology.stability`): up to ½ on all
symmetric graphs that do not change; with 1 not on a hypercube, whose eigenvalue -½ is too small. A graph, β and ω that
diverge are refused. A large ω also needs smaller learning rates: on a ring of 8 with β = 0.9, γ times the curvature
may be up to 0.067 with ω = 1, and up to 1.27 with ω = ½.
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
    """Equations and source above. v is in units of parameters: a change of γ applies to new gradients only."""

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
            omega: ω, the share of the momentum that is averaged with the neighbours, from 0 to 1.

        Raises:
            ConfigError: a setting is out of its range, or the method diverges on the graph.
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
        """A buffer of d values for the average of the neighbours' momentum."""
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
        # The new v is in the buffer of the received one, which is in the cache; the old v would have to be loaded.
        self.received_momentum = self.replace_vector("momentum_buffer", mixed_momentum)


def move_in_passes(
    x: torch.Tensor, g: torch.Tensor, mixed: torch.Tensor, v: torch.Tensor, lr: float, momentum: float
) -> None:
    """Replaces x by x⁺ = mixed + β v - γ g, and v by v⁺ = x⁺ - x. Overwrites `mixed`."""
    mixed.add_(v, alpha=momentum).add_(g, alpha=-lr)
    torch.sub(mixed, x, out=v)
    x.copy_(mixed)


@compiled_with_fma
def move_on_processor(x: Array, g: Array, mixed: Array, v: Array, lr: np.floating, momentum: np.floating) -> None:
    """Like `move_in_passes`, in one pass over memory; bit-identical if the processor has FMA."""
    for i in range(x.shape[0]):
        new = (mixed[i] + momentum * v[i]) - lr * g[i]
        v[i] = new - x[i]
        x[i] = new
