"""The base of methods with momentum."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.base import GossipOptimizer


class MomentumOptimizer(GossipOptimizer):
    """A method whose state is a momentum of d values; if `nesterov`, it looks ahead."""

    state_names = ("momentum_buffer",)
    nesterov: bool = False

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """For the arguments see `GossipOptimizer`."""
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)

    def descend(self, x: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
        """m ← βm + g; writes x - γm, or x - γ (g + βm) with Nesterov, to `out`, which may be x or g. Overwrites g.

        The momentum is that of `torch.optim.SGD`.
        """
        momentum = self.vector("momentum_buffer")
        for part in self.parts():
            gradient = g[part.where]
            m = momentum[part.where].mul_(part.momentum).add_(gradient)
            direction = gradient.add_(m, alpha=part.momentum) if self.nesterov else m
            torch.add(x[part.where], direction, alpha=-part.lr, out=out[part.where])
