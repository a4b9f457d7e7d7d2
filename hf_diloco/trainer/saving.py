"""Writes the parts of a checkpoint that are not the outer state, by the Trainer, an Accelerator, or here.

Write failures (disk full or failing) are collected instead of raised, so that no rank hangs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator, accelerator as accelerator_module
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedConfig, Trainer, trainer as trainer_module

from hf_diloco.errors import ConfigError
from hf_diloco.trainer.arguments import check_count, path_given
from hf_diloco.utils.files import is_write_failure, reason_of, telling

_FOLDER = "give the folder to save into"
_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_FSDP_STEPS = ("save_fsdp_model", "save_fsdp_optimizer")
"""Accelerate's functions that write FSDP checkpoints; their callers look them up as attributes of the module."""


@contextmanager
def noting_failures(trainer: Trainer, failures: list[str]) -> Iterator[None]:
    """Appends write failures inside the block to `failures`; the Trainer continues as if writing had worked."""
    steps: list[tuple[Any, str]] = [(trainer, "_save")]
    if trainer.is_fsdp_enabled:
        steps += [(trainer_module, name) for name in _FSDP_STEPS]
    with _noting_in(steps, [trainer.model_wrapped] if trainer.is_deepspeed_enabled else [], failures):
        yield


def check_folder(call: str, folder: Any) -> Path:
    """Returns the folder to save into; raises `ConfigError` if it is none."""
    if path := path_given(call, "folder", folder, _FOLDER):
        return path
    raise ConfigError(f"{call}(folder={folder!r}): {_FOLDER}")


def check_saving(accelerator: Accelerator, limit: Any, write: Any) -> int:
    """Returns the limit of `save_checkpoint`, 0 without one; raises `ConfigError` if an argument is wrong."""
    if write is None and accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("automatic_checkpoint_naming=True: leave it out, save_checkpoint() names checkpoints")
    if write is not None and not callable(write):
        raise ConfigError(f"save_checkpoint(..., write={write!r}): give a function of the folder, or leave it out")
    return check_count("limit", limit, "save_checkpoint") or 0


def save_accelerator(
    accelerator: Accelerator, folder: Path, write: Callable[[Path], object] | None, failures: list[str]
) -> None:
    """Does `accelerator.save_state`, or `write` in its place, but appends write failures to `failures`. Collective."""
    has_engines = accelerator.distributed_type == DistributedType.DEEPSPEED
    has_fsdp = accelerator.distributed_type == DistributedType.FSDP
    steps = [(accelerator_module, name) for name in _FSDP_STEPS] if has_fsdp else []
    with _noting_in(steps, accelerator._models if has_engines else [], failures):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder) if write else accelerator.save_state(str(folder))


def weights_name(accelerator: Accelerator, model: nn.Module) -> str:
    """Returns the name, without ".safetensors", that `accelerator.save_state` gives to the weights of this model."""
    bare = partial(accelerator.unwrap_model, keep_torch_compile=False)
    number = next((number for number, one in enumerate(accelerator._models) if bare(one) is bare(model)), 0)
    return f"model_{number}" if number else "model"


@contextmanager
def _noting_in(steps: Sequence[tuple[Any, str]], engines: Sequence[Any], failures: list[str]) -> Iterator[None]:
    """Appends write failures inside the block to `failures` instead of raising them.

    Each step in which one rank writes while others wait for it is caught by itself, so that all later steps still run.
    A failure outside these steps ends the block.

    Args:
        steps: owner and name of each such step, besides those of the DeepSpeed `engines`.
    """
    with ExitStack() as stack:
        for engine in engines:
            writer = engine.checkpoint_engine
            steps = [*steps, (writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]
        for owner, name in steps:
            stack.enter_context(replaced(owner, name, partial(_noting, getattr(owner, name), failures)))
        for engine in engines:
            stack.enter_context(replaced(engine, "save_checkpoint", partial(_save_engine, engine, failures)))
        try:
            yield
        except (Exception, CheckpointException) as error:
            _note(error, failures)


def _save_engine(engine: Any, failures: list[str], folder: str, tag: str | None = None, **kwargs: Any) -> None:
    """Calls DeepSpeed's `save_checkpoint`, but writes the file `latest` afterwards, when no rank waits for rank 0."""
    type(engine).save_checkpoint(engine, folder, tag, save_latest=False, **kwargs)
    if engine.global_rank == 0:
        _noting(Path(folder, "latest").write_text, failures, tag or f"global_step{engine.global_steps}")


def _noting(call: Callable[..., Any], failures: list[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (Exception, CheckpointException) as error:
        _note(error, failures)


def _note(error: BaseException, failures: list[str]) -> None:
    if isinstance(error, CheckpointException):  # holds the errors of all ranks in a sharded save
        for met, _ in error.failures.values():
            _note(met, failures)
        return
    if not is_write_failure(error):
        raise error
    failures.append(reason_of(error))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an object's attribute inside the block."""
    before: Mapping[str, Any] = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in before:
            setattr(owner, name, before[name])


def describe_model(model: Any, processing_class: Any, checkpoint: Path) -> None:
    """Writes the model's configuration and tokenizer into a checkpoint that lacks them.

    The Trainer writes both with unsharded models, but neither with FSDP's sharded checkpoints.

    Args:
        model: the module, whose parameters may be sharded. Only configurations of transformers are written.
        processing_class: the tokenizer; None if the Trainer has none.

    Raises:
        CheckpointError: the files cannot be written.
    """
    if any((checkpoint / name).exists() for name in (_CONFIG, _ADAPTER_CONFIG)):
        return
    with telling(checkpoint):
        checkpoint.mkdir(parents=True, exist_ok=True)
        for adapter in getattr(model, "peft_config", {}).values():
            adapter.save_pretrained(str(checkpoint))
        if not hasattr(model, "peft_config") and isinstance(getattr(model, "config", None), PreTrainedConfig):
            config = copy.deepcopy(model.config)
            config.architectures = [_class_name(model)]
            config.save_pretrained(str(checkpoint))
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(str(checkpoint))


def _class_name(model: nn.Module) -> str:
    """Returns the name of the model's class, skipping the FSDP class that `fully_shard` creates."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))
