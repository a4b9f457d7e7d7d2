"""Where training goes on from, and what the ranks of an island agree on before it does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.errors import CheckpointError, UnsupportedError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.utils.threads import outlive_gloo

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_diloco.apps.lm.plain import PlainCallback
    from hf_diloco.trainer.callback import DiLoCoCallback
    from hf_diloco.trainer.gossip_callback import GossipCallback

    AnyCallback: TypeAlias = DiLoCoCallback | GossipCallback | PlainCallback


def find_checkpoint(run: BaseRun, callback: AnyCallback) -> Path | None:
    """Where training goes on from, as `launch.resume` says; None: from the beginning."""
    if run.launch.resume == "auto":
        return callback.common_checkpoint(run.island_folder())
    if checkpoint := run.checkpoint_given():
        callback.check_checkpoint(checkpoint)
    return checkpoint


@contextmanager
def loading(checkpoint: Path | None) -> Iterator[None]:
    """Where a Trainer loads the checkpoint, and trains on.

    Raises:
        CheckpointError: the checkpoint's weights do not fit the model.
    """
    try:
        yield
    except RuntimeError as error:
        if checkpoint is None or "loading state_dict" not in str(error):
            raise
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise CheckpointError(
            f"{checkpoint} is of another model than the run file's ({reason}): give another name for a new run, or "
            "delete the checkpoints of this one on all islands"
        ) from error


def step_of(checkpoint: Path) -> int:
    """Optimizer steps before a checkpoint of a Trainer."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return int(state["global_step"])


def check_world(args: TrainingArguments) -> None:
    """Raises `UnsupportedError` unless the launcher's idea of the island is accelerate's."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != launched:
        raise UnsupportedError(
            f"the launcher started {launched} ranks but accelerate sees {args.world_size}: start the island with "
            "torchrun, deepspeed, or accelerate launch without --cpu"
        )
    if torch.distributed.is_initialized():
        outlive_gloo()


LONGEST_PREPARATION = 24 * 3600.0
"""Seconds that ranks wait for their leader to prepare the data."""


@contextmanager
def leader_first(ranks: IslandGroup) -> Iterator[None]:
    """Lets the other ranks begin when the leader has ended, which may take as long as the group waits."""
    if not ranks.is_leader:
        ranks.barrier()
    yield
    if ranks.is_leader:
        ranks.barrier()
