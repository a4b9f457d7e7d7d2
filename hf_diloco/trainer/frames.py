"""Finds what the Trainer does not pass to its callbacks: itself, the callback list, and the resumed checkpoint.

The only way is to inspect the callers' stack frames. If they are not found there, the callback does without.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.trainer.arguments import folder_of

T = TypeVar("T")

logger = logging.getLogger("hf_diloco")


def move_before_trackers(callback: TrainerCallback, is_last: bool = False) -> None:
    """Moves `callback`, which is being called, ahead of the reporting integrations in the Trainer's list.

    The Trainer calls those before a user's callbacks. If its list is not found, trackers miss `diloco/*`; the island's
    own record does not.

    Args:
        is_last: whether it stays behind this package's other callbacks, whose files are part of what it completes.
    """
    handler = _find_caller(CallbackHandler)
    if handler is None or callback not in handler.callbacks:
        logger.warning("cannot reach the Trainer's list of callbacks: trackers will not see diloco/* metrics")
        return
    callbacks = handler.callbacks
    place = 0 if _is_own(callbacks[0]) else 1  # after DefaultFlowCallback, which decides when to log, evaluate, save
    if is_last:
        place += len(list(takewhile(_is_own, callbacks[place:])))
    present = callbacks.index(callback)
    if place < present:  # moved back, it would be called twice: the Trainer is iterating over the list
        callbacks.insert(place, callbacks.pop(present))


def _is_own(callback: TrainerCallback) -> bool:
    """Whether a callback is of this package, or a user's subclass of one."""
    return any(kind.__module__.startswith("hf_diloco.") for kind in type(callback).__mro__)


def find_trainer() -> Trainer | None:
    """Returns the Trainer that is calling the present callback; None if not found."""
    return _find_caller(Trainer)


def find_resumed(args: TrainingArguments, step: int) -> Path:
    """Returns the checkpoint from which the Trainer that is calling the present callback resumes at `step`."""
    for caller in _callers():
        checkpoint = caller.get("resume_from_checkpoint")
        if isinstance(caller.get("self"), Trainer) and isinstance(checkpoint, str | Path):
            return Path(checkpoint)
    return folder_of(args) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _find_caller(kind: type[T]) -> T | None:
    """Returns the `self` of the nearest caller that is a method of a `kind` object."""
    return next((caller["self"] for caller in _callers() if isinstance(caller.get("self"), kind)), None)


def _callers() -> Iterator[Mapping[str, Any]]:
    """Yields the local variables of all frames on the stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
