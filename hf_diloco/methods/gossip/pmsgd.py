"""PmSGD: momentum SGD with the exact mean gradient of all nodes, as in data-parallel training: the baseline.

    m ← β m + mean_j g_j
    x ← x - γ m

Nesterov replaces m by ḡ + β m, as `torch.optim.SGD` does. Needs an all-reduce of d values: each node sends
2d (n - 1) / n values; the graph is not used. All nodes hold bit-identical parameters, without bias, if they start
equal.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.momentum import MomentumOptimizer


class PmSGD(MomentumOptimizer):
    """Equations above. m is in units of gradients: a change of γ applies to all of m at once.

    Weight decay and LARS apply to the mean gradient, before momentum.
    """

    name = "pmsgd"
    num_vectors = 0
    refuses_payload = (
        "averages gradients over all nodes, and knows no neighbours that could keep replicas; remove payload, or "
        "choose another method"
    )

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
            nesterov: whether the momentum looks ahead.
        """
        self.nesterov = nesterov
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)
        neighbours.check_average(self._g)

    def check_entry(self) -> None:
        raise UnsupportedError(
            f"{self.name}: a node cannot return, as it lacks the momentum of the others; start all nodes again from "
            "their checkpoints, or choose a method whose nodes average with neighbours"
        )

    def check_slow_momentum(self, settings: SlowMoSettings) -> None:
        if settings.average:
            raise ConfigError(
                f"slowmo.average=true: all nodes of {self.name} hold the same parameters after every step, so that an "
                "average of them costs time and changes nothing; set it to false"
            )

    def average_gradient(self, g: torch.Tensor) -> None:
        self.traffic += self.neighbours.average(g)

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        self.descend(x, g, out=x)
