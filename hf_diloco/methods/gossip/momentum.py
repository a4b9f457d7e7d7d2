"""What the methods with momentum have in common."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.base import GossipOptimizer


class MomentumOptimizer(GossipOptimizer):
    """A method that keeps a momentum of d values from one step to the next."""

    state_names = ("momentum_buffer",)

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
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
        """
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)
