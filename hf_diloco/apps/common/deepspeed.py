"""The DeepSpeed configuration of a run file: reads, completes and checks it before data and model are prepared."""

from __future__ import annotations

import copy
import json
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_diloco.apps.common.base import BaseRun, read_json_object
from hf_diloco.apps.common.paths import get_at
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.ignored_settings import READ_BY_NAME, TrackedConfig
from hf_diloco.trainer.refusals import refuse_unreadable_masters
from hf_diloco.utils.extras import import_deepspeed_quietly
from hf_diloco.utils.settings import refusing
from hf_diloco.utils.text import nearest, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

_OFFLOADS = ("offload_optimizer", "offload_param")  # they may be null
_BLOCKS = (
    *("zero_optimization", *(f"zero_optimization.{name}" for name in _OFFLOADS), "bf16", "fp16", "compile"),
    *(*READ_BY_NAME, "optimizer.params", "scheduler.params"),
    *("pipeline", "comms_logger", "autotuning", "hybrid_engine", "data_efficiency", "tensor_parallel", "timers"),
    *("aio", "tensorboard", "wandb", "csv_monitor", "comet"),
)
_DTYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype")
_OF_ADAM = {"torch_adam", "adam_w_mode"}
_OF_MUON = _OF_ADAM | {"lr", "momentum", "weight_decay", "ns_method", "betas", "eps", "muon_lr", "adam_lr"}
_OF_MUON |= {"foreach", "fp32_optimizer_states"}
"""Settings of `optimizer.params` that DeepSpeed removes before it creates the optimizer."""
_TAKEN_BY_OPTIMIZER = {
    "learning_rate": "lr",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "betas"),
    "adam_epsilon": "eps",
    "weight_decay": "weight_decay",
}
"""Settings of `training`, with the key of `optimizer.params` whose "auto" takes the value over."""
_OF_TRAINING = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_FILLED_LATER = (
    *("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "stage3_gather_16bit_weights_on_model_save",
)
"""Keys of `zero_optimization` whose "auto" is only replaced when the model exists."""
_AUTO_TO_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")
"""Settings whose "auto" DeepSpeed itself replaces."""


def deepspeed_config(run: BaseRun) -> dict[str, Any] | None:
    """Returns the DeepSpeed configuration; for ZeRO-3, adds the settings for saving a whole model and for Muon.

    Batch size, accumulation and clipping that are missing or null are taken from `training`. Raises `ConfigError` if a
    block is not a mapping, or `zero_optimization` is missing; or the outer loop cannot read the master weights; or
    `reduce_scatter` is on with Muon under ZeRO-3, which needs whole gradients; or the stage is none of 0 to 3.
    """
    if run.deepspeed is None:
        return None
    config = read_json_object(Path(run.deepspeed)) if isinstance(run.deepspeed, str) else run.deepspeed
    for name in _BLOCKS:
        *above, key = name.split(".")
        block = get_at(config, tuple(above)) or {}
        if not isinstance(block.get(key, {}), dict | None if key in _OFFLOADS else dict):
            raise ConfigError(f"deepspeed: {name} must be a block of `key: value` lines, got {block[key]!r}")
    if "zero_optimization" not in config:
        has = f" (it has {', '.join(config)})" if config else ""
        raise ConfigError(
            f"deepspeed: it has no block zero_optimization{has}: give it one, as {{stage: 2}}, or {{stage: 0}} for DDP"
        )
    zero, optimizer = config["zero_optimization"], config.get("optimizer", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in range(4):  # with "auto" Accelerate would choose
        raise ConfigError(f"deepspeed: zero_optimization.stage: give one of the numbers 0 to 3, got {stage!r}")
    zero = {key: value for key, value in zero.items() if value is not None or key not in _OFFLOADS}
    refuse_unreadable_masters({**config, "zero_optimization": zero}, run.meeting.enabled)
    if stage == 3:
        zero = {"stage3_gather_16bit_weights_on_model_save": True, **zero}
        if str(optimizer.get("type")).lower() == "muon":
            zero = {"reduce_scatter": False, **zero}
            if zero["reduce_scatter"]:
                raise ConfigError(
                    "deepspeed: Muon under ZeRO-3 needs whole gradients: set zero_optimization.reduce_scatter to "
                    "false, or leave it out"
                )
    from_training = dict.fromkeys(_OF_TRAINING, "auto")  # transformers fills it in, into a copy
    given = {name: value for name, value in config.items() if value is not None or name not in _OF_TRAINING}
    own: dict[str, Any] = json.loads(json.dumps({**from_training, **given, "zero_optimization": zero}))
    return own


def try_deepspeed(run: BaseRun, args: TrainingArguments) -> None:
    """Does `check_deepspeed` if no island is about to start, and `args` was made without DeepSpeed."""
    config = deepspeed_config(run)
    if config is None:
        return
    import_deepspeed_quietly()
    from accelerate import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    if run.accelerate is not None:  # it may set another number of ranks
        config.pop("train_batch_size", None)
    try:
        filled = HfTrainerDeepSpeedConfig(config)
        filled.trainer_config_process(SimpleNamespace(**vars(args), world_size=run.launch.num_processes))
        DeepSpeedPlugin(hf_ds_config=filled)  # which fills it in further
        check_deepspeed(filled, args, run.training)
    finally:
        unset_hf_deepspeed_config()


def check_deepspeed(filled: HfTrainerDeepSpeedConfig, args: TrainingArguments, training: Mapping[str, Any]) -> None:
    """Makes DeepSpeed read its configuration now, instead of after preparing data and model, which may take hours.

    `filled` is the configuration, with values of `args` in place of "auto". Raises `ConfigError` if it contradicts
    `args`, or makes a setting of the block `training` ineffective; or DeepSpeed refuses it (the message has the
    reason), or would ignore a setting.
    """
    import_deepspeed_quietly()
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    filled.fill_match("scheduler.params.total_num_steps", args.max_steps, "max_steps")
    warmup = max(1, args.get_warmup_steps(args.max_steps))
    filled.fill_match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
    if filled.mismatches:
        found = "; ".join(line.removeprefix("- ") for line in filled.mismatches)
        raise ConfigError(f'deepspeed: it contradicts the block training: {found}; set these to "auto" in it')
    config = copy.deepcopy(filled.config)
    config.pop("train_batch_size", None)  # follows from the other settings and the number of ranks
    zero = config["zero_optimization"]
    for name in _FILLED_LATER:
        if zero.get(name) == "auto":
            del zero[name]
    if left := ", ".join(_left_auto(config)):
        raise ConfigError(f'deepspeed: {left}: nothing takes the place of "auto"; give values, or leave it out')
    _check_optimizer(config)
    _check_scheduler(config, args.learning_rate)
    asked = TrackedConfig.of_config(config)
    try:
        read = DeepSpeedConfig(asked)
    except ValidationError as error:
        place = "zero_optimization." if error.title == "DeepSpeedZeroConfig" else f"{error.title}: "
        problems = [(".".join(map(str, one["loc"])), one["msg"].lower(), one["input"]) for one in error.errors()]
        texts = [f"deepspeed: {place}{name}: {why}, got {value!r}" for name, why, value in problems]
        raise ConfigError("; ".join(texts)) from None
    except Exception as error:  # DeepSpeed raises many types
        raise ConfigError(f"deepspeed: {'; '.join(asked.wrong_types()) or one_line(error)}") from error
    if wrong := "; ".join([*asked.wrong_types(), *asked.unknown()]):
        raise ConfigError(f"deepspeed: {wrong}")
    _check_dtypes(read)
    if without_effect := "; ".join(_without_effect(config, training)):
        raise ConfigError(without_effect)


def _without_effect(config: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each setting of `training` that DeepSpeed's own optimizer or scheduler ignores."""
    for block, replaced, taken in (
        ("optimizer", ("optim", "optim_args", "optim_target_modules"), _TAKEN_BY_OPTIMIZER),
        ("scheduler", ("lr_scheduler_type", "lr_scheduler_kwargs"), {"warmup_steps": "warmup_num_steps"}),
    ):
        if block not in config:
            continue
        for name in training.keys() & {*replaced}:
            yield f"training.{name} has no effect, as deepspeed has its own {block}: leave one of them out"
        params = config[block].get("params", {})
        by_scheduler = get_at(config, ("scheduler", "params")) or {}
        for name, key in taken.items():
            if name == "learning_rate" and "warmup_max_lr" in by_scheduler:
                continue
            if name in training and key not in params:
                place = f"deepspeed: {block}.params.{key}"
                yield f'training.{name} has no effect: set {place} to "auto", or leave training.{name} out'


def _check_dtypes(read: DeepSpeedConfig) -> None:
    """Raises `ConfigError` for dtypes that DeepSpeed would refuse only when it has the model."""
    from deepspeed.runtime.config import DtypeEnum

    own = "fp16" if read.float16_config.enabled else "bf16" if read.bfloat16_config.enabled else "fp32"
    for name in _DTYPES:
        if (value := getattr(read, name, None)) is None:
            continue
        try:
            kind = DtypeEnum(value).name
        except ValueError:
            raise ConfigError(f"deepspeed: data_types.{name}: {value!r} is not one of fp32, bf16, fp16") from None
        is_fixed = name == "param_dtype" or (name == "grad_accum_dtype" and read.zero_optimization_stage == 0)
        if is_fixed and kind != own:
            raise ConfigError(
                f"deepspeed: data_types.{name}: {value!r} does not go with training in {own}; leave it out, or set "
                "bf16 or fp16 in the block training"
            )


def _check_optimizer(config: dict[str, Any]) -> None:
    """Raises `ConfigError` for an unknown optimizer, or an unknown setting of the optimizer."""
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from torch import optim

    name = _find_type(config, "optimizer", optim, DEEPSPEED_OPTIMIZERS, str.lower)
    adams = (adam.FusedAdam, adam.DeepSpeedCPUAdam, optim.AdamW)
    own: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("adam", "adamw"), adams),
        "adagrad": (adagrad.DeepSpeedCPUAdagrad, optim.Adagrad),
        "lamb": (lamb.FusedLamb,),
        "lion": (lion.DeepSpeedCPULion, lion.FusedLion),
    }
    kinds = own.get(name.lower()) or [kind for kind in (getattr(optim, name, None),) if kind]
    known = {key for kind in kinds for key in signature(kind).parameters} - {"params", "model_params"}
    known |= {"adam": _OF_ADAM, "adamw": _OF_ADAM, "muon": _OF_MUON}.get(name.lower(), set())
    params = config.get("optimizer", {}).get("params", {})
    if known and (unknown := [key for key in params if key not in known]):
        key = unknown[0]
        hint = f"{nearest(key, known)}: known: {', '.join(sorted(known))}"
        raise ConfigError(f"deepspeed: unknown setting optimizer.params.{key}={params[key]!r} of {name}{hint}")


def _check_scheduler(config: dict[str, Any], lr: float) -> None:
    """Raises `ConfigError` for an unknown schedule, or one that cannot be created with its settings."""
    import torch
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    if not (name := _find_type(config, "scheduler", lr_scheduler, lr_schedules.VALID_LR_SCHEDULES)):
        return
    params = config["scheduler"].get("params", {})
    with refusing(f"deepspeed: scheduler={name}, params={params!r}"):
        kind = getattr(lr_schedules, name, None) or getattr(lr_scheduler, name)
        kind(torch.optim.AdamW([torch.zeros(1)], lr=lr), **params)


def _find_type(
    config: dict[str, Any], block: str, torch_has: ModuleType, known: list[str], spell: Callable[[str], str] = str
) -> str:
    """Returns the type in a block, "" without the block; raises `ConfigError` if it is missing or unknown."""
    if block not in config:
        return ""
    name = config[block].get("type")
    if name is None:
        raise ConfigError(f"deepspeed: {block}.type is missing: give it, or leave {block} out")
    if spell(str(name)) not in known and not isinstance(getattr(torch_has, str(name), None), type):
        hint = f"known: {', '.join(known)}, and those of {torch_has.__name__}"
        raise ConfigError(f"deepspeed: {block}.type: {name!r} is none{nearest(spell(str(name)), known)}: {hint}")
    return str(name)


def _left_auto(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _left_auto(value, f"{prefix}{key}.")
        elif value == "auto" and f"{prefix}{key}" not in _AUTO_TO_DEEPSPEED:
            yield f"{prefix}{key}"
