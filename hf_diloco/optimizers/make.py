"""The registry of inner optimizers: from the block `optimizer` of a run file to the Trainer's optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback, TrainingArguments

from hf_diloco.optimizers.muon import MuonAdamW
from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer
from hf_diloco.optimizers.onebit.trainer import METHODS, OneBitCallback, make_onebit
from hf_diloco.optimizers.settings import OptimizerBlock

if TYPE_CHECKING:
    from pathlib import Path


def make_optimizer(
    block: OptimizerBlock | None, model: torch.nn.Module, args: TrainingArguments
) -> torch.optim.Optimizer | None:
    """The optimizer that `block` names, with rates, betas and decay of `args`; moves the model to its device.

    Returns:
        None where the Trainer makes its own.

    Raises:
        ConfigError: a setting is out of its range.
        UnsupportedError: the model is nothing for it.
    """
    if block is None:
        return None
    if block.name in METHODS:
        return make_onebit(block.name, model, args, **block.of_method())
    model.to(args.device)
    return MuonAdamW(
        model,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **block.of_method(),
    )


def callbacks_of(
    block: OptimizerBlock | None, optimizer: torch.optim.Optimizer | None, checkpoint: Path | None
) -> list[TrainerCallback]:
    """What it needs of the Trainer; training goes on from `checkpoint`."""
    if block is None or not isinstance(optimizer, OneBitOptimizer):
        return []
    return [OneBitCallback(optimizer, checkpoint, block.warmup_payload)]
