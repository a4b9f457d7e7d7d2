"""The base of all decentralised methods: flat vectors, parameter groups, weight decay, LARS, and saved state.

A node's parameters are views of one flat vector; so are its gradients and each part of a method's state. Hence a node
sends a neighbour one message per step without packing, an operation on all parameters is one kernel, and a method
reads like its equation. With `torch._foreach` operations the parameters could keep their own memory, but every step
would have to pack the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, overload

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.errors import CheckpointError, UnsupportedError
from hf_diloco.gossip.averages import Vectors
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.flat import FlatParameters, Part, check_finite, check_group, own_settings
from hf_diloco.methods.gossip.slow_momentum import SlowMomentum
from hf_diloco.methods.topology import Topology
from hf_diloco.transport.base import Traffic


class GossipOptimizer(torch.optim.Optimizer, ABC):
    """One node's optimizer: `step()` takes a step and averages with the neighbours. Collective over the nodes.

    All nodes must begin with equal parameters, in the same order. Move the model to its device first: parameters
    become views of one vector; their values and memory formats do not change. A gradient that is None counts as zero,
    since neighbours wait for the whole vector; so does a gradient that is not finite, with a warning. Weight decay
    applies in both cases, but not to frozen parameters. Gradient scalers cannot be used, as they skip steps.

    Settings, which may differ between parameter groups:

    - `lr`: γ. May change at any step, also through torch's schedulers; each method documents the effect on its state.
    - `momentum`: β, in methods that have it.
    - `weight_decay`: λ of the L2 penalty: λx is added to the gradient, as `torch.optim.SGD` does, not decoupled.
    - `lars`: η of layer-wise scaling (LARS, arXiv 1708.03888), at most 1; 0 is without. Each tensor's gradient is
      replaced by η‖x‖ / (‖g‖ + λ‖x‖) (g + λx), or g + λx where a norm is 0, before anything else. Usually 0 for biases
      and norms.

    Attributes:
        name, paper: the method's name in the settings; the arXiv number of its source, empty for none.
        num_vectors: vectors of d values sent to each neighbour in a step.
        refuses_payload: why the setting `payload` cannot be used, with the remedy; empty if it can.
        is_in_step: whether nodes are in lockstep, none more than a few steps ahead of another.
        state_names: names of the vectors in the method's state, besides the parameters: d values each.
        traffic: of the last step.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    num_vectors: ClassVar[int] = 1
    refuses_payload: ClassVar[str] = ""
    is_in_step: bool = True
    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: ParamsT, neighbours: Neighbours, lr: float, **settings: float) -> None:
        """
        Args:
            params: as for any torch optimizer: parameters, or groups of them; all fp32 or all fp64, on one device.
            neighbours: this node's end of the graph.
            lr: γ.
            settings: the other settings of a group.

        Raises:
            ConfigError: a setting is out of its range, or the method does not converge on the graph.
            UnsupportedError: parameters of other or several dtypes or devices.
        """
        super().__init__(params, {"lr": lr, **settings, "num_steps": 0, "last_lr": 0.0})
        self.neighbours = neighbours
        self.traffic = Traffic()
        for group in self.param_groups:
            check_group(group)
        self.check_graph()
        self._has_begun = False
        self._slow: SlowMomentum | None = None
        self._flat = FlatParameters(self.param_groups, self.name)
        self._x, self._g = self._flat.x, self._flat.g
        self._vectors = {name: torch.zeros_like(self._x) for name in self.state_names}
        self._adopt()
        self._show_state()

    def check_graph(self) -> None:
        """Raises `ConfigError` if the method, with these settings, does not converge on the graph."""

    def add_slow_momentum(self, settings: SlowMoSettings) -> None:
        """Adds an outer step of SlowMo after every `sync_every` steps; call it before the first step.

        Raises as `check_slow_momentum`, or `UnsupportedError` if the nodes cannot average such parameters.
        """
        self.check_slow_momentum(settings)
        if settings.average:
            self.neighbours.check_average(self._x)
        self._slow = SlowMomentum(settings, self._flat.spans)

    def check_slow_momentum(self, settings: SlowMoSettings) -> None:
        """Raises `ConfigError` if these settings of SlowMo cannot be combined with the method."""

    @abstractmethod
    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Takes the step; all vectors are flat, of d values.

        Args:
            x: the parameters, changed in place.
            g: the gradients with weight decay and LARS; may be overwritten.
        """

    def sent_ahead(self, x: torch.Tensor) -> tuple[Vectors, Vectors] | None:
        """Returns the inputs and outputs that `update` will mix, if known from the parameters before the gradient."""
        return None

    @property
    def exchanges(self) -> tuple[Topology, int]:
        """The graph of exchanges between nodes in lockstep, and the number of steps from one exchange to the next."""
        return self.neighbours.topology, 1

    @cached_property
    def received(self) -> torch.Tensor:
        """A buffer of d values for the neighbours' average; allocated on first use."""
        return torch.empty_like(self._x)

    @property
    def num_steps(self) -> int:
        """Steps taken so far; selects the next weights of a graph that changes."""
        return int(self.param_groups[0]["num_steps"])

    @torch.no_grad()
    def begin_exchange(self) -> None:
        """Starts this step's exchange, if its data is known before the gradient; call it before the forward pass.

        The exchange then runs in the background of forward and backward, and `step` waits for its end. Results are
        bit-identical with and without this call. The parameters must not change until `step`, except inside
        `averaged_weights`. A no-op if the data depends on the gradient, if the exchange has already begun, or if the
        node is alone. `step` raises any error of the exchange.
        """
        if self.neighbours.num_nodes == 1:
            return
        vectors_and_outs = self.sent_ahead(self._x)
        if vectors_and_outs is None or self._has_begun:
            return
        self._adopt()
        self.check_sent(*vectors_and_outs[0])
        self.neighbours.offer(self._x, self.num_steps)
        self.neighbours.begin(*vectors_and_outs, self.num_steps)
        self._has_begun = True

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step on this node, together with the others; returns the loss of the closure, called before.

        Raises:
            IslandLostError: a node did not answer within the timeout. The parameters are undefined.
            ExchangeError: values are not finite, see `check_sent`. The parameters are undefined.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.traffic = Traffic()
        self._adopt()
        if self._slow and not self._slow.has_begun:
            self._slow.begin(self._x, is_late=self.num_steps > 0)
        if not self._has_begun:
            self.neighbours.offer(self._x, self.num_steps)
        self._flat.read_gradients(self.neighbours.node, self.num_steps)
        self.average_gradient(self._g)
        self._flat.decay(self.param_groups)
        self.update(self._x, self._g)
        self._has_begun = False
        for group in self.param_groups:
            group["num_steps"] += 1
            group["last_lr"] = float(group["lr"]) or group["last_lr"]
        if self._slow and self._slow.is_due(self.num_steps):
            self._take_outer_step(self._slow)
        return loss

    def _take_outer_step(self, slow: SlowMomentum) -> None:
        buffers = slow.settings.inner_buffers
        averaged = [self.vector(name) for name in self.state_names] if buffers == "average" else []
        if slow.settings.average:
            self.check_sent(self._x, *averaged)
        rates = [float(group["lr"]) for group in self.param_groups]
        traffic = slow.step(self._x, rates, averaged, self.neighbours)
        if traffic is not None:
            self.traffic += traffic
            if buffers == "zero":
                self.begin_state(self._x)
        self.neighbours.rekey()  # the outer step moves the parameters too far for encoded differences

    @property
    def flat_parameters(self) -> torch.Tensor:
        """All parameters as one vector, in the order in which nodes send them; read only.

        Raises `UnsupportedError` if an exchange has begun.
        """
        self._check_nothing_begun()
        self._adopt()
        return self._x

    @torch.no_grad()
    def begin_at(self, enter: Callable[[torch.Tensor], int]) -> int:
        """Enters a run that went on without this node, with the initial state of the method; returns the next step.

        Args:
            enter: overwrites the flat parameters with the new ones, and returns the next step.

        Raises:
            UnsupportedError: the method's state cannot be reset on one node alone, or an exchange has begun.
        """
        self._check_nothing_begun()
        self.check_entry()
        self._adopt()
        step = enter(self._x)
        self._begin_anew(step)
        return step

    @torch.no_grad()
    def begin_training(self) -> None:
        """Resets the method's state and the number of steps, but keeps the parameters; call it on all nodes.

        Raises `UnsupportedError` if an exchange has begun.
        """
        self._check_nothing_begun()
        self._adopt()
        self._begin_anew(0)

    def check_entry(self) -> None:
        """Raises `UnsupportedError` if the method's state cannot be reset on one node alone."""

    def _begin_anew(self, step: int) -> None:
        self.begin_state(self._x)
        if self._slow:
            self._slow.begin(self._x, is_late=True)
        for group in self.param_groups:
            group.update(num_steps=step, last_lr=0.0)

    def begin_state(self, x: torch.Tensor) -> None:
        """Sets the method's state to that of a first step from `x`, flat: momentum is 0."""
        for vector in self._vectors.values():
            vector.zero_()

    def average_gradient(self, g: torch.Tensor) -> None:
        """Averages the gradient over all nodes, in methods that do so; a no-op in others."""

    def check_sent(self, *vectors: torch.Tensor) -> None:
        """Raises `ExchangeError` if a vector to be sent is not finite, as it would spread to the neighbours."""
        if not self._has_begun:  # if the exchange has begun, the vectors were checked and sent already
            check_finite(vectors, self.neighbours.node, self.num_steps)

    def mix(
        self, vector: torch.Tensor, out: torch.Tensor, topology: Topology | None = None, step: int | None = None
    ) -> torch.Tensor:
        """Writes Σ_j w_ij vector_j to `out`, of equal size and no overlap, and returns `out`.

        `topology` and `step` select the weights, see `Neighbours.mix`. Default: those of this step.
        """
        self.check_sent(vector)
        step = self.num_steps if step is None else step
        self.traffic += self.neighbours.mix((vector,), (out,), step, topology=topology)
        return out

    def mix_together(self, vectors: Vectors, outs: Vectors) -> None:
        """Like `mix`, for several vectors that travel together."""
        self.check_sent(*vectors)
        self.traffic += self.neighbours.mix(vectors, outs, self.num_steps)

    def vector(self, name: str) -> torch.Tensor:
        """Returns one of `state_names`: flat, of d values."""
        return self._vectors[name]

    def replace_vector(self, name: str, vector: torch.Tensor) -> torch.Tensor:
        """Replaces one of `state_names` by another vector; returns the old one."""
        old, self._vectors[name] = self._vectors[name], vector
        self._show_state()
        return old

    def parts(self) -> Iterator[Part]:
        """Cuts the flat vectors by parameter group; on a CPU also into pieces that fit its cache."""
        return self._flat.parts(self.param_groups)

    @contextmanager
    def averaged_weights(self) -> Iterator[float]:
        """Sets the parameters to the mean over all nodes inside, to evaluate or save. Collective over the nodes.

        Yields:
            ‖x_i - x̄‖² / ‖x̄‖², the relative squared distance of this node's parameters from the mean.

        Raises:
            IslandLostError: a node did not answer within the timeout. The parameters are unchanged.
        """
        self._adopt()
        self.check_sent(self._x)
        self.neighbours.drain()
        own = self._x.clone()
        try:
            with torch.no_grad():
                self.neighbours.average(self._x)
                distance = float((own - self._x).square().sum() / self._x.square().sum())
            yield distance
        finally:
            self._adopt()
            self._x.copy_(own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `UnsupportedError` after construction: all nodes would have to send more from the same step on."""
        if hasattr(self, "_flat"):
            raise UnsupportedError(f"{self.name}: parameters cannot be added; give all when the optimizer is made")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with SlowMo's outer state."""
        state = super().state_dict()
        return state if self._slow is None else {**state, "slowmo": self._slow.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but restores only `lr` of the settings.

        Together with the parameters, which the model's checkpoint holds, a run resumes bit for bit.

        Raises:
            CheckpointError: the state is another method's, or only one of the saved run and this one has SlowMo.
            UnsupportedError: an exchange has begun.
        """
        self._check_nothing_begun()
        if ("slowmo" in state_dict) != (self._slow is not None):
            was, is_now = ("with", "without") if self._slow is None else ("without", "with")
            raise CheckpointError(
                f"{self.name}: the state was saved {was} slowmo, and training goes on {is_now} it: set slowmo as it "
                "was, or start anew in another run folder"
            )
        if self._slow:
            self._slow.load_state_dict(state_dict["slowmo"], self._x)
        with own_settings(self):
            super().load_state_dict(state_dict)
        for name, vector in self._vectors.items():
            for parameter, view in zip(self._flat.parameters, self._flat.views(vector), strict=True):
                if name not in self.state[parameter]:
                    raise CheckpointError(f"{self.name}: the state holds no {name}; it is another method's")
                view.copy_(self.state[parameter][name])
        self._show_state()

    def _check_nothing_begun(self) -> None:
        """Raises `UnsupportedError` between `begin_exchange` and `step`: the current parameters were already sent."""
        if self._has_begun:
            raise UnsupportedError(
                f"{self.name}: neighbours have been sent the parameters of step {self.num_steps}: take that step "
                "before another state is loaded, or start all nodes again from their checkpoints"
            )

    def _show_state(self) -> None:
        """Puts views of the vectors, one per parameter, into `state`, where `state_dict` finds them."""
        for name, vector in self._vectors.items():
            for parameter, view in zip(self._flat.parameters, self._flat.views(vector), strict=True):
                self.state[parameter][name] = view

    def _adopt(self) -> None:
        self._flat.adopt(self.neighbours.drain)
