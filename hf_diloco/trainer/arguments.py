"""Checks of the arguments of the Trainer and `OuterLoop`, and what follows from them."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, has_length

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from hf_diloco.inner import refuse_foreign_optimizer, unwrap_optimizer
from hf_diloco.membership.facts import SAVES, Facts
from hf_diloco.trainer.ignored_settings import warn_of_ignored
from hf_diloco.trainer.refusals import follows_evaluations, is_schedule_free, refuse, refuse_uncounted

_RUNTIME = re.compile(r"eval_(?:.*_)?runtime")


def check_arguments(
    config: DiLoCoConfig,
    args: TrainingArguments,
    callbacks: Collection[TrainerCallback] = (),
    optimizer: Any = None,
    scheduler: Any = None,
    is_search: bool = False,
) -> None:
    """Refuses settings that the outer loop does not support; warns about settings that DeepSpeed ignores.

    Args:
        optimizer, scheduler: the Trainer's, unwrapped; may differ from those that `args` name.
        is_search: whether this is a trial of `trainer.hyperparameter_search`.

    Raises:
        ConfigError: a setting of `REFUSALS` is used (the message names all); or `weight_by` is "tokens", but the
            Trainer does not count tokens; or ranks would train apart.
    """
    given: dict[str, object] = {"hyperparameter_search": is_search}
    for setting, made, is_refused in (
        ("optim", optimizer, is_schedule_free),
        ("lr_scheduler_type", getattr(scheduler, "scheduler", scheduler), follows_evaluations),
    ):
        if is_refused(type(made).__name__):
            given[setting] = type(made).__name__
    refuse({**vars(args), **callback_settings(callbacks), **given}, "islands")
    if config.num_shares > 1 and "OneBitCallback" in _class_names(callbacks):
        refuse({"sync_every": config.sync_every}, "onebit")
    refuse_uncounted(config.weight_by, args.include_num_input_tokens_seen)
    check_ranks(args.world_size)
    warn_of_ignored(args.deepspeed_plugin)


def check_launched() -> None:
    """Raises `ConfigError` if neither a launcher nor MPI tells DeepSpeed the rank, which it asks for even with one."""
    has_rank = any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SM_TRAINING_ENV"))
    if not (has_rank or dist.is_initialized() or find_spec("mpi4py")):
        raise ConfigError(
            "deepspeed needs a launcher, also for a single rank: start the script by `torchrun --nproc_per_node 1`, "
            "`deepspeed --num_gpus 1` or `accelerate launch` in the place of `python`"
        )


def check_ranks(num_ranks: int) -> None:
    """Raises `ConfigError` unless the `num_ranks` that Accelerate counts are all ranks of `torch.distributed`."""
    started = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks != started:
        raise ConfigError(
            f"torch.distributed has {started} ranks, and Accelerate counts {num_ranks}: each rank would read the same "
            "data, and without DeepSpeed train by itself. On a machine without accelerators set use_cpu=True in "
            "TrainingArguments; in a loop of your own Accelerator(cpu=True), or with DeepSpeed call "
            "accelerate.PartialState(cpu=True) before making the Accelerator"
        )


def callback_settings(callbacks: Iterable[TrainerCallback]) -> dict[str, object]:
    """Returns the values of the callback settings in `REFUSALS`."""
    names = _class_names(callbacks)
    ours = [name for name in names if name in ("DiLoCoCallback", "GossipCallback")]
    return {"EarlyStoppingCallback": "EarlyStoppingCallback" in names, "callbacks": ours}


def _class_names(callbacks: Iterable[TrainerCallback]) -> list[str]:
    """Returns the names of the callbacks' classes and of the classes that these inherit from."""
    return [kind.__name__ for callback in callbacks for kind in type(callback).__mro__]


def folder_of(args: TrainingArguments) -> Path:
    """Returns the folder this island writes to, with the Trainer's default if `output_dir` is None."""
    return Path(args.output_dir or "trainer_output")


def path_given(call: str, name: str, value: Any, remedy: str = "give a path, or leave it out") -> Path | None:
    """Returns an argument as a path; None if it is empty. Raises `ConfigError` if it is neither text nor a path."""
    if isinstance(value, str | os.PathLike | None):
        return Path(value) if value else None
    raise ConfigError(f"{call}({name}={value!r}): {remedy}")


def examples_per_batch(args: TrainingArguments) -> int:
    """Returns the examples of one batch on all ranks of this island."""
    splits = getattr(args.accelerator_config, "split_batches", False)  # ranks share a batch
    return int(args.train_batch_size * (1 if splits else args.world_size))


