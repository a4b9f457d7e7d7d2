"""The learning rate: scaled with the batch, and dropped at given steps."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import torch

from hf_diloco.trainer.arguments import examples_per_step

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_diloco.apps.vision.settings import ScheduleBlock


def scaled_learning_rate(block: ScheduleBlock, args: TrainingArguments, num_nodes: int) -> float:
    """`learning_rate` for the images that all nodes see in a step, in proportion (arXiv 1706.02677).

    Args:
        block: says for how many images the given rate is; None leaves it as it is.
        args: the given rate, and one node's batch.
        num_nodes: of such nodes.
    """
    if block.lr_for_batch is None:
        return args.learning_rate
    return args.learning_rate * examples_per_step(args) * num_nodes / block.lr_for_batch


def drops(
    block: ScheduleBlock, optimizer: torch.optim.Optimizer, warmup_steps: int
) -> torch.optim.lr_scheduler.LambdaLR | None:
    """Linear warm-up, then a constant rate that drops by a factor at each given step; None without such steps."""
    if not block.drop_at:
        return None

    def factor(step: int) -> float:
        warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        return warm * block.drop_by ** bisect.bisect_right(block.drop_at, step)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
