"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1).

    every island i:  theta_i <- theta(t-1);  H inner steps
    Delta    = mean_i (theta(t-1) - theta_i)             old minus new: a descent direction
    m(t)     = mu m(t-1) + Delta
    theta(t) = theta(t-1) - lr (Delta + mu m(t))         Nesterov; without it: theta(t-1) - lr m(t)

which is `torch.optim.SGD(lr, momentum, nesterov)` on the old outer parameters with Delta as their gradient.
With outer lr 1 and momentum 0 it is FedAvg (local SGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hf_diloco.methods.outer.base import Chosen, Groups, OuterMethod, chunks, is_auto, sgd_

if TYPE_CHECKING:
    import torch

    from hf_diloco.config.diloco import DiLoCoConfig


_BEST_RATES = {16: 1.0, 8: 0.8, 2: 0.6}
"""By the least number of islands: 2 and 8 from arXiv 2503.09799, for any model size; 16 from arXiv 2505.23725."""

_FEW_ROUNDS = 50


class DiLoCo(OuterMethod):
    """The outer SGD with Nesterov momentum, in fp32, on the host: 8 bytes of state per parameter.

    Every operation is a plain multiplication, addition or subtraction. Fused operations (as in `torch.optim.SGD`)
    round differently on different processor types, but islands must agree to the last bit.

    The momentum is from 0 up to 1; if `nesterov`, it looks ahead.
    """

    name = "diloco"
    summary = "outer SGD with Nesterov momentum on the averaged pseudo-gradient"
    paper = "2311.08105"
    streams = True
    feeds_back = True
    chooses: ClassVar[Sequence[str]] = ("outer_lr", "outer_momentum")

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.vectors = ("momentum",) if momentum else ()

    @classmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> DiLoCo:
        return cls(config.outer_lr, config.outer_momentum, config.nesterov)

    @classmethod
    def choose(cls, config: DiLoCoConfig, num_rounds: int | None) -> Chosen:
        """Chooses the best published values for the number of islands; less momentum if there are few rounds."""
        values: dict[str, float] = {}
        sources = []
        momentum = config.outer_momentum
        islands = config.num_islands
        if is_auto(config.outer_momentum):
            momentum, why = (0.6, "one island, arXiv 2505.23725") if islands == 1 else (0.9, "arXiv 2311.08105")
            if num_rounds is not None and num_rounds < _FEW_ROUNDS:
                momentum, why = 0.5, f"{num_rounds} rounds, in which 0.9 overshoots"
            values["outer_momentum"] = momentum
            sources.append(f"outer_momentum {momentum:g} ({why})")
        if is_auto(config.outer_lr):
            if islands == 1:
                rate, why = (0.4, "arXiv 2503.09799") if momentum >= 0.85 else (0.7, "arXiv 2505.23725")
                why = f"one island with momentum {momentum:g}, {why}"
            else:
                rate = next(best for least, best in _BEST_RATES.items() if islands >= least)
                why = f"{islands} islands, {'arXiv 2505.23725' if islands >= 16 else 'arXiv 2503.09799'}"
            values["outer_lr"] = rate
            sources.append(f"outer_lr {rate:g} ({why})")
        return Chosen(values, ", ".join(sources))

    def step(self, mean: torch.Tensor, rates: Sequence[float] = ()) -> torch.Tensor:
        for where in chunks(mean.numel()):
            self.step_chunk(where, mean[where])
        return self.parameters

    def step_chunk(self, where: slice, delta: torch.Tensor) -> None:
        """Takes the outer step on a slice of the outer parameters, with the same slice of the average."""
        velocity = self._state["momentum"][where] if self.momentum else None
        sgd_(self.parameters[where], delta, self.lr, velocity, self.momentum, self.nesterov)
