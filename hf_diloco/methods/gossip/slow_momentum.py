"""SlowMo over a method of this package (arXiv 1910.00643): momentum on what `sync_every` of its steps have done.

    tau steps of the method lead node i from x_0 to x_i
    then   x  = mean_j x_j, exact, over all nodes;  without it x_i
           v  = beta (gamma_t / gamma_{t-1}) v + (x_0 - x);   x_0 = x_0 - alpha v;   x_i = x_0

The equations themselves are in `hf_diloco.methods.outer.slowmo`, which islands use too. alpha is `outer_lr`, beta
`outer_momentum`, tau `sync_every`, gamma_t the learning rate of the last of the tau steps, of each parameter group.

With the average all nodes hold the same x_0, v and gamma, to the last bit: gamma is the mean of what the nodes have,
and travels with the parameters. Without it each node has its own, and sends nothing.
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
    """One node's outer state: x_0 and v, two vectors of d values (one if beta is 0), and a learning rate a group.

    A node that begins where the others already are, as one that returns, lacks their x_0 and v. It is late: it says so
    with its part of the next average, after which all nodes take the mean of x_0 and v over those that are not late.
    If all are late, as at the beginning of a further training, they take the mean over all: of v = 0, and of the
    parameters from which they go on.

    Args:
        settings: see `SlowMoSettings`.
        spans: where each parameter group lies in the flat vectors, one after the other.
    """

    def __init__(self, settings: SlowMoSettings, spans: Sequence[slice]) -> None:
        runs = [(span.start, span.stop, group) for group, span in enumerate(spans)]
        self.settings = settings
        self._num_values = spans[-1].stop
        self._outer = SlowMo(settings.outer_lr, settings.outer_momentum, Groups(len(spans), runs))
        self._is_late = False

    @property
    def has_begun(self) -> bool:
        """Whether there is an x_0."""
        return bool(self._outer.state_dict())

    def begin(self, x: torch.Tensor, is_late: bool) -> None:
        """Takes `x`, flat, as x_0, with v = 0.

        Args:
            x: copied.
            is_late: other nodes may have another x_0, or some v.
        """
        self._outer.start(x)
        self._is_late = is_late and self.settings.average

    def is_due(self, num_steps: int) -> bool:
        """Whether an outer step follows the step that makes it so many."""
        return num_steps % self.settings.sync_every == 0

    def step(self, x: torch.Tensor, rates: Sequence[float], buffers: Vectors, neighbours: Neighbours) -> Traffic:
        """Takes the outer step. Collective over the nodes with the average.

        Where too many nodes are lost to form an average, the outer step is left out, with a warning: the node goes on
        from its own parameters, and is late.

        Args:
            x: the parameters, flat; overwritten with x_0.
            rates: learning rates of the step that was taken last, one a group.
            buffers: vectors that are averaged with the parameters; overwritten.
            neighbours: this node's end of the graph.

        Returns:
            What crossed the node's boundary.
        """
        traffic = Traffic()
        if self.settings.average:
            try:
                traffic, rates = self._average(x, rates, buffers, neighbours)
            except IslandLostError as error:
                self._is_late = True
                logger.warning("slowmo: this outer step is left out, as there is no average of all nodes (%s)", error)
                return traffic
        self._outer.pseudo_gradient_(x)
        x.copy_(self._outer.step(x, rates))
        return traffic

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: anchor (x_0), slow-momentum (v), rates, and whether the node is late; not copied."""
        return {**self._outer.state_dict(), "is_late": self._is_late}

    def load_state_dict(self, state: Mapping[str, Any], like: torch.Tensor) -> None:
        """Takes back what `state_dict` gave.

        Args:
            state: copied.
            like: the parameters, flat.

        Raises:
            CheckpointError: it is of another model, or of other parameter groups.
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
        self._is_late = bool(state["is_late"])

    def _average(
        self, x: torch.Tensor, rates: Sequence[float], buffers: Vectors, neighbours: Neighbours
    ) -> tuple[Traffic, list[float]]:
        """Parameters and buffers become their means over all nodes; returns those of the rates, too.

        Everything travels in one vector, so that an error leaves all of it as it was.
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
        """Gives all nodes the mean outer state of those that are not late, with the same bits."""
        state = list(self._outer.state_dict().values())
        means, traffic = mean_of_holders(neighbours, state, is_holder=all_are_late or not self._is_late)
        if means is None:
            raise IslandLostError("no node is left that holds the slow momentum")
        for vector, mean in zip(state, means, strict=True):
            vector.copy_(mean)
        self._is_late = False
        return traffic
