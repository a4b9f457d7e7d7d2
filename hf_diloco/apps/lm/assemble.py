"""Puts an island together: tokenizer, data, model, TrainingArguments, outer loop, Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hf_diloco.apps.common.arguments import check_evaluation, check_model, training_arguments
from hf_diloco.apps.common.environment import ENV_DEBUG
from hf_diloco.apps.common.training import (
    LONGEST_PREPARATION,
    Assembled,
    check_data,
    check_world,
    find_checkpoint,
    leader_first,
)
from hf_diloco.apps.data.build import Datasets, build_datasets
from hf_diloco.apps.data.packing import Masking
from hf_diloco.apps.data.stream import DataPositionCallback, PackedStream, read_position
from hf_diloco.apps.lm.model import build_model, find_source, sketch_model
from hf_diloco.apps.lm.plain import PlainCallback
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.lm.tokenizer import build_tokenizer, tokenizer_hash
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.inner.fsdp2 import is_fsdp2
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts
from hf_diloco.optimizers import callbacks_of, make_optimizer
from hf_diloco.trainer.arguments import examples_per_batch, examples_per_step
from hf_diloco.trainer.callback import DiLoCoCallback
from hf_diloco.trainer.progress import Progress, RunFilesCallback
from hf_diloco.utils.files import STOP_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

ZERO_INIT_FROM = 2_000_000_000  # parameters above which ZeRO-3 creates a new model in shards


Island: TypeAlias = Assembled[RunFile, "DiLoCoCallback | PlainCallback", Datasets]


def assemble(
    run: RunFile,
    config: DiLoCoConfig | None,
    progress: Progress,
    simulated: Callable[..., DiLoCoCallback] | None = None,
) -> Island:
    """Builds everything and connects to the other islands. Collective over the ranks of the island.

    For the arguments see `train_island`. Raises `DiLoCoError` if a setting does not work, or the other islands cannot
    be reached or train something else.
    """
    speaks = simulated is None or run.diloco.island == 0
    args = training_arguments(run, **({} if speaks else {"disable_tqdm": True}))
    check_world(args)
    _tame_deepspeed(args)
    ranks = IslandGroup(timeout=LONGEST_PREPARATION)
    progress.update(message="preparing the tokenizer")
    tokenizer = build_tokenizer(run, ranks)
    with _without_deepspeed(args):
        sketch = sketch_model(run, tokenizer)
    check_model(args, sketch)
    progress.update(message="preparing the data")
    with leader_first(ranks):  # the other ranks find the tokenised files in the cache of `datasets`
        data = build_datasets(run.data, tokenizer, run.diloco.island, run.diloco.num_shares)
    _check_data(run, args, data)
    progress.update(message="building the model")
    model = _model(run, args, tokenizer, sketch.num_parameters())
    stop_file = run.island_folder() / STOP_FILE
    callback: DiLoCoCallback | PlainCallback
    if config is None:
        callback = PlainCallback(run.diloco, run.data.sequence_length, stop_file)
    else:
        make, facts, given = simulated or DiLoCoCallback, facts_of(run, data, tokenizer), run.checkpoint_given()
        callback = make(config, fingerprint=facts, resume_from_checkpoint=given, stop_file=stop_file)
    progress.update(message="meeting the other islands" if run.diloco.num_islands > 1 else "starting")
    checkpoint = find_checkpoint(run, callback)
    check_data(run, checkpoint, data.train_hash, f"{run.diloco.island} of {run.diloco.num_shares}")
    trainer = _trainer(run, model, args, tokenizer, data, callback, checkpoint, progress)
    return Assembled(run, trainer, callback, data, checkpoint, speaks)


def _model(
    run: RunFile, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase, num_parameters: int
) -> PreTrainedModel:
    """Creates the model, unsharded up to `ZERO_INIT_FROM` parameters: all ZeRO stages then start from equal weights.

    Under ZeRO-3 transformers would create it in shards, with other random numbers than an unsharded model. Weights
    from files are loaded in shards, except GGUF files, which are converted as a whole.
    """
    is_read = run.model.path is not None and not find_source(run.model.path).options
    in_parts = is_read or (run.model.path is None and num_parameters > ZERO_INIT_FROM)
    with nullcontext() if in_parts else _without_deepspeed(args):
        return build_model(run.model, tokenizer, run.data.sequence_length, run.seed)


@contextmanager
def _without_deepspeed(args: TrainingArguments) -> Iterator[None]:
    """Makes transformers create unsharded models inside; it cannot create sharded ones on the device `meta`."""
    config = getattr(args, "hf_deepspeed_config", None)
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)


def _tame_deepspeed(args: TrainingArguments) -> None:
    """Limits DeepSpeed's logs, and on CPU stops it from compiling a shared-memory extension that is not needed."""
    if args.deepspeed is None:
        return
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.DEBUG if os.environ.get(ENV_DEBUG) else logging.WARNING)
    if args.use_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _check_data(run: RunFile, args: TrainingArguments, data: Datasets) -> None:
    check_evaluation(args, len(data.evaluation))
    if isinstance(data.train, PackedStream):
        return
    at_once = examples_per_batch(args)
    if len(data.train) < at_once:
        raise ConfigError(
            f"data: island {run.diloco.island}'s share has {len(data.train)} sequences of {run.data.sequence_length} "
            f"tokens, fewer than the {at_once} of one batch; use more text, fewer islands or a smaller batch"
        )


