"""D², or exact diffusion: decentralised SGD without bias (arXiv 1803.07068; 1702.05122).

    x⁺ = W̄ (2x - x⁻ - γ (g - g⁻)),    W̄ = (I + W) / 2;  the first step is x⁺ = W̄ (x - γ g)

implemented as exact diffusion, whose state is one vector, ψ⁻ = x⁻ - γ⁻ g⁻:

    ψ = x - γ g;  φ = ψ + min(1, γ / γ⁻) (x - ψ⁻);  x⁺ = W̄ φ;  ψ⁻ ← ψ

Sends φ: d values to each neighbour. The limit is the exact solution, however much the nodes' data differ. D² needs a
fixed symmetric graph with all eigenvalues above -1/3; those of W̄ are never below 0. It has no momentum.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.base import GossipOptimizer
from hf_diloco.methods.topology import PeriodicTopology, Topology
from hf_diloco.utils.workspace import Workspace

_workspace = Workspace()


class D2(GossipOptimizer):
    """Equations and sources above.

    The correction x - ψ⁻ sums to 0 over all nodes. Thus their mean is x̄⁺ = x̄ - γ ḡ for any schedule of γ. When a node
    is lost, the sum over the remaining nodes equals the step of the lost node's gradient: at a constant γ they still
    converge to the solution of all nodes. The correction shrinks when γ falls, or that sum would drive the nodes away
    in the end; it does not grow when γ rises, as that would drive nodes apart. Rounding errors add up in the sum, too,
    and nothing damps them: in fp32 the error of the solution is 1e-6 at γ = 0.1 and 2e-3 at γ = 0.01 (8 nodes on a
    ring, values and curvatures near 1).
    """

    name = "d2"
    paper = "1803.07068"
    state_names = ("previous_descent",)

    def __init__(
        self, params: ParamsT, neighbours: Neighbours, lr: float, *, weight_decay: float = 0.0, lars: float = 0.0
    ) -> None:
        """Raises `ConfigError` if the graph is directed, or changes. For the arguments see `GossipOptimizer`."""
        super().__init__(params, neighbours, lr, weight_decay=weight_decay, lars=lars)

    def check_graph(self) -> None:
        topology = self.neighbours.topology
        if not (topology.is_static and topology.is_symmetric):
            raise ConfigError(
                f"method {self.name}: needs a symmetric graph that does not change, not {topology!r}; take ring, "
                "hypercube or symmetric-exponential; or DecentLaM or QG-DmSGD"
            )

    def check_slow_momentum(self, settings: SlowMoSettings) -> None:
        raise ConfigError(
            f"slowmo does not go with method {self.name}, which corrects its bias by the way that the parameters "
            "have gone since its last step, and an outer step moves them: remove slowmo, or choose decentlam or dsgd"
        )

    @cached_property
    def _half(self) -> Topology:
        """The graph with the weights W̄."""
        graph = self.neighbours.topology
        return PeriodicTopology(graph.name, (np.eye(graph.num_nodes) + graph.weights()) / 2)

    def begin_state(self, x: torch.Tensor) -> None:
        """Resets the state. If one node does so alone, its part of the correction is lost, and some bias remains."""
        self.vector("previous_descent").copy_(x)

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        previous = self.vector("previous_descent")
        if not self.num_steps:
            self.begin_state(x)
        for part in self.parts():
            mine, gradient, psi = x[part.where], g[part.where], previous[part.where]
            correction = torch.sub(mine, psi, out=_workspace.take("correction", mine.numel(), x.dtype, x.device))
            torch.add(mine, gradient, alpha=-part.lr, out=psi)
            torch.add(psi, correction, alpha=min(1.0, part.growth), out=gradient)  # φ
        self.mix(g, out=x, topology=self._half)
