"""What a checkpoint must have in common with the training that resumes from it, and what it had better have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.checkpoints import SavedKind, saved_kind
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.outer.schedule import step_of
from hf_diloco.rounds.session import BaseSession
from hf_diloco.utils.lr_schedule import move_schedule

logger = logging.getLogger("hf_diloco")

EXAMPLES = "examples_per_step"
"""In a checkpoint's `data`: examples of this island in an optimizer step."""


_WORDS = {"ZeRO": "DeepSpeed", "FSDP2": "FSDP2", "plain": "plain training or DDP"}


def check_resumption(checkpoint: Path, shards: Shards, uses_deepspeed: bool, examples: int, is_leader: bool) -> None:
    """Refuses to go on without the inner optimizer's state; warns if the island's batch is another now.

    Args:
        checkpoint: of the Trainer, with outer state.
        shards: how the island trains now.
        uses_deepspeed: whether DeepSpeed does, whose stage 0 has whole parameters as plain training has.
        examples: of the island in an optimizer step now.
        is_leader: this rank warns.

    Raises:
        CheckpointError: the Trainer has not found the optimizer's state, and would begin it anew without a word.
    """
    saved = saved_kind(checkpoint)
    if saved and saved != ("ZeRO" if uses_deepspeed else _kind_of(shards)):
        raise CheckpointError(
            f"{checkpoint} holds the optimizer's state of {_WORDS[saved]}, and here {shards.description} trains, "
            "which cannot read it: resume as it was saved, or start a new run from its parameters (hf-diloco "
            "checkpoint export)"
        )
    before = read_index(checkpoint).data.get(EXAMPLES)
    if is_leader and before not in (None, examples):
        logger.warning(
            "%s: this island took %d examples a step, and takes %d now: set per_device_train_batch_size or "
            "gradient_accumulation_steps so that their product with the number of ranks stays the same",
            checkpoint,
            before,
            examples,
        )


def follow_schedule(session: BaseSession, state: TrainerState, scheduler: Any) -> None:
    """Gives an island that joins, or comes back, the learning rate of the run, not of its own first steps.

    Args:
        session: joined.
        state: the Trainer's.
        scheduler: of the learning rate.
    """
    step = min(step_of(session.config, session.outer.round), state.max_steps)
    if not session.has_common_end or step - state.global_step < session.config.sync_every:
        return
    if move_schedule(scheduler, step):
        logger.info("the run is %d rounds old: its learning rate of step %d is taken", session.outer.round, step)
    else:
        logger.warning(
            "the run is %d rounds old, but %s cannot be moved on: the learning rate is that of step %d",
            session.outer.round,
            type(getattr(scheduler, "scheduler", scheduler)).__name__,
            state.global_step,
        )


def _kind_of(shards: Shards) -> SavedKind:
    return "FSDP2" if shards.description.startswith("FSDP2") else "plain"
