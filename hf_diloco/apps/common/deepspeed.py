"""The DeepSpeed configuration of a run file: read, completed, and tried before data and model are ready."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.paths import get_at
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.refusals import refuse_nvme
from hf_diloco.utils.extras import import_deepspeed_quietly
from hf_diloco.utils.files import read_json
from hf_diloco.utils.text import nearest, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

_OFFLOADS = ("offload_optimizer", "offload_param")  # they may be null
_BLOCKS = (
    *("zero_optimization", *(f"zero_optimization.{name}" for name in _OFFLOADS), "bf16", "fp16"),
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "data_types", "torch_autocast", "compile"),
)
_OF_TRAINING = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_FILLED_LATER = (
    *("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "stage3_gather_16bit_weights_on_model_save",
)
"""Keys of `zero_optimization` whose "auto" stands until there is a model."""


def deepspeed_config(run: BaseRun) -> dict[str, Any] | None:
    """The DeepSpeed configuration, read; under ZeRO-3 with what saving a whole model and Muon need.

    Batch size, accumulation and clipping that it leaves out, or has as null, are those of `training`.

    Raises:
        ConfigError: it has another value where a block belongs, or no `zero_optimization`; or offloads to NVMe; or
            Muon is to scatter gradients under ZeRO-3, which it needs whole.
    """
    if run.deepspeed is None:
        return None
    config = read_json(Path(run.deepspeed)) if isinstance(run.deepspeed, str) else run.deepspeed
    for name in _BLOCKS:
        *above, key = name.split(".")
        block = get_at(config, tuple(above)) or {}
        if not isinstance(block.get(key, {}), dict | None if key in _OFFLOADS else dict):
            raise ConfigError(f"deepspeed: {name} must be a block of `key: value` lines, got {block[key]!r}")
    if "zero_optimization" not in config:
        raise ConfigError(
            "deepspeed: it has no block zero_optimization: give it one, as {stage: 2}, or {stage: 0} for DDP"
        )
    zero, optimizer = config["zero_optimization"], config.get("optimizer", {})
    zero = {key: value for key, value in zero.items() if value is not None or key not in _OFFLOADS}
    config = {**config, "zero_optimization": zero}
    refuse_nvme(config, run.meeting.enabled)
    is_muon = str(optimizer.get("type")).lower() == "muon"
    if zero.get("stage") == 3:
        zero = {"stage3_gather_16bit_weights_on_model_save": True, **zero}
        if is_muon:
            zero = {"reduce_scatter": False, **zero}
            if zero["reduce_scatter"]:
                raise ConfigError(
                    "deepspeed: Muon under ZeRO-3 needs whole gradients: set zero_optimization.reduce_scatter to "
                    "false, or leave it out"
                )
        config = {**config, "zero_optimization": zero}
    from_training = dict.fromkeys(_OF_TRAINING, "auto")  # transformers fills it in, into a copy
    if is_muon:  # DeepSpeed would clip what Muon has made of the gradients
        del from_training["gradient_clipping"]
    given = {name: value for name, value in config.items() if value is not None or name not in _OF_TRAINING}
    own: dict[str, Any] = json.loads(json.dumps({**from_training, **given}))
    return own


def try_deepspeed(run: BaseRun, args: TrainingArguments) -> None:
    """As `check_deepspeed`, where no island starts, and `args` was made without DeepSpeed."""
    config = deepspeed_config(run)
    if config is None:
        return
    import_deepspeed_quietly()
    from accelerate import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    if run.accelerate is not None:  # which may say how many ranks there are
        config.pop("train_batch_size", None)
    try:
        filled = HfTrainerDeepSpeedConfig(config)
        filled.trainer_config_process(SimpleNamespace(**vars(args), world_size=run.launch.num_processes))
        DeepSpeedPlugin(hf_ds_config=filled)  # which fills it in further
        check_deepspeed(filled, args)
    finally:
        unset_hf_deepspeed_config()


def check_deepspeed(filled: HfTrainerDeepSpeedConfig, args: TrainingArguments) -> None:
    """Has DeepSpeed read its configuration, as it will once data and model are ready, which may take hours.

    Args:
        filled: the configuration, with what `args` put in the place of "auto".

    Raises:
        ConfigError: it contradicts `args`; or DeepSpeed refuses it, with its reason.
    """
    import_deepspeed_quietly()
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
    from pydantic import ValidationError
    from torch import optim

    filled.fill_match("scheduler.params.total_num_steps", args.max_steps, "max_steps")
    warmup = max(1, args.get_warmup_steps(args.max_steps))
    filled.fill_match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
    if filled.mismatches:
        found = "; ".join(line.removeprefix("- ") for line in filled.mismatches)
        raise ConfigError(f'deepspeed: it contradicts the block training: {found}; set these to "auto" in it')
    config = copy.deepcopy(filled.config)
    _check_type(config, "optimizer", optim, DEEPSPEED_OPTIMIZERS, str.lower)
    _check_type(config, "scheduler", optim.lr_scheduler, lr_schedules.VALID_LR_SCHEDULES)
    config.pop("train_batch_size", None)  # it follows from the others, and the number of ranks
    zero = config["zero_optimization"]
    for name in _FILLED_LATER:
        if zero.get(name) == "auto":
            del zero[name]
    if left := list(_left_auto(config)):
        raise ConfigError(
            f'deepspeed: {", ".join(left)}: nothing takes the place of "auto"; give values, or leave it out'
        )
    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        place = "zero_optimization." if error.title == "DeepSpeedZeroConfig" else f"{error.title}: "
        problems = [(".".join(map(str, one["loc"])), one["msg"].lower(), one["input"]) for one in error.errors()]
        texts = [f"deepspeed: {place}{name}: {why}, got {value!r}" for name, why, value in problems]
        raise ConfigError("; ".join(texts)) from None
    except Exception as error:  # it checks in many ways
        raise ConfigError(f"deepspeed: {one_line(error)}") from error


def _check_type(
    config: dict[str, Any], block: str, torch_has: ModuleType, known: list[str], spell: Callable[[str], str] = str
) -> None:
    """Raises `ConfigError` if the type in a block is missing, or neither DeepSpeed's nor PyTorch's."""
    if block not in config:
        return
    name = config[block].get("type")
    if name is None:
        raise ConfigError(f"deepspeed: {block}.type is missing: give it, or leave {block} out")
    if spell(str(name)) not in known and not hasattr(torch_has, str(name)):
        hint = f"known: {', '.join(known)}, and those of {torch_has.__name__}"
        raise ConfigError(f"deepspeed: {block}.type: {name!r} is none{nearest(spell(str(name)), known)}: {hint}")


def _left_auto(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings that are "auto" still."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _left_auto(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"
