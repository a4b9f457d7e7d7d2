"""Checks for settings of the outer loop that cannot be combined; every function raises ValueError with the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_diloco.methods.outer import find_method
from hf_diloco.methods.outer.base import is_auto
from hf_diloco.utils.settings import compile_pattern

if TYPE_CHECKING:
    from hf_diloco.config.diloco import DiLoCoConfig


def check_method(config: DiLoCoConfig) -> None:
    """Raises ValueError if a setting asks for something that the method does not support."""
    method = find_method(config.method)
    streamed = {"num_fragments": 1, "fragment_sync_delay": 0}
    for name, without in streamed.items():
        if not method.streams and (value := getattr(config, name)) != without:
            raise ValueError(
                f"{name}={value}: method={config.method} averages the whole model, when it sees fit; remove {name}, "
                "or choose method=diloco"
            )
    for name in ("outer_lr", "outer_momentum"):
        if is_auto(getattr(config, name)) and name not in method.chooses:
            raise ValueError(
                f"{name}=auto: nobody has published what is best with method={config.method} by number of islands; "
                "give a number, or leave it out for the method's default"
            )
    if not method.feeds_back and config.feedback_decay:
        raise ValueError(
            f"payload={config.payload} with error_feedback={config.feedback_decay:g}: method={config.method} cannot "
            "add to a round what the payload has left out of an earlier one; choose a payload of 4 bits or more "
            "without error_feedback, or method=diloco"
        )
    method.check(config)


def check_feedback(config: DiLoCoConfig) -> None:
    """Raises ValueError if the payload and its error feedback contradict each other."""
    if config.payload == "fp32" and config.error_feedback:
        raise ValueError(
            f"error_feedback={config.error_feedback:g} has no use with payload=fp32, which leaves nothing out: "
            "remove it, or choose another payload"
        )
    if config.error_feedback == 0 and config.default_feedback:
        raise ValueError(
            f"payload={config.payload} leaves out most of a pseudo-gradient and does not learn without "
            f"error_feedback: remove error_feedback=0 (default {config.default_feedback:g})"
        )


def check_islands(config: DiLoCoConfig) -> None:
    """Raises ValueError if the numbers of islands contradict each other."""
    num_islands, most, least = config.num_islands, config.max_islands, config.min_islands
    if most is not None and most < num_islands:
        raise ValueError(f"max_islands={most} is less than num_islands={num_islands}: raise it or leave it out")
    if config.island >= config.num_shares:
        raise ValueError(
            f"island {config.island} does not exist in a run of {config.num_shares}: islands are numbered from 0 to "
            f"{config.num_shares - 1}; correct island or num_islands (for an island that joins later: max_islands)"
        )
    if least is not None and least > num_islands:
        raise ValueError(f"min_islands={least} is more than num_islands={num_islands}: no round would take place")


def check_fragments(config: DiLoCoConfig) -> None:
    """Raises ValueError if settings of Streaming DiLoCo contradict each other, or a pattern is invalid."""
    for pattern in config.fragment_patterns:
        compile_pattern("fragment_patterns", pattern)
    if config.fragment_patterns and len(config.fragment_patterns) != config.num_fragments:
        raise ValueError(
            f"fragment_patterns has {len(config.fragment_patterns)} entries, and num_fragments="
            f"{config.num_fragments}: give one pattern a fragment"
        )
    if config.num_fragments > config.sync_every:
        raise ValueError(
            f"num_fragments={config.num_fragments} is more than sync_every={config.sync_every}: at most one fragment "
            "synchronises at a step; lower num_fragments or raise sync_every"
        )
    if config.fragment_sync_delay >= config.sync_every:
        raise ValueError(
            f"fragment_sync_delay={config.fragment_sync_delay} must be less than sync_every={config.sync_every}: a "
            "round must end before the next one of its fragment begins"
        )
    if config.fragment_update_alpha and not config.fragment_sync_delay:
        raise ValueError(
            f"fragment_update_alpha={config.fragment_update_alpha:g} needs fragment_sync_delay: without it nothing "
            "was trained since the round began; set fragment_sync_delay, or remove fragment_update_alpha"
        )


def check_meeting(config: DiLoCoConfig) -> None:
    """Raises ValueError if the method does not work at this rendezvous."""
    if config.rendezvous is not None and config.meets_in_store and config.anticipates:
        wanted = wants_store(config) if config.meets_at_island_0 else ""
        raise ValueError(
            f"method={config.method} needs a rendezvous at tcp://HOST:PORT, and islands that stay"
            f"{f', unlike with {wanted}' if wanted else ''}: every island anticipates what it brings to the next "
            "round; choose method=diloco with fragment_sync_delay instead"
        )


def wants_store(config: DiLoCoConfig) -> str:
    """Returns a setting that only a store can satisfy, because islands come and go or payloads lie there; "" if
    none."""
    if config.exchange == "bucket":
        return "exchange=bucket"
    if config.max_islands is not None and config.max_islands > config.num_islands:
        return f"max_islands={config.max_islands}"
    if config.min_islands is not None and config.min_islands < config.num_islands:
        return f"min_islands={config.min_islands}"
    return ""
