"""The `training:` block: checks it against the types of TrainingArguments, and creates them."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hf_diloco.apps.common.base import DECIDED_ELSEWHERE, OFFLOAD_ON_CPU, BaseRun
from hf_diloco.apps.common.deepspeed import check_deepspeed, deepspeed_config
from hf_diloco.apps.common.environment import ENV_LAUNCHED
from hf_diloco.errors import ConfigError
from hf_diloco.utils.settings import refusing
from hf_diloco.utils.text import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

_TOO_LARGE = 2**63
_POSITIVE = (
    "learning_rate",
    *("logging_steps", "save_steps", "eval_steps", "save_total_limit", "eval_accumulation_steps"),
    *("dataloader_prefetch_factor", "max_steps", "ddp_timeout"),
)
_NOT_NEGATIVE = (
    *("weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon", "data_seed"),
    "neftune_noise_alpha",
)
_RANGES: dict[str, Any] = {
    **dict.fromkeys(_POSITIVE, Field(gt=0, lt=_TOO_LARGE)),
    **dict.fromkeys(_NOT_NEGATIVE, Field(ge=0, lt=_TOO_LARGE)),
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        Field(gt=0, le=2**20),
    ),
    "ddp_bucket_cap_mb": Field(gt=0, lt=2**40),
    "dataloader_num_workers": Field(ge=0, le=1024),  # each a process
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Field(ge=0, lt=1)),
}
_WORDS = {"include_num_input_tokens_seen": ["all", "non_padding", "no"]}  # transformers takes any text
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_CONFIG = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
_OF_THE_MODEL = ("params", "model", "optimizer_dict")  # some optimizers take these instead of parameters


def check_names(training: dict[str, Any]) -> None:
    """Checks names in a `training:` block without importing transformers; calls `check_training` for unknown ones."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec and spec.submodule_search_locations) or ():
        tree = ast.parse((Path(folder) / "training_args.py").read_text(encoding="utf-8"))
        kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
        fields = [node.target for kind in kinds for node in kind.body if isinstance(node, ast.AnnAssign)]
        known = {field.id for field in fields if isinstance(field, ast.Name)}
        if training.keys() - known:
            check_training(training)


def check_training(training: dict[str, Any]) -> None:
    """Raises `ConfigError` for wrong names, types and ranges in a `training:` block, and for missing trackers."""
    from transformers import TrainingArguments

    types = get_type_hints(TrainingArguments)
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    problems = [_problem(key, value, known, types) for key, value in training.items()]
    if found := "; ".join(filter(None, [*problems, *_problems_of_trackers(training.get("report_to"))])):
        raise ConfigError(found)


def training_arguments(run: BaseRun, **settings_of_task: Any) -> TrainingArguments:
    """Creates the TrainingArguments of one island, with its task's settings. Starts its process group, if any.

    Raises `ConfigError` if transformers or DeepSpeed refuse the settings; the message has the reason.
    """
    from transformers import TrainingArguments

    use_cpu = uses_cpu(run)
    settings: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": bool(os.environ.get(ENV_LAUNCHED)) or None,
        "dataloader_pin_memory": not use_cpu,
        "run_name": f"{run.name}-island-{run.meeting.island}",
        **{name: value for name, value in run.training.items() if (name, value) != ("report_to", None)},
        **({} if "LOCAL_RANK" in os.environ else {"ddp_backend": None}),  # without a launcher there is no group
        "output_dir": str(run.island_folder()),
        "seed": run.seed,
        "use_cpu": use_cpu,
        "deepspeed": deepspeed_config(run),
        **_fsdp_arguments(run),
        **settings_of_task,
    }
    kinds = get_type_hints(TrainingArguments)
    settings = {key: float(value) if kinds[key] is float else value for key, value in settings.items()}
    with refusing("training", (ValueError, TypeError, AssertionError, ImportError, OSError)):
        args = TrainingArguments(**settings)
    if (deepspeed := getattr(args, "hf_deepspeed_config", None)) is not None:
        check_deepspeed(deepspeed, args, run.training)
    _try_settings(args, run.training)
    metric = "loss" if args.metric_for_best_model is None else args.metric_for_best_model.removeprefix("eval_")
    if metric not in run.metrics:
        known = ", ".join(run.metrics)
        raise ConfigError(f"training.metric_for_best_model: no evaluation has {metric!r}; set it to one of {known}")
    if run.where == "islands":  # nodes do not shard
        _shard_on_cpu(args)
    return args


