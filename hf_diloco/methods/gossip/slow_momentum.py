"""SlowMo over a gossip method (arXiv 1910.00643): momentum on the progress of `sync_every` of its steps.

    tau steps of the method lead node i from x_0 to x_i
    then   x  = mean_j x_j, exact, over all nodes;  without it x_i
           v  = beta (gamma_t / gamma_{t-1}) v + (x_0 - x);   x_0 = x_0 - alpha v;   x_i = x_0

The outer step is that of `hf_diloco.methods.outer.slowmo`, which islands use too. alpha is `outer_lr`, beta
`outer_momentum`, tau `sync_every`, gamma_t the learning rate of the last of the tau steps, for each parameter group.

With the average, all nodes hold bit-identical x_0, v and gamma: gamma is the mean of the nodes' learning rates, which
travel with the parameters. Without the average, each node has its own, and sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_diloco.errors import CheckpointError, IslandLostError
from hf_diloco.gossip.averages import Vectors, mean_of_holders
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.outer import Groups
from hf_diloco.methods.outer.slowmo import SlowMo
from hf_diloco.transport.base import Traffic

logger = logging.getLogger("hf_diloco")


class SlowMomentum:
    """One node's outer state: x_0 and v, two vectors of d values (one if beta is 0), and a learning rate per group.

    A node that enters while the others go on, such as a restarted node, lacks their x_0 and v. It counts as late, and
    tells the others with its part of the next average. After that average all nodes take the mean of x_0 and v over
    the nodes that are not late. If all are late, as at the beginning of a further training, they take the mean over
    all: v = 0, and the mean of their parameters.

    Args:
        spans: the slice of each parameter group in the flat vectors, in order.

    Attributes:
        has_begun: whether x_0 is set.
    """

    def __init__(self, settings: SlowMoSettings, spans: Sequence[slice]) -> None:
        runs = [(span.start, span.stop, group) for group, span in enumerate(spans)]
        self.settings = settings
        self._num_values = spans[-1].stop
        self._outer = SlowMo(settings.outer_lr, settings.outer_momentum, Groups(len(spans), runs))
        self.has_begun = False
        self._is_late = False

    def begin(self, x: torch.Tensor, is_late: bool) -> None:
        """Sets x_0 to a copy of `x`, and v to 0; `is_late`: other nodes may have another x_0, or a v that is not 0."""
        self._outer.start(x)
        self.has_begun = True
        self._is_late = is_late and self.settings.average

    def is_due(self, num_steps: int) -> bool:
        """Whether an outer step follows after `num_steps` steps."""
        return num_steps % self.settings.sync_every == 0

    def step(
        self, x: torch.Tensor, rates: Sequence[float], buffers: Vectors, neighbours: Neighbours
    ) -> Traffic | None:
        """Takes the outer step; returns this node's traffic. With the average, collective over the nodes.

        If too many nodes are lost to form an average, skips the outer step with a warning, and returns None: the node
        goes on from its own parameters and momentum, and counts as late.

        Args:
            x: the parameters, flat; overwritten with x_0.
            rates: learning rates of the last step, one per group.
            buffers: vectors to average together with the parameters; overwritten.
        """
        traffic = Traffic()
        if self.settings.average:
            try:
                traffic, rates = self._average(x, rates, buffers, neighbours)
            except IslandLostError as error:
                self._is_late = True
                logger.warning("slowmo: this outer step is left out, as there is no average of all nodes (%s)", error)
                return None
        self._outer.pseudo_gradient_(x)
        x.copy_(self._outer.step(x, rates))
        return traffic

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, not copied: anchor (x_0), slow-momentum (v), rates, and whether it is late."""
        outer = self._outer.state_dict() if self.has_begun else {}
        return {**outer, "is_late": self._is_late}

    def load_state_dict(self, state: Mapping[str, Any], like: torch.Tensor) -> None:
        """Restores a copy of a state of `state_dict`, to the device of the parameters `like`.

        Raises:
            CheckpointError: the state belongs to another model, or to other parameter groups.
        """
        if "anchor" not in state:  # saved before the first step
            return
        if state["anchor"].numel() != self._num_values:
            raise CheckpointError(
                f"slowmo: the state is of {state['anchor'].numel():,} parameters, and the model has "
                f"{self._num_values:,}: resume with the model of the run that was saved"
            )
        vectors = {name: value.to(like.device, copy=True) for name, value in state.items() if name != "is_late"}
        self._outer.load_state_dict(vectors)
        self.has_begun = True
        self._is_late = bool(state["is_late"])

    def _average(
        self, x: torch.Tensor, rates: Sequence[float], buffers: Vectors, neighbours: Neighbours
    ) -> tuple[Traffic, list[float]]:
        """Replaces parameters and buffers by their means over all nodes; returns the mean rates, too.

        Everything travels in one vector, so that an error leaves parameters and buffers unchanged.
        """
        vectors = [x, *buffers]
        numbers = x.new_tensor([*rates, float(self._is_late)])
        joint = torch.cat([*vectors, numbers])
        traffic = neighbours.average(joint)
        *means, numbers = joint.split([*(len(vector) for vector in vectors), len(numbers)])
        *agreed, share_late = numbers.tolist()
        if share_late > 0:
            traffic += self._catch_up(neighbours, all_are_late=share_late > 1 - 0.5 / neighbours.num_nodes)
        for vector, mean in zip(vectors, means, strict=True):
            vector.copy_(mean)
        return traffic, agreed

    def _catch_up(self, neighbours: Neighbours, all_are_late: bool) -> Traffic:
        """Sets the outer state of all nodes to its mean over the nodes that are not late, bit-identical on all."""
        state = list(self._outer.state_dict().values())
        means, traffic = mean_of_holders(neighbours, state, is_holder=all_are_late or not self._is_late)
        if means is None:
            raise IslandLostError("no node is left that holds the slow momentum")
        for vector, mean in zip(state, means, strict=True):
            vector.copy_(mean)
        self._is_late = False
        return traffic
