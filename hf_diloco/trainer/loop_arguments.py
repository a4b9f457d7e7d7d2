"""What `OuterLoop` is given: checked before other islands are met."""

from __future__ import annotations

import math
import operator
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_diloco.errors import ConfigError
from hf_diloco.inner import refuse_foreign_optimizer, unwrap_optimizer
from hf_diloco.trainer.ignored_settings import warn_of_ignored


def check_weight(weight: Any) -> float:
    """A step's weight as a number; raises `ConfigError` unless it is one."""
    try:
        number = float(weight or 0.0)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        number = math.nan
    if isinstance(weight, str) or not 0 <= number < math.inf:
        raise ConfigError(f"step(weight={weight!r}): give the number of examples or tokens of the step, 0 or more")
    return number


def check_count(name: str, value: Any, call: str = "OuterLoop") -> int | None:
    """A number of steps, rounds or checkpoints; None if it is not given. Raises `ConfigError` unless it is one."""
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = 0
    if number is not None and (number < 1 or isinstance(value, bool)):
        raise ConfigError(f"{call}(..., {name}={value!r}): give a whole number from 1 on, or leave it out")
    return number


def check_prepared(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raises unless these are what they should be, and belong together; warns of settings that DeepSpeed ignores."""
    call = "call OuterLoop(accelerator, model, optimizer, config)"
    for name, value, kind in (("accelerator", accelerator, Accelerator), ("model", model, nn.Module)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}: {call}")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} that this Accelerator has not prepared: give what "
            "accelerator.prepare(model, optimizer) returned"
        )
    remedy = "give both as one call of accelerator.prepare(model, optimizer) returned them"
    refuse_foreign_optimizer(model, optimizer, remedy)
    warn_of_ignored(accelerator.state.deepspeed_plugin)


def settings_of(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """What `REFUSALS` names of an Accelerator and of what it has prepared."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return {
        "optim": type(unwrap_optimizer(optimizer)).__name__,
        "fsdp_config": {"version": plugin.fsdp_version} if plugin else None,
        "parallelism_config": accelerator.parallelism_config,
        "ProjectConfiguration.total_limit": accelerator.project_configuration.total_limit,
    }
