"""Lets the Trainer resume with another number of ranks, and checks that what resumes matches its checkpoint."""

from __future__ import annotations

import logging
from functools import partial, wraps
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments, trainer as trainer_module

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.checkpoints import load_engine, saved_kind
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.outer.schedule import step_of
from hf_diloco.rounds.session import BaseSession
from hf_diloco.trainer.arguments import examples_per_step
from hf_diloco.trainer.saving import replaced
from hf_diloco.utils.lr_schedule import move_schedule, steps_taken

logger = logging.getLogger("hf_diloco")

_OTHER = ": some examples come twice in this epoch, others not at all, unless you set back "
_CHANGED = {
    "examples_per_step": "this island took {} examples a step, and takes {} now: set per_device_train_batch_size or "
    "gradient_accumulation_steps so that their product with the number of ranks stays the same",
    "seed": "the data was shuffled by seed {}, and is by seed {} now" + _OTHER + "seed (or data_seed)",
    "num_shares": "the data was shared by {} islands, and is by {} now" + _OTHER + "num_islands (or max_islands)",
}
"""Warnings about changed `data_facts`."""

_WORDS = {"ZeRO": "DeepSpeed", "FSDP2": "FSDP2", "plain": "plain training or DDP"}


_IS_PATCHED = "_hf_diloco_resumes_across_ranks"


def resume_across_ranks() -> None:
    """Patches transformers in this process: Trainers load DeepSpeed's checkpoints of any number of ranks.

    The Trainer loads before it calls a callback that `add_callback` gave it. DeepSpeed may be imported later.
    """
    module: Any = trainer_module
    original = module.deepspeed_load_checkpoint
    if hasattr(original, _IS_PATCHED):
        return

    @wraps(original)
    def load(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(engine, "load_checkpoint", partial(load_engine, engine)):
            return original(engine, *args, **kwargs)

    setattr(load, _IS_PATCHED, True)
    module.deepspeed_load_checkpoint = load


def data_facts(args: TrainingArguments, config: DiLoCoConfig) -> dict[str, int]:
    """Returns the settings of the Trainer and the outer loop on which a position in the data depends."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return {"examples_per_step": examples_per_step(args), "seed": seed, "num_shares": config.num_shares}


def refuse_fewer_steps(state: TrainerState) -> None:
    """Raises `ConfigError` if training resumes beyond its end: it would end with weights that are not of that step."""
    if state.global_step > state.max_steps:
        raise ConfigError(
            f"max_steps is {state.max_steps}, and the checkpoint to resume from is of step {state.global_step}: set "
            f"max_steps to {state.global_step} or more, resume from an earlier checkpoint, or begin a new run"
        )


def check_resumption(
    checkpoint: Path, shards: Shards, args: TrainingArguments, config: DiLoCoConfig, state: TrainerState
) -> None:
    """Refuses to resume without the inner optimizer's state; warns if the position in the data is no longer valid.

    Args:
        checkpoint: a checkpoint of the Trainer, with outer state.
        args: tell DeepSpeed's stage 0 from plain training, which has whole parameters, too.

    Raises:
        CheckpointError: the Trainer cannot load the optimizer's state, and would silently reset it; or it has resumed
            from another checkpoint, or from none.
        ConfigError: training is to end before the checkpoint's step.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} is not there: leave resume_from_checkpoint of DiLoCoCallback out, and call "
            "trainer.train(resume_from_checkpoint=FOLDER)"
        )
    saved = saved_kind(checkpoint)
    now = (
        "ZeRO" if args.deepspeed_plugin is not None else "FSDP2" if shards.description.startswith("FSDP2") else "plain"
    )
    if saved and saved != now:
        raise CheckpointError(
            f"{checkpoint} holds the optimizer's state of {_WORDS[saved]}, and here {shards.description} trains, "
            "which cannot read it: resume as it was saved, or start a new run from its parameters (hf-diloco "
            "checkpoint export)"
        )
    index = read_index(checkpoint)
    if index.global_step != state.global_step:
        raise CheckpointError(
            f"{checkpoint} holds the outer state of step {index.global_step}, and the Trainer is at step "
            f"{state.global_step}: call trainer.train(resume_from_checkpoint={str(checkpoint)!r}), or leave "
            "resume_from_checkpoint of DiLoCoCallback out"
        )
    refuse_fewer_steps(state)
    for name, value in data_facts(args, config).items() if state.is_world_process_zero else ():
        before = index.data.get(name, value)
        if before != value and not (name == "seed" and args.ignore_data_skip):  # the data order is then not resumed
            logger.warning("%s: %s", checkpoint, _CHANGED[name].format(before, value))


def follow_schedule(session: BaseSession, state: TrainerState, scheduler: Any) -> None:
    """Moves the learning-rate schedule of an island that has joined late, or rejoined, to the run's step."""
    step = min(step_of(session.config, session.outer.round), state.max_steps)
    taken = max(state.global_step, steps_taken(scheduler))  # more than global_step if the island had joined late
    if not session.has_common_end or step - taken < session.config.sync_every:
        return
    if move_schedule(scheduler, step):
        logger.info("the run is %d rounds old: using its learning rate of step %d", session.outer.round, step)
    else:
        logger.warning(
            "the run is %d rounds old, but %s cannot be advanced: the learning rate is that of step %d",
            session.outer.round,
            type(getattr(scheduler, "scheduler", scheduler)).__name__,
            state.global_step,
        )