def _try_settings(args: TrainingArguments, training: Mapping[str, Any]) -> None:
    """Creates the objects that the Trainer creates from its arguments, before data and model take hours to prepare.

    Raises `ConfigError` if one cannot be created, or a setting of the block `training` has no effect.
    """
    import torch
    from accelerate.utils import DynamoBackend, GradientAccumulationPlugin
    from torch.utils.data import DataLoader
    from transformers import SchedulerType, Trainer, get_scheduler
    from transformers.training_args import OptimizerNames
    from transformers.utils import is_liger_kernel_available, logging

    for name in ("log_level", "log_level_replica"):
        if (level := getattr(args, name)) not in ("passive", *logging.log_levels):
            raise ConfigError(f"training.{name}: {level!r} is not one of passive, {', '.join(logging.log_levels)}")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ConfigError("training.use_liger_kernel needs liger-kernel: pip install liger-kernel, or set it to false")
    if args.torch_compile_backend is not None:
        with refusing("training.torch_compile_backend"):
            DynamoBackend(args.torch_compile_backend.upper())
    modes = torch._inductor.list_mode_options() if args.torch_compile_mode is not None else {}
    if args.torch_compile_mode not in (None, *modes):
        raise ConfigError(f"training.torch_compile_mode: {args.torch_compile_mode!r} is not one of {', '.join(modes)}")
    config: Any = args.accelerator_config
    accumulation = config.gradient_accumulation_kwargs or {}
    where = "training.accelerator_config.gradient_accumulation_kwargs"
    if "num_steps" in accumulation:
        raise ConfigError(f"{where}.num_steps: set training.gradient_accumulation_steps instead")
    with refusing(where):
        GradientAccumulationPlugin(**accumulation)
    nothing: Any = torch.nn.ParameterList([torch.zeros(1)])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(nothing.parameters(), lr=args.learning_rate)
    if not args.optim_target_modules:
        with refusing(f"training.optim={OptimizerNames(args.optim).value}, optim_args={args.optim_args!r}"):
            kind, options = Trainer.get_optimizer_cls_and_kwargs(args, nothing)
            if not any(name in options for name in _OF_THE_MODEL):
                optimizer = kind(nothing.parameters(), **options)
        for name in (name for name in _OF_ADAM if name in training):
            other = copy.copy(args)
            setattr(other, name, (getattr(args, name) + 0.5) / 2)
            if Trainer.get_optimizer_cls_and_kwargs(other, nothing)[1] == options:
                chosen = f"training.optim={OptimizerNames(args.optim).value}"
                raise ConfigError(f"training.{name} has no effect with {chosen}: leave it out")
    kwargs: Any = args.lr_scheduler_kwargs
    with refusing(
        f"training.lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value}, lr_scheduler_kwargs={kwargs}"
    ):
        warmup = args.get_warmup_steps(args.max_steps)
        get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps, scheduler_specific_kwargs=kwargs)
    with refusing("training.dataloader_*"):
        DataLoader(
            [0],  # type: ignore[arg-type]
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),  # transformers >= 5.15
        )


def check_evaluation(args: TrainingArguments, num_examples: int) -> None:
    """Raises `ConfigError` if an evaluation would have no batch, and thus no loss, before training starts."""
    at_once = args.eval_batch_size * args.world_size
    if args.dataloader_drop_last and num_examples < at_once:
        raise ConfigError(
            f"training.dataloader_drop_last: of {num_examples} examples to evaluate on no batch of {at_once} is left; "
            "set it to false, or lower per_device_eval_batch_size"
        )


