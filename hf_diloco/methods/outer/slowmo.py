"""SlowMo (Wang et al., arXiv 1910.00643, algorithm 1): momentum on the progress of tau steps of a base optimizer.

    every island i:  x_0 on all; tau base steps, the last with learning rate gamma_t, lead to x_i
    Delta = x_0 - mean_i x_i
    u     = beta u + Delta / gamma_t
    x_0   = x_0 - alpha gamma_t u

alpha is `outer_lr`, beta `outer_momentum`, tau `sync_every`. gamma_t may be 0, at the start of a warm-up or the end of
a schedule. Therefore the state is v = gamma u instead of u, which is equivalent if gamma > 0:

    v   = beta (gamma_t / gamma_{t-1}) v + Delta         the ratio is 0 where either rate is
    x_0 = x_0 - alpha v

gamma_t is the learning rate of the round's last base step, for each parameter group of the base optimizer. The plan of
the round records it, so islands that apply the round later use the same value.

    alpha 1, beta 0              Local SGD (FedAvg): method "local-sgd"
    alpha 1, beta > 0, SGD       BMUF: method "bmuf"
    one island, alpha < 1, beta 0    Lookahead: method "lookahead"
    gamma constant               DiLoCo's outer SGD with heavy-ball momentum, to the last bit
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hf_diloco.errors import DivergedError
from hf_diloco.methods.outer.base import Buffers, Groups, MethodOptions, OuterMethod, chunks, sgd_

if TYPE_CHECKING:
    import torch

    from hf_diloco.config.diloco import DiLoCoConfig

_RATES = "rates"


class SlowMoOptions(MethodOptions):
    """Settings that only SlowMo has."""

    inner_buffers: Buffers | None = Field(
        default=None,
        description="what becomes of the inner optimizer's momentum and moments after a round: zero, keep, or average "
        "over the islands; default, the paper's: zero for SGD, keep for Adam",
    )


class SlowMo(OuterMethod):
    """Slow momentum in units of the parameters: 8 bytes of state per parameter, one learning rate per parameter group.

    Args:
        lr: the slow learning rate, alpha.
        momentum: the slow momentum, beta, from 0 up to 1.
        groups: the inner optimizer's; default: one.
        inner_buffers: see `SlowMoOptions`.

    Attributes:
        fixed: the settings that define a special case, with their only allowed values.
    """

    name = "slowmo"
    summary = "momentum of the steps between averages, scaled with the inner learning rate"
    paper = "1910.00643"
    defaults: ClassVar[Mapping[str, Any]] = {
        "sync_every": 12,
        "outer_lr": 1.0,
        "outer_momentum": 0.6,
        "nesterov": False,
    }
    Options = SlowMoOptions
    wants_rates = True
    fixed: ClassVar[Mapping[str, float]] = {}

    def __init__(
        self,
        lr: float = 1.0,
        momentum: float = 0.6,
        groups: Groups | None = None,
        inner_buffers: Buffers | None = None,
    ) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        self.vectors = ("slow-momentum",) if momentum else ()
        self._groups = groups or Groups()
        self._inner_buffers = inner_buffers

    @classmethod
    def check(cls, config: DiLoCoConfig) -> None:
        if config.nesterov:
            raise ValueError(f"nesterov=True: the momentum of method={cls.name} is a heavy ball; remove it, or method")
        for name, value in cls.fixed.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"{name}={getattr(config, name):g}: method={cls.name} is method=slowmo with {name}={value:g}; "
                    f"remove {name}, or choose method=slowmo"
                )
        options = SlowMoOptions.model_validate(config.options)
        if options.inner_buffers == "average" and config.meets_in_store:
            raise ValueError(
                "options.inner_buffers=average needs a rendezvous at tcp://HOST:PORT, and islands that stay: where "
                "they come late and leave, an average of moments would miss theirs; set it to keep or zero"
            )

    @classmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> SlowMo:
        options = SlowMoOptions.model_validate(config.options)
        return cls(config.outer_lr, config.outer_momentum, groups, options.inner_buffers)

    @property
    def numbers(self) -> Mapping[str, int]:
        return {_RATES: self._groups.count}

    def buffers(self, optimizer: str) -> Buffers:
        return self._inner_buffers or ("zero" if optimizer == "SGD" else "keep")

    def step(self, mean: torch.Tensor, rates: Sequence[float] = ()) -> torch.Tensor:
        import torch

        last = self._state[_RATES]
        if len(rates) != last.numel():
            raise DivergedError(
                f"a round was agreed on with the learning rates of {len(rates)} parameter groups, and the inner "
                f"optimizer here has {last.numel()}: give all islands the same parameter groups"
            )
        carried = [self.momentum * _ratio(now, before) for now, before in zip(rates, last.tolist(), strict=True)]
        for start, stop, group in self._groups.runs if len(set(carried)) > 1 else [(0, mean.numel(), 0)]:
            for part in chunks(stop - start):
                where = slice(start + part.start, start + part.stop)
                slow = self._state["slow-momentum"][where] if self.momentum else None
                sgd_(self.parameters[where], mean[where], self.lr, slow, carried[group])
        last.copy_(torch.tensor(rates, dtype=torch.float64))
        return self.parameters


class LocalSGD(SlowMo):
    """Local SGD, or federated averaging: islands continue from the mean of their parameters."""

    name = "local-sgd"
    summary = "islands go on from their mean: SlowMo without momentum, FedAvg"
    paper = "1805.09767"
    defaults: ClassVar[Mapping[str, Any]] = {**SlowMo.defaults, "outer_momentum": 0.0}
    fixed: ClassVar[Mapping[str, float]] = {"outer_lr": 1.0, "outer_momentum": 0.0}


class BMUF(SlowMo):
    """Blockwise model-update filtering (Chen and Huo, ICASSP 2016), with momentum scaled by the learning rate."""

    name = "bmuf"
    summary = "blockwise model-update filtering: SlowMo with slow learning rate 1"
    paper = ""
    fixed: ClassVar[Mapping[str, float]] = {"outer_lr": 1.0}


class Lookahead(SlowMo):
    """Lookahead (Zhang et al., arXiv 1907.08610): one island goes back part of the way every few steps."""

    name = "lookahead"
    summary = "one island goes back part of its way every few steps: SlowMo without momentum"
    paper = "1907.08610"
    defaults: ClassVar[Mapping[str, Any]] = {
        **SlowMo.defaults,
        "sync_every": 5,
        "outer_lr": 0.5,
        "outer_momentum": 0.0,
    }
    fixed: ClassVar[Mapping[str, float]] = {"outer_momentum": 0.0}

    @classmethod
    def check(cls, config: DiLoCoConfig) -> None:
        super().check(config)
        if max(config.num_islands, config.max_islands or 1) > 1:
            raise ValueError(
                f"num_islands={max(config.num_islands, config.max_islands or 1)}: method={cls.name} is of one island; "
                "set num_islands to 1, or choose method=slowmo with outer_momentum=0"
            )


def _ratio(now: float, before: float) -> float:
    """gamma_t / gamma_{t-1}; 0 if it is not defined or not finite."""
    ratio = now / before if before else 0.0
    return ratio if math.isfinite(ratio) else 0.0
