"""Fast-forwards the learning-rate schedule of an island or node that joins late."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def steps_taken(scheduler: Any) -> int:
    """Returns the steps that a schedule has taken or was moved by; 0 for one that `move_schedule` cannot move."""
    inner = getattr(scheduler, "scheduler", scheduler)
    return inner.last_epoch if isinstance(inner, LambdaLR) else 0


def move_schedule(scheduler: Any, step: int) -> bool:
    """Sets the learning rate of `step`, from which the schedule continues; returns whether it could.

    Only a `LambdaLR`, as nearly all of the Trainer's are, knows the rate at a step without the steps before.

    Args:
        scheduler: what the Trainer steps: a scheduler of torch, or accelerate's wrapper of one.
        step: optimizer steps taken so far, counted as the schedule does.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(inner, LambdaLR):
        return False
    inner.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(inner.base_lrs, inner.lr_lambdas, strict=True)]
    for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    inner._last_lr = rates  # what the Trainer logs
    return True
