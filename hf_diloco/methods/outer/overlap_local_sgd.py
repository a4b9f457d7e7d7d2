"""Overlap-Local-SGD (Wang, Liang and Joshi, arXiv 2002.09539): an anchor pulls the islands; the exchange is hidden.

    every tau inner steps, on every island i, with an anchor z that is the same on all:
        wait for the average of one period ago    z   = z + v
        pull back                                 x_i = (1 - alpha) x_i + alpha z
        begin to exchange x_i, go on              v   = beta v + mean_i x_i - z

tau is `sync_every`, alpha `options.pull`, beta `outer_momentum`. Training does not wait for an exchange that takes
less than a period. The inner optimizer's buffers are kept.

This equals Streaming DiLoCo with one fragment, a delay of a whole period, outer learning rate 1 and heavy-ball
momentum, where an island keeps a share 1 - alpha of its own weights. In addition, the first pull, towards the common
initial weights, is at the first boundary, before any average has arrived. The authors' program keeps the momentum in
units of the learning rate. With a constant learning rate both forms are the same; with any schedule, the momentum here
is equal on all islands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hf_diloco.methods.outer.base import Groups, MethodOptions
from hf_diloco.methods.outer.diloco import DiLoCo

if TYPE_CHECKING:
    from hf_diloco.config.diloco import DiLoCoConfig


class OverlapOptions(MethodOptions):
    """Settings that only Overlap-Local-SGD has."""

    pull: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="how far an island goes to the anchor where a round begins, the paper's alpha",
    )


class OverlapLocalSGD(DiLoCo):
    """DiLoCo's outer SGD with learning rate 1 and heavy-ball momentum: 8 bytes of state per parameter."""

    name = "overlap-local-sgd"
    summary = "an anchor that pulls the islands; the exchange passes behind the inner steps of a whole period"
    paper = "2002.09539"
    defaults: ClassVar[Mapping[str, Any]] = {
        "sync_every": 24,
        "outer_lr": 1.0,
        "outer_momentum": 0.7,
        "nesterov": False,
    }
    Options = OverlapOptions
    streams = False
    pulls = True
    chooses = ()

    def __init__(self, momentum: float = 0.7) -> None:
        super().__init__(1.0, momentum, nesterov=False)

    @classmethod
    def check(cls, config: DiLoCoConfig) -> None:
        if config.outer_lr != 1:
            raise ValueError(
                f"outer_lr={config.outer_lr:g}: method={cls.name} moves its anchor by the whole step; remove outer_lr "
                "and see options.pull"
            )
        if config.nesterov:
            raise ValueError(f"nesterov=True: the momentum of method={cls.name} is a heavy ball; remove it, or method")
        if config.fragment_update_alpha:
            raise ValueError(
                f"fragment_update_alpha={config.fragment_update_alpha:g}: method={cls.name} has options.pull for it; "
                f"set that to {1 - config.fragment_update_alpha:g}"
            )

    @classmethod
    def make(cls, config: DiLoCoConfig, groups: Groups) -> OverlapLocalSGD:
        return cls(config.outer_momentum)

    @classmethod
    def delay(cls, config: DiLoCoConfig) -> int:
        return config.sync_every

    @classmethod
    def kept_share(cls, config: DiLoCoConfig) -> float:
        return 1 - OverlapOptions.model_validate(config.options).pull
