"""Steps of a save that cannot write, because the disk is full or fails: noted, so that no rank waits for another."""

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
"""Functions of Accelerate that write; where they are called they are attributes of the module."""


def save_accelerator(
    accelerator: Accelerator, folder: Path, write: Callable[[Path], object] | None, failures: list[str]
) -> None:
    """As `accelerator.save_state`, but adds what cannot be written to `failures`. Collective over the ranks.

    Args:
        accelerator: of the loop.
        folder: the checkpoint.
        write: called in place of `accelerator.save_state`.
        failures: takes what cannot be written.
    """
    has_engines = accelerator.distributed_type == DistributedType.DEEPSPEED
    has_fsdp = accelerator.distributed_type == DistributedType.FSDP
    steps = [(accelerator_module, name) for name in FSDP_STEPS] if has_fsdp else []
    with noting_in(steps, accelerator._models if has_engines else [], failures):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder) if write else accelerator.save_state(str(folder))


@contextmanager
def noting_in(steps: Sequence[tuple[Any, str]], engines: Sequence[Any], failures: list[str]) -> Iterator[None]:
    """The steps in which one rank writes and others wait for it afterwards are met one by one; behind the last of them
    no rank waits, and any failure may end the rest.

    Args:
        steps: owner and name of each, beside those of DeepSpeed.
        engines: of DeepSpeed.
        failures: takes them.
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
    """DeepSpeed's `save_checkpoint`. The file `latest`, which rank 0 writes while others wait, comes after it."""
    type(engine).save_checkpoint(engine, folder, tag, save_latest=False, **kwargs)
    if engine.global_rank == 0:
        _noting(Path(folder, "latest").write_text, failures, tag or f"global_step{engine.global_steps}")


def _noting(call: Callable[..., Any], failures: list[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (Exception, CheckpointException) as error:
        _note(error, failures)


def _note(error: BaseException, failures: list[str]) -> None:
    if isinstance(error, CheckpointException):  # tells every rank what others met in a sharded checkpoint
        for met, _ in error.failures.values():
            _note(met, failures)
        return
    if not is_write_failure(error):
        raise error
    failures.append(reason_of(error))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute of one object, meanwhile."""
    before: Mapping[str, Any] = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in before:
            setattr(owner, name, before[name])