def check_model(args: TrainingArguments, model: PreTrainedModel) -> None:
    """Raises `ConfigError` for settings that the model's class does not support, before the islands meet."""
    kind = type(model).__name__
    if args.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError(f"training.gradient_checkpointing: {kind} cannot compute activations again; set it to false")
    if args.neftune_noise_alpha is not None:
        try:
            model.get_input_embeddings()
        except NotImplementedError:
            raise ConfigError(
                f"training.neftune_noise_alpha: {kind} has no embeddings of its input to add noise to; leave it out"
            ) from None


def uses_cpu(run: BaseRun) -> bool:
    """Whether the island trains on the CPU: by the run file, else if there is no CUDA device."""
    import torch

    return not torch.cuda.is_available() if run.launch.use_cpu is None else run.launch.use_cpu


def _fsdp_arguments(run: BaseRun) -> dict[str, Any]:
    if run.fsdp is None:
        return {}
    if run.fsdp.cpu_offload and uses_cpu(run):
        raise ConfigError(OFFLOAD_ON_CPU)
    config = {**run.fsdp.model_dump(exclude_none=True, exclude={"num_replicas"}), "version": 2}
    num_replicas, num_shards = run.fsdp.num_replicas, run.fsdp.num_shards(int(os.environ.get("WORLD_SIZE", 1)))
    if num_replicas == 1:
        return {"fsdp": True, "fsdp_config": config}
    from accelerate import ParallelismConfig

    mesh = ParallelismConfig(dp_replicate_size=num_replicas, dp_shard_size=num_shards)
    return {"fsdp": True, "fsdp_config": config, "parallelism_config": mesh}


def _shard_on_cpu(args: TrainingArguments) -> None:
    """Makes Accelerate use FSDP on CPU, too.

    Accelerate enables FSDP only for a list of device types without CPU, and otherwise silently trains whole models.
    FSDP2 itself works on CPU, with Gloo. So this sets the distributed type to one of the list; the device stays CPU.
    """
    from accelerate.utils import DistributedType

    state = args.distributed_state
    is_wanted = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if is_wanted and state is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def is_training_argument(key: str) -> bool:
    """Whether the block `training` may have this setting."""
    from transformers import TrainingArguments

    return key in {field.name for field in dataclasses.fields(TrainingArguments)} - DECIDED_ELSEWHERE.keys()


def training_takes_null(key: str) -> bool:
    """Whether a setting in the block `training` may be null; True for unknown settings."""
    from transformers import TrainingArguments

    kind = get_type_hints(TrainingArguments).get(key)
    return kind is None or type(None) in get_args(kind)


def _problem(key: str, value: Any, known: set[str], types: dict[str, Any]) -> str | None:
    name = f"training.{key}"
    if key not in known:
        return f"unknown setting {name}={value!r}{nearest(key, sorted(known))}"
    if key.endswith("_kwargs") and isinstance(value, str) and not _is_json_object(value):
        return f"{name}: expected a block of `key: value` lines, got {value!r}"
    if key == "accelerator_config" and isinstance(value, str) and not Path(value).is_file():
        return f"{name}: no file {value!r}; give a JSON file of Accelerate's settings, or a block of them"
    kinds = [kind for kind in get_args(types[key]) if isinstance(kind, type) and issubclass(kind, Enum)]
    names = [str(one.value) for kind in kinds for one in kind]
    names += _WORDS.get(key, [])
    if names and isinstance(value, str) and value not in names:
        return f"{name}: {value!r} is not one of {', '.join(names)}{nearest(value, names)}"
    kind: Any = Annotated[types[key], _RANGES[key]] if key in _RANGES else types[key]
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=_CONFIG)
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        reasons = dict.fromkeys(problem["msg"][0].lower() + problem["msg"][1:] for problem in error.errors())
        return f"{name}: {' or '.join(reasons)}, got {value!r}"
    return None


def _problems_of_trackers(report_to: Any) -> Iterator[str]:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    names = [report_to] if isinstance(report_to, str) else report_to if isinstance(report_to, list) else []
    for name in map(str, names):
        if name not in ("none", "all", *get_available_reporting_integrations()):
            known = sorted(INTEGRATION_TO_CALLBACK)
            hint = f"{nearest(name, known)}: known: {', '.join(known)}"
            hint = ": install its package, or leave it out" if name in known else hint
            yield f"training.report_to: {name!r} is not installed here{hint}"


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
