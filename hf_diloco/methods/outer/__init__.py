"""The outer methods: one file each, and this registry. See `base` for what a method says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.methods.outer.base import Groups, MethodOptions, OuterMethod
from hf_diloco.methods.outer.diloco import DiLoCo
from hf_diloco.methods.outer.overlap_local_sgd import OverlapLocalSGD
from hf_diloco.methods.outer.slowmo import BMUF, LocalSGD, Lookahead, SlowMo

if TYPE_CHECKING:
    from hf_diloco.config import DiLoCoConfig

_ALL: list[type[OuterMethod]] = [DiLoCo, SlowMo, LocalSGD, BMUF, Lookahead, OverlapLocalSGD]

METHODS: dict[str, type[OuterMethod]] = {method.name: method for method in _ALL}


def make_method(config: DiLoCoConfig, groups: Groups | None = None) -> OuterMethod:
    """The method that the settings name; see `OuterMethod.make`."""
    return METHODS[config.method].make(config, groups or Groups())


__all__ = ["METHODS", "DiLoCo", "Groups", "MethodOptions", "OuterMethod", "OverlapLocalSGD", "SlowMo", "make_method"]
