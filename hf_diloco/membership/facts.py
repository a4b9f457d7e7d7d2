"""What must be equal on all islands, or on all nodes of a graph, before they train together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_diloco.errors import ConfigError, FingerprintError

Facts = Mapping[str, str | int | float | bool | None]

PROTOCOL = 16
"""Raised when what islands, or nodes, tell each other changes its form or meaning."""

MAX_STEPS = "max_steps"
"""The fact that says how many inner steps an island is to take; a loop of one's own may not know it."""

_PROTOCOL = "protocol"
_FROZEN = "frozen weights"


def facts_given(given: object) -> dict[str, str | int | float | bool | None]:
    """What a caller wants to be equal on all islands, as it was given.

    Raises:
        TypeError: it is no mapping of names to plain values, which alone can be compared between islands.
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
    return dict(given)


def frozen_facts(frozen: Mapping[str, str]) -> Facts:
    """What `inner.frozen` has found, as facts: islands that hold frozen weights in other dtypes have others."""
    return {f"{_FROZEN} ({dtypes})": digest for dtypes, digest in frozen.items()}


def join_facts(own: Facts, given: Facts) -> dict[str, str | int | float | bool | None]:
    """What this package compares, the protocol first, and what a caller adds.

    Raises:
        ConfigError: the caller gives another value to what this package finds out by itself.
    """
    own = {_PROTOCOL: PROTOCOL, **own}
    for name in own.keys() & given.keys():
        if own[name] != given[name]:
            raise ConfigError(
                f"fingerprint[{name!r}] is {given[name]!r}, and here it is {own[name]!r}: that is compared anyway; "
                "leave it out, or give your fact another name"
            )
    return {**own, **given}


def compare_facts(fingerprints: Sequence[Facts], who: str = "island") -> None:
    """Raises `FingerprintError`, with everybody's values, for the first fact that differs."""
    for name in dict.fromkeys(name for facts in fingerprints for name in facts):
        values = [facts.get(name) for facts in fingerprints]
        if any(differ(name, value, values[0]) for value in values):
            listing = ", ".join(f"{who} {number}: {value}" for number, value in enumerate(values))
            raise FingerprintError(
                f"the {who}s do not train the same thing: {name} differs ({listing}); {remedy_for(name)}"
            )


def differ(name: str, one: object, other: object) -> bool:
    """Whether two values of a fact keep islands apart; who does not know such as its number of steps fits all."""
    return one != other and not (name.startswith((MAX_STEPS, _FROZEN)) and None in (one, other))


def remedy_for(name: str) -> str:
    """What to do where a fact differs."""
    if name == MAX_STEPS:
        return (
            "set max_steps to one number everywhere (num_train_epochs gives as many steps as there is data, which "
            "differs)"
        )
    if name == _PROTOCOL:
        return "install the same version of hf-diloco everywhere"
    if name.startswith(_FROZEN):
        return (
            "they are never exchanged: load the same base model everywhere, and set the same seed before frozen "
            "parameters are made at random"
        )
    return "make it equal"
