"""Outer state of a few parameters, as checkpoints hold it."""

from __future__ import annotations

from typing import Any

from hf_diloco.outer.checkpoint import OuterIndex


def make_index(num_parameters: int, **changes: Any) -> OuterIndex:
    facts: dict[str, Any] = {
        "round": 2,
        "steps_since_sync": 0,
        "weight_since_sync": 0.0,
        "global_step": 20,
        "num_parameters": num_parameters,
        "model": "ab",
        "parameters": {},
        "outer_digest": "cd",
        "settings": {},
        "data": {},
        "fragments": [],
    }
    return OuterIndex(**{**facts, **changes})
