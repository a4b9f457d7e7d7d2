"""What the Trainer does not hand its callbacks: itself, their list, and the checkpoint that it resumes from.

Whoever calls a callback is the one way there. Where it is not found, the callback does without.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.trainer.arguments import folder_of

T = TypeVar("T")

logger = logging.getLogger("hf_diloco")


def move_before_trackers(callback: TrainerCallback) -> None:
    """Puts `callback`, which is being called, ahead of the reporting integrations in the Trainer's list.

    The Trainer calls these before a user's callbacks. Where its list is not found, trackers miss `diloco/*`; the
    island's own record does not.
    """
    handler = _find_caller(CallbackHandler)
    if handler is None or callback not in handler.callbacks:
        logger.warning("cannot reach the Trainer's list of callbacks: trackers will not see diloco/* metrics")
        return
    handler.callbacks.remove(callback)
    handler.callbacks.insert(1, callback)  # behind the DefaultFlowCallback, which decides what this step does


def find_trainer() -> Trainer | None:
    """The Trainer that calls a callback, asked from within; None if it is not found."""
    return _find_caller(Trainer)


def find_resumed(args: TrainingArguments, step: int) -> Path:
    """The checkpoint that the Trainer, which calls a callback, resumes from at `step`."""
    for caller in _callers():
        checkpoint = caller.get("resume_from_checkpoint")
        if isinstance(caller.get("self"), Trainer) and isinstance(checkpoint, str | Path):
            return Path(checkpoint)
    return folder_of(args) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _find_caller(kind: type[T]) -> T | None:
    """The nearest caller that is a method of an object of `kind`."""
    return next((caller["self"] for caller in _callers() if isinstance(caller.get("self"), kind)), None)


def _callers() -> Iterator[Mapping[str, Any]]:
    """The local variables of this module's functions and of all that called them, the nearest first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