def facts_of(run: RunFile, data: Datasets, tokenizer: PreTrainedTokenizerBase) -> Facts:
    """Returns facts that must be equal on all islands, besides those that the callback compares."""
    return {
        "tokenizer": tokenizer_hash(tokenizer),
        "sequence_length": run.data.sequence_length,
        "data.shares": run.data.shares,  # otherwise shares overlap
        "evaluation_data": data.eval_hash,
        "seed": run.seed,
    }


def _trainer(
    run: RunFile,
    model: PreTrainedModel,
    args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: Datasets,
    callback: DiLoCoCallback | PlainCallback,
    checkpoint: Path | None,
    progress: Progress,
) -> Trainer:
    sync_every = run.diloco.sync_every if run.diloco.enabled else 0
    tokens = examples_per_step(args) * run.data.sequence_length
    files = RunFilesCallback(progress, lambda: callback.round, sync_every, tokens)
    optimizer = make_optimizer(run.optimizer, model, args)
    masking = None
    if run.model.objective == "masked":
        masking = Masking(tokenizer.mask_token_id, len(tokenizer), run.model.mask_share, run.seed)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        data_collator=masking,
        callbacks=[callback, files, *callbacks_of(run.optimizer, optimizer)],
        optimizers=(optimizer, None),
    )
    if masking is not None:
        # The loss of these models is the mean over their own batch. From their signature the Trainer infers that it is
        # divided by the tokens of all ranks and accumulated batches, and would multiply it.
        trainer.model_accepts_loss_kwargs = False
    if isinstance(data.train, PackedStream):
        _continue_stream(trainer, data.train, checkpoint)
    if run.deepspeed is not None or run.fsdp is not None:
        trainer.add_callback(_EngineCheck(trainer))
    return trainer


def _continue_stream(trainer: Trainer, stream: PackedStream, checkpoint: Path | None) -> None:
    """Starts the stream at the checkpoint's position; without one the Trainer reads and skips what was trained on."""
    position = read_position(checkpoint) if checkpoint else None
    restore = None
    if position is not None:
        stream.seek(position)
        trainer.args.ignore_data_skip = True
        restore = lambda: trainer._load_rng_state(str(checkpoint))  # noqa: E731
    trainer.add_callback(DataPositionCallback(stream, restore))


class _EngineCheck(TrainerCallback):
    """Checks that DeepSpeed or FSDP is really used if requested, and not plain DDP."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped = self._trainer.model_wrapped
        if args.fsdp:
            if not is_fsdp2(wrapped):
                raise UnsupportedError(f"fsdp is set, but the Trainer made a {type(wrapped).__name__}")
            return
        from deepspeed import DeepSpeedEngine

        if not isinstance(wrapped, DeepSpeedEngine):
            raise UnsupportedError(
                f"deepspeed is set, but the Trainer made a {type(wrapped).__name__}: is ACCELERATE_USE_CPU or another "
                "launcher's setting in the environment?"
            )
