"""What one rank of an island, or node, trains with; and its training, from the plan to the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.process import STOPPED, say
from hf_diloco.apps.common.resume import loading, step_of
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_diloco.apps.common.resume import AnyCallback
    from hf_diloco.trainer.progress import Progress

R = TypeVar("R", bound=BaseRun, covariant=True)
C = TypeVar("C", bound="AnyCallback", covariant=True)
D = TypeVar("D", covariant=True)
A = TypeVar("A", bound="Assembled[Any, Any, Any]")


@dataclass(frozen=True)
class Assembled(Generic[R, C, D]):
    """Everything that one rank of an island, or node, trains with.

    Attributes:
        checkpoint: where training goes on from; None: from the beginning.
        speaks: whether it says what it does; of those in one process only the first.
    """

    run: R
    trainer: Trainer
    callback: C
    data: D
    checkpoint: Path | None
    speaks: bool


def train_on(
    assembled: A, progress: Progress, print_plan: Callable[[A], object], finish: Callable[[A, Progress], object]
) -> int:
    """Trains from where `find_checkpoint` says; returns the exit code.

    Args:
        print_plan: says what is about to happen, where `assembled` speaks.
        finish: called when training has come to its end, and not to a stop on request.

    Raises:
        CheckpointError: the checkpoint's weights do not fit the model.
        ConfigError: DeepSpeed refuses its configuration.
    """
    run, trainer, checkpoint = assembled.run, assembled.trainer, assembled.checkpoint
    if assembled.speaks:
        print_plan(assembled)
        if checkpoint is not None and step_of(checkpoint) >= trainer.args.max_steps:
            say(
                f"the run has ended: {checkpoint} is of its last step. For a new run give another --name; to train "
                "on, a greater training.max_steps"
            )
    try:
        with loading(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except ValidationError as error:  # by which DeepSpeed refuses its configuration
        raise ConfigError(f"deepspeed: {error}") from error
    if not assembled.callback.stopped:
        finish(assembled, progress)
        return 0
    step, folder = trainer.state.global_step, run.island_folder()
    end = f"; checkpoint-{step} is in {folder}"
    if not (folder / f"checkpoint-{step}").is_dir():
        end = f", but its checkpoint could not be written; earlier ones are in {folder}"
    if assembled.speaks:
        say(f"stopped at step {step} as asked{end}")
    progress.update(state="done", message=f"stopped on request at step {step}")
    return STOPPED
