"""Collects write failures during a save (disk full or failing) instead of raising, so that no rank hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator, accelerator as accelerator_module
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.api import CheckpointException

from hf_diloco.utils.files import is_write_failure, reason_of

FSDP_STEPS = ("save_fsdp_model", "save_fsdp_optimizer")
"""Accelerate's functions that write FSDP checkpoints; their callers look them up as attributes of the module."""


def save_accelerator(
    accelerator: Accelerator, folder: Path, write: Callable[[Path], object] | None, failures: list[str]
) -> None:
    """Does `accelerator.save_state`, but appends write failures to `failures`. Collective over the ranks.

    Args:
        accelerator: the loop's Accelerator.
        folder: the checkpoint.
        write: called in place of `accelerator.save_state`.
        failures: receives the write failures.
    """
    has_engines = accelerator.distributed_type == DistributedType.DEEPSPEED
    has_fsdp = accelerator.distributed_type == DistributedType.FSDP
    steps = [(accelerator_module, name) for name in FSDP_STEPS] if has_fsdp else []
    with noting_in(steps, accelerator._models if has_engines else [], failures):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder) if write else accelerator.save_state(str(folder))


@contextmanager
def noting_in(steps: Sequence[tuple[Any, str]], engines: Sequence[Any], failures: list[str]) -> Iterator[None]:
    """Appends write failures inside the block to `failures` instead of raising them.

    Each step in which one rank writes while others wait for it is caught by itself, so that all later steps still run.
    A failure outside these steps ends the block.

    Args:
        steps: owner and name of each such step, besides those of DeepSpeed.
        engines: the DeepSpeed engines.
        failures: receives the write failures.
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
