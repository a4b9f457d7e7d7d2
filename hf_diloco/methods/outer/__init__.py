"""The outer methods, each defined by a single file. `base` says what a method must define."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.methods.outer.base import Groups, MethodOptions, OuterMethod
from hf_diloco.utils.own_files import classes_in, find_class

if TYPE_CHECKING:
    from hf_diloco.config.diloco import DiLoCoConfig

METHODS: dict[str, type[OuterMethod]] = {
    method.name: method
    for method in classes_in(__name__, OuterMethod)  # type: ignore[type-abstract]
}


def find_method(name: str) -> type[OuterMethod]:
    """Returns the method of that name: one of `METHODS`, or a user's own, as FILE.py:CLASS.

    Raises:
        ValueError: there is no such method, or it cannot be loaded; the message has the remedy.
    """
    return find_class("method", name, OuterMethod, METHODS, ("name", "summary"))  # type: ignore[type-abstract]


def make_method(config: DiLoCoConfig, groups: Groups | None = None) -> OuterMethod:
    """Makes the method named in the settings; see `OuterMethod.make`."""
    return find_method(config.method).make(config, groups or Groups())


__all__ = ["METHODS", "Groups", "MethodOptions", "OuterMethod", "find_method", "make_method"]
