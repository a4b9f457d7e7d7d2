"""What parameters and their groups must be in all decentralised methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_diloco.errors import ConfigError, UnsupportedError


def check_group(group: dict[str, Any]) -> None:
    """Raises `ConfigError` for a setting out of its range."""
    for setting in ("lr", "weight_decay", "lars"):
        value = float(group[setting])
        if not 0 <= value < math.inf:
            raise ConfigError(f"{setting}={value}: give a finite number from 0 on")
    check_below_1("momentum", float(group.get("momentum", 0.0)))


def check_below_1(setting: str, value: float) -> None:
    """Raises `ConfigError` unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"{setting}={value}: give a number from 0 to below 1")


def common_kind(parameters: Sequence[torch.nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """The type and device of all parameters."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    names = ", ".join(sorted(f"{dtype} on {device}".removeprefix("torch.") for dtype, device in kinds))
    if len(kinds) > 1:
        raise UnsupportedError(f"parameters of several kinds ({names}); all must be of one type, on one device")
    dtype, device = next(iter(kinds))
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"parameters are {names}; keep them in float32 and compute in bf16 with autocast")
    return dtype, device
