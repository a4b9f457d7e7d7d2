"""Methods of decentralised training as torch optimizers, each defined by a single file."""

from __future__ import annotations

import inspect
from numbers import Integral, Real
from typing import Any

from torch.optim.optimizer import ParamsT

from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.methods.gossip.base import GossipOptimizer
from hf_diloco.utils.own_files import classes_in, find_class
from hf_diloco.utils.text import nearest

METHODS: dict[str, type[GossipOptimizer]] = {
    method.name: method
    for method in classes_in(__name__, GossipOptimizer)  # type: ignore[type-abstract]
}


def find_method(name: str) -> type[GossipOptimizer]:
    """Returns the method of that name: one of `METHODS` (with - or _), or a user's own, as FILE.py:CLASS.

    Raises:
        ConfigError: there is no such method, or it cannot be loaded; the message has the remedy.
    """
    if (known := name.lower().replace("_", "-")) in METHODS:
        return METHODS[known]
    try:
        return find_class("method", name, GossipOptimizer, METHODS, ("name",))  # type: ignore[type-abstract]
    except ValueError as error:
        raise ConfigError(f"method {error}") from None


def make_optimizer(
    name: str,
    params: ParamsT,
    neighbours: Neighbours,
    /,
    lr: float,
    *,
    slowmo: SlowMoSettings | None = None,
    **settings: Any,
) -> GossipOptimizer:
    """Makes the optimizer of that name (see `find_method`) for one node.

    Args:
        params, neighbours, lr: see `GossipOptimizer`.
        slowmo: settings of a slow momentum over the method; None: no slow momentum.
        settings: the method's own.

    Raises:
        ConfigError: no such method; a setting is unknown, of the wrong type or out of its range; the method diverges
            on the graph, or cannot be combined with SlowMo.
        UnsupportedError: parameters of other or several dtypes or devices.
    """
    method = find_method(name)
    accepted = _parameters(method)
    for setting, value in settings.items():
        if setting not in accepted:
            raise ConfigError(
                f"{setting}: method {method.name} has no such setting{nearest(setting, accepted)}; it has "
                f"{', '.join(accepted) or 'none'} (null leaves out what a run file sets)"
            )
        _check_kind(setting, value, accepted[setting].annotation)
    optimizer = method(params, neighbours, lr, **settings)
    if slowmo is not None:
        optimizer.add_slow_momentum(slowmo)
    return optimizer


def settings_of(method: type[GossipOptimizer]) -> dict[str, object]:
    """The method's own settings and their defaults."""
    return {name: parameter.default for name, parameter in _parameters(method).items()}


def _parameters(method: type[GossipOptimizer]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(method.__init__).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "text"),
}
"""By annotation: the type that a value must have, and its name in messages."""


def _check_kind(setting: str, value: object, annotation: object) -> None:
    """Raises `ConfigError` if a value is not of the annotated type; checks plain annotations only."""
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    kind, words = _KINDS.get(written.removesuffix(" | None"), (object, ""))
    is_no_number = isinstance(value, bool) and kind in (Integral, Real)
    if value is not None and (not isinstance(value, kind) or is_no_number):
        raise ConfigError(f"{setting}={value!r}: give {words}")


__all__ = ["METHODS", "GossipOptimizer", "find_method", "make_optimizer", "settings_of"]
