"""SparseLoCo (Sarfi et al., arXiv 2508.15706): top-k pseudo-gradients, and error feedback instead of momentum.

    a_i   = 0.95 e_i + Delta_i
    sent  = Q(top-k(a_i)),  e_i = a_i - sent             the payload, and its error feedback: `hf_diloco.codecs`
    theta = theta - lr mean_i sent                       lr 1, no momentum

The residual that error feedback carries into later rounds acts as a momentum, separately on each island.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hf_diloco.methods.outer.base import Groups
from hf_diloco.methods.outer.diloco import DiLoCo

if TYPE_CHECKING:
    from hf_diloco.config.diloco import DiLoCoConfig


class SparseLoCo(DiLoCo):
    """DiLoCo's outer SGD without momentum: 4 bytes of state per parameter, and 8 for error feedback."""

    name = "sparseloco"
    summary = "DiLoCo with top-k pseudo-gradients in 2 bits, and error feedback instead of momentum"
    paper = "2508.15706"
    defaults: ClassVar[Mapping[str, Any]] = {
        "sync_every": 30,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nesterov": False,
        "payload": "topk",
    }
    chooses = ()

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr, 0.0, nesterov=False)

    @classmethod
    def check(cls, config: DiLoCoConfig) -> None:
        for name in ("outer_momentum", "nesterov"):
            if value := getattr(config, name):
                raise ValueError(
                    f"{name}={value}: error feedback stands for the momentum in method={cls.name}; remove {name}, or "
                    "choose method=diloco with payload=topk"
                )
        if not config.feedback_decay:
            raise ValueError(
                f"payload={config.payload} without error_feedback: method={cls.name} is about what a payload leaves "
                "out; set payload to topk or sign, or error_feedback, or choose method=diloco"
            )

    @classmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> SparseLoCo:
        return cls(config.outer_lr)
