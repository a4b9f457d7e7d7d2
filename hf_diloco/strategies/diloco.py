"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1).

    every island i:  theta_i <- theta(t-1);  H inner steps
    Delta    = mean_i (theta(t-1) - theta_i)             old minus new: a descent direction
    m(t)     = mu m(t-1) + Delta
    theta(t) = theta(t-1) - lr (Delta + mu m(t))         Nesterov; without it: theta(t-1) - lr m(t)

which is `torch.optim.SGD(lr, momentum, nesterov)` on the OLD outer parameters with Delta as their gradient.
Outer lr 1 and momentum 0 make it FedAvg (local SGD).
"""

from __future__ import annotations

import torch

from hf_diloco.strategies.base import Strategy
from hf_diloco.workspace import Workspace

_CHUNK_VALUES = 1 << 19
"""Values handled at a time: 2 MiB a buffer, so that the few passes over a chunk run in the processor's cache."""


class DiLoCo(Strategy):
    """The outer SGD with Nesterov momentum, in fp32, on the host: 8 bytes of state a parameter.

    Every operation is a plain multiplication, addition or subtraction: fused ones (as in `torch.optim.SGD`) round
    differently from one processor type to another, and islands must agree to the last bit.

    Args:
        lr: outer learning rate.
        momentum: outer momentum, from 0 up to 1.
        nesterov: whether the momentum looks ahead.
    """

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._anchor = torch.empty(0)
        self._momentum_buffer = torch.empty(0)

    def start(self, parameters: torch.Tensor) -> None:
        self._anchor = parameters.clone()
        self._momentum_buffer = torch.zeros_like(parameters) if self.momentum else torch.empty(0)

    @property
    def parameters(self) -> torch.Tensor:
        return self._anchor

    def pseudo_gradient_(self, parameters: torch.Tensor) -> float:
        square = 0.0
        for where in chunks(parameters.numel()):
            delta = torch.sub(self._anchor[where], parameters[where], out=parameters[where])
            square += float(torch.dot(delta, delta))
        return square

    def step(self, mean: torch.Tensor) -> torch.Tensor:
        for where in chunks(mean.numel()):
            self.step_chunk(where, mean[where])
        return self._anchor

    def step_chunk(self, where: slice, delta: torch.Tensor) -> None:
        """Takes the outer step on the outer parameters `where` with their part of the average."""
        update = _workspace.take("update", delta.numel(), torch.float32, delta.device)
        if not self.momentum:
            torch.mul(delta, self.lr, out=update)
        else:
            momentum_buffer = self._momentum_buffer[where]
            momentum_buffer.mul_(self.momentum).add_(delta)
            if self.nesterov:
                torch.mul(momentum_buffer, self.momentum, out=update).add_(delta).mul_(self.lr)
            else:
                torch.mul(momentum_buffer, self.lr, out=update)
        self._anchor[where].sub_(update)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"anchor": self._anchor}
        if self.momentum:
            state["momentum"] = self._momentum_buffer
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._anchor = state["anchor"]
        self._momentum_buffer = state["momentum"] if self.momentum else torch.empty(0)


def chunks(size: int) -> list[slice]:
    """Cuts a vector of `size` values into what is handled at a time."""
    return [slice(start, min(start + _CHUNK_VALUES, size)) for start in range(0, size, _CHUNK_VALUES)]


_workspace = Workspace()