def examples_per_step(args: TrainingArguments) -> int:
    """Returns the examples per optimizer step of this island."""
    return examples_per_batch(args) * args.gradient_accumulation_steps


def check_tokens(num_tokens: int, model: Any) -> float:
    """Returns the tokens of a step as its weight; raises `ConfigError` if the Trainer has counted none."""
    if not num_tokens:
        name = getattr(model, "main_input_name", "input_ids")
        raise ConfigError(
            f"weight_by='tokens': the Trainer counted no tokens in this step: it counts those of the model's input "
            f"{name!r}, which the batch lacks. Set the model's main_input_name to the input that holds its tokens, or "
            "use weight_by='examples'"
        )
    return float(num_tokens)


def steps_per_epoch(args: TrainingArguments, loader: Any) -> int | None:
    """Returns the optimizer steps in an epoch of the training data; None if their number is not known in advance."""
    return max(1, -(-len(loader) // args.gradient_accumulation_steps)) if has_length(loader) else None


def saving_facts(args: TrainingArguments, state: TrainerState, loader: Any) -> Facts:
    """Returns when the Trainer saves checkpoints, as a fact to compare. `loader` is of the training data."""
    when = SaveStrategy(args.save_strategy).value
    if when == SaveStrategy.STEPS:
        when = f"every {min(state.save_steps, state.max_steps)} steps"
    elif when == SaveStrategy.EPOCH:
        steps = steps_per_epoch(args, loader)
        when = f"after epochs of {min(steps, state.max_steps) if steps else 'some'} steps"
    return {SAVES: when}


def tokens_per_step(facts: Mapping[str, Any], examples: int) -> int | None:
    """Returns the tokens in `examples` examples, if the run's facts have a `sequence_length`; else None."""
    length = facts.get("sequence_length")
    return examples * int(length) if isinstance(length, int | float) and length else None


def is_of_training(logs: Mapping[str, Any]) -> bool:
    """Whether the logs are about training; at the end of training they may have bytes sent but no loss."""
    return "loss" in logs or "onebit/bytes_sent" in logs


def name_evaluated(logs: Mapping[str, Any]) -> str | None:
    """Returns which of several data sets was evaluated, as "NAME_"; "" for a single data set, None if not evaluated.

    With several data sets, the Trainer logs eval_NAME_loss and eval_NAME_runtime. The latter distinguishes NAME from a
    metric's name.
    """
    if "eval_loss" in logs:
        return ""
    names = [key.removeprefix("eval_").removesuffix("runtime") for key in logs if _RUNTIME.fullmatch(key)]
    return next((name for name in names if f"eval_{name}loss" in logs), None)


def floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among the values that the Trainer logs."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def check_weight(weight: Any) -> float:
    """Returns a step's weight as a float; raises `ConfigError` unless it is a finite number of 0 or more."""
    try:
        number = float(weight or 0.0)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if isinstance(weight, str) or not 0 <= number < math.inf:
        raise ConfigError(f"step(weight={weight!r}): give the number of examples or tokens of the step, 0 or more")
    return number


def check_count(name: str, value: Any, call: str = "OuterLoop") -> int | None:
    """Returns a count of steps, rounds or checkpoints; None if not given. Raises `ConfigError` if it is below 1."""
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = 0
    if number is not None and (number < 1 or isinstance(value, bool)):
        raise ConfigError(f"{call}(..., {name}={value!r}): give a whole number from 1 on, or leave it out")
    return number


def check_prepared(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raises unless the arguments have the right types and belong together; warns about settings DeepSpeed ignores."""
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
    check_ranks(accelerator.num_processes)
    warn_of_ignored(accelerator.state.deepspeed_plugin)


def decayed_groups(model: nn.Module, weight_decay: float, **of_others: float) -> list[dict[str, Any]]:
    """Returns the trainable parameters as optimizer groups. As in the Trainer, biases and norms have no weight decay.

    `of_others` are further settings of the group of biases and norms.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0, **of_others},
    ]
    return [group for group in groups if group["params"]]


def settings_of(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """Returns the values of the settings in `REFUSALS` for an Accelerator and its prepared optimizer."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return {
        "optim": type(unwrap_optimizer(optimizer)).__name__,
        "fsdp_config": {"version": plugin.fsdp_version} if plugin else None,
        "parallelism_config": accelerator.parallelism_config,
        "ProjectConfiguration.total_limit": accelerator.project_configuration.total_limit,
    }
