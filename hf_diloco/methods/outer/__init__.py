"""The outer methods: one file each, and this registry. `base` says what a method must define."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.methods.outer.base import Groups, MethodOptions, OuterMethod
from hf_diloco.methods.outer.diloco import DiLoCo
from hf_diloco.methods.outer.eager import Eager
from hf_diloco.methods.outer.overlap_local_sgd import OverlapLocalSGD
from hf_diloco.methods.outer.slowmo import BMUF, LocalSGD, Lookahead, SlowMo
from hf_diloco.methods.outer.sparseloco import SparseLoCo
from hf_diloco.utils.own_files import FORM, check_names, is_own, load_own
from hf_diloco.utils.text import nearest

if TYPE_CHECKING:
    from hf_diloco.config.diloco import DiLoCoConfig

_ALL: list[type[OuterMethod]] = [DiLoCo, SparseLoCo, Eager, SlowMo, LocalSGD, BMUF, Lookahead, OverlapLocalSGD]

METHODS: dict[str, type[OuterMethod]] = {method.name: method for method in _ALL}


def find_method(name: str) -> type[OuterMethod]:
    """The method that `name` stands for: one of `METHODS`, or a user's own, as FILE.py:CLASS.

    Raises:
        ValueError: there is none, or it cannot be loaded; with the remedy.
    """
    if name in METHODS:
        return METHODS[name]
    if not is_own(name):
        raise ValueError(
            f"{name!r}: no such method{nearest(name, METHODS)}; there are {', '.join(METHODS)}, or {FORM} of your own"
        )
    found = load_own(name, OuterMethod)  # type: ignore[type-abstract]
    check_names(name, found, ("name", "summary"), METHODS)
    return found


def make_method(config: DiLoCoConfig, groups: Groups | None = None) -> OuterMethod:
    """The method that the settings name; see `OuterMethod.make`."""
    return find_method(config.method).make(config, groups or Groups())


__all__ = [
    "METHODS",
    "DiLoCo",
    "Eager",
    "Groups",
    "MethodOptions",
    "OuterMethod",
    "OverlapLocalSGD",
    "SlowMo",
    "SparseLoCo",
    "find_method",
    "make_method",
]
