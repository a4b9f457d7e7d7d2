"""One-outer-step overlap in its eager form (Kale et al., arXiv 2502.12996).

    Delta~_i(t) = Delta_i(t)/M + ( Delta(t-1) - Delta_i(t-1)/M )
    theta_i(t)  = OuterOpt( theta_i(t-1), Delta~_i(t) )

An island applies its own new pseudo-gradient at once, and the others' one round later, so the exchange is hidden
behind a whole round of inner steps. Summed over rounds, Delta~_i equals the average except for the last term, so
islands differ slightly between rounds but do not drift apart. (The paper describes the update in words; these
equations are derived from them.)

With a single island Delta~ is Delta, and this method equals DiLoCo.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_diloco.methods.outer.base import Groups, chunks
from hf_diloco.methods.outer.diloco import DiLoCo

if TYPE_CHECKING:
    import torch

    from hf_diloco.config.diloco import DiLoCoConfig


class Eager(DiLoCo):
    """DiLoCo's outer SGD on Delta~, with M = `num_islands`: 12 bytes of state per parameter."""

    name = "eager"
    summary = "DiLoCo that takes its own part of a round at once, the others' one round later: the exchange is hidden"
    paper = "2502.12996"
    streams = False
    feeds_back = False
    anticipates = True

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True, num_islands: int = 1) -> None:
        super().__init__(lr, momentum, nesterov)
        self.vectors = (*self.vectors, "own")
        self._share = 1.0 / num_islands

    @classmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> Eager:
        return cls(config.outer_lr, config.outer_momentum, config.nesterov, config.num_islands)

    @property
    def numbers(self) -> Mapping[str, int]:
        return {"ahead": 1}

    @property
    def own(self) -> torch.Tensor:
        """Delta_i(t)/M of the round in flight, fp32 (not a copy)."""
        return self._state["own"]

    @property
    def ahead(self) -> float:
        """This island's weight in the round whose average has been anticipated but not applied yet.

        -1 if this island is left out of that round; 0 if there is no such round.
        """
        return self._state["ahead"].item()

    def step_eagerly(self, delta: torch.Tensor | None, weight: float, means: Sequence[torch.Tensor]) -> None:
        """Takes the outer step.

        Args:
            delta: Delta_i(t), not modified; None if it is not finite.
            weight: its weight in the average.
            means: averages that have arrived since the last step, Delta(t-1).
        """
        self._step(delta, means)
        self._state["ahead"].fill_(-1 if delta is None or not weight else weight)

    def finish(self, means: Sequence[torch.Tensor], parameters: torch.Tensor) -> None:
        """Takes the last outer step; sets the outer parameters to `parameters`, the mean of all `last_parameters`."""
        self._step(None, means)
        self.parameters.copy_(parameters)
        self._state["ahead"].zero_()

    def last_parameters(self, means: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a copy of the outer parameters after a last outer step, which anticipates no further round.

        `means` are Delta(t-1) and Delta(t).
        """
        import torch

        last = torch.empty_like(self.own)
        for where in chunks(self.own.numel()):
            part = copy.copy(self)
            state = self.state_dict()
            part.load_state_dict({name: state[name][where].clone() for name in ("anchor", *self.vectors)})
            part._step(None, [mean[where] for mean in means])
            last[where] = part.parameters
        return last

    def _step(self, delta: torch.Tensor | None, means: Sequence[torch.Tensor]) -> None:
        for where in chunks(self.own.numel()):
            own = self.own[where]
            update = own.neg()
            for mean in means:
                update.add_(mean[where])
            own.zero_()
            if delta is not None:
                own.add_(delta[where]).mul_(self._share)
                update.add_(own)
            self.step_chunk(where, update)
