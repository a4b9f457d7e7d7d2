"""Facts: values that must be equal on all islands, or on all nodes of a graph, before they train together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hf_diloco.errors import ConfigError, FingerprintError

Facts = Mapping[str, str | int | float | bool | None]

PROTOCOL = 17
"""Version of the records and messages between islands or nodes; increased when their form or meaning changes."""

MAX_STEPS = "max_steps"
"""Name of the fact with an island's number of inner steps; a user's own loop may not know it."""

SAVES = "when checkpoints are saved"
"""Name of the fact with the steps after which a process saves; only a Trainer knows it."""

TRAINABLE = "trainable parameters"
"""Name of the fact with the number of values that an island trains."""

_PROTOCOL = "protocol"
_FROZEN = "frozen weights"
_MAY_LACK = (MAX_STEPS, SAVES, _FROZEN)
"""Beginnings of the names of facts that one process may have and another not."""


def facts_given(given: object) -> dict[str, str | int | float | bool | None]:
    """Returns the caller's facts, after checking their types.

    Raises:
        TypeError: `given` is not a mapping of names to plain values; others cannot be compared between islands.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"fingerprint is a dict of facts by name, as {{'sequence_length': 1024}}, got {given!r}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise TypeError(
                f"fingerprint[{name!r}] is a {type(value).__name__}: give text, numbers or booleans by name, such as "
                "a hash of what must be equal"
            )
        if isinstance(value, float) and not math.isfinite(value):  # NaN does not equal itself
            raise TypeError(f"fingerprint[{name!r}] is {value}: give a finite number")
    return dict(given)


def frozen_facts(frozen: Mapping[str, str]) -> Facts:
    """Turns the digests of `inner.frozen` into facts, named by dtypes: different dtypes are not compared."""
    return {f"{_FROZEN} ({dtypes})": digest for dtypes, digest in frozen.items()}


def join_facts(own: Facts, given: Facts) -> dict[str, str | int | float | bool | None]:
    """Joins the facts of this package, the protocol first, and those of the caller.

    Raises:
        ConfigError: the caller gives another value for one of this package's facts.
    """
    own = {_PROTOCOL: PROTOCOL, **own}
    for name in own.keys() & given.keys():
        if own[name] != given[name]:
            raise ConfigError(
                f"fingerprint[{name!r}] is {given[name]!r}, but this process has {own[name]!r}: hf_diloco already "
                "compares it; leave it out, or give your fact another name"
            )
    return {**own, **given}


def compare_facts(fingerprints: Sequence[Facts], who: str = "island") -> None:
    """Raises `FingerprintError`, with all values, for the first fact that differs."""
    for name in dict.fromkeys(name for facts in fingerprints for name in facts):
        values = [facts.get(name) for facts in fingerprints]
        known = next((value for value in values if value is not None), None)
        if any(differ(name, value, known) for value in values):
            listing = ", ".join(f"{who} {number}: {value}" for number, value in enumerate(values))
            raise FingerprintError(
                f"the {who}s do not train the same thing: {name} differs ({listing}); {remedy_for(name)}"
            )


def differ(name: str, one: object, other: object) -> bool:
    """Whether two values of a fact conflict; None does not, for those in `_MAY_LACK`."""
    return one != other and not (name.startswith(_MAY_LACK) and None in (one, other))


def remedy_for(name: str) -> str:
    """Returns the remedy for a fact that differs."""
    if name == MAX_STEPS:
        return (
            "set max_steps to one number everywhere (num_train_epochs gives as many steps as there is data, which "
            "differs)"
        )
    if name == TRAINABLE:
        return "make it equal: the same model everywhere, with the same parameters frozen (requires_grad)"
    if name == SAVES:
        return (
            "set save_strategy=steps and the same save_steps everywhere (the length of epochs depends on the data; a "
            "resumed Trainer goes on with its checkpoint's save_steps)"
        )
    if name == _PROTOCOL:
        return "install the same version of hf-diloco everywhere"
    if name.startswith(_FROZEN):
        return (
            "they are never exchanged: load the same base model everywhere, and set the same seed before frozen "
            "parameters are made at random"
        )
    return "make it equal"
