"""Trains one rank of an island or node: chooses the checkpoint to resume from, trains, and saves the results.

The results are the model as a Hugging Face folder, with its card and on the Hub, and `summary.json`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch
from pydantic import ValidationError

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.environment import STOPPED, is_leader
from hf_diloco.apps.common.hub import publish
from hf_diloco.apps.common.model_card import Training, write_card
from hf_diloco.apps.common.process import say
from hf_diloco.errors import CheckpointError, ConfigError, UnsupportedError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.report.island import summarise_island
from hf_diloco.report.read import load_island
from hf_diloco.utils.files import DATA_FILE, SUMMARY_FILE, read_json, try_write_json
from hf_diloco.utils.threads import outlive_gloo

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from hf_diloco.apps.lm.plain import PlainCallback
    from hf_diloco.trainer.callback import DiLoCoCallback
    from hf_diloco.trainer.gossip_callback import GossipCallback
    from hf_diloco.trainer.progress import Progress

    AnyCallback: TypeAlias = DiLoCoCallback | GossipCallback | PlainCallback

logger = logging.getLogger("hf_diloco")

MODEL_FOLDER = "model"
LONGEST_PREPARATION = 24 * 3600.0  # seconds that ranks wait for their leader to prepare the data

R = TypeVar("R", bound=BaseRun, covariant=True)
C = TypeVar("C", bound="AnyCallback", covariant=True)
D = TypeVar("D", covariant=True)
A = TypeVar("A", bound="Assembled[Any, Any, Any]")


@dataclass(frozen=True)
class Assembled(Generic[R, C, D]):
    """Everything that one rank of an island or node trains with.

    Attributes:
        checkpoint: the checkpoint to resume from; None to start from scratch.
        speaks: whether it prints messages; in a simulation, only the first participant does.
    """

    run: R
    trainer: Trainer
    callback: C
    data: D
    checkpoint: Path | None
    speaks: bool


def check_world(args: TrainingArguments) -> None:
    """Raises `UnsupportedError` unless Accelerate sees as many ranks as the launcher started."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != launched:
        raise UnsupportedError(
            f"the launcher started {launched} ranks but accelerate sees {args.world_size}: start the island with "
            "torchrun, deepspeed, or accelerate launch without --cpu"
        )
    if torch.distributed.is_initialized():
        outlive_gloo()


@contextmanager
def leader_first(ranks: IslandGroup) -> Iterator[None]:
    """Runs the block on the leader first, then on the other ranks, which wait up to the group's timeout."""
    if not ranks.is_leader:
        ranks.barrier()
    yield
    if ranks.is_leader:
        ranks.barrier()


def find_checkpoint(run: BaseRun, callback: AnyCallback) -> Path | None:
    """Returns the checkpoint to resume from, by `launch.resume`; None to start from scratch."""
    if run.launch.resume == "auto":
        return callback.common_checkpoint(run.island_folder())
    if checkpoint := run.checkpoint_given():
        callback.check_checkpoint(checkpoint)
    return checkpoint


def check_data(run: BaseRun, checkpoint: Path | None, data_hash: str, share: str = "") -> None:
    """Refuses to resume in other training data than the checkpoint's; records the data of a new run.

    Settings alone do not show that a file was replaced or edited. Raises `ConfigError` if the data have changed.

    Args:
        run: the run file.
        checkpoint: the checkpoint to resume from; None to start from scratch.
        data_hash: hash of the training data; "" if unknown.
        share: which share of the data the hash is of: hashes of different shares are not compared.
    """
    file = (checkpoint.parent if checkpoint else run.island_folder()) / DATA_FILE
    saved = read_json(file) if checkpoint else {}
    if data_hash and saved.get("share") == share and saved.get("hash") != data_hash:
        raise ConfigError(
            f"data: the training data have changed under the same name since the run in {file.parent} began: training "
            "would go on at its position in other data, see some examples twice and others never; restore them, or "
            "begin a new run under another name. To train its model on these data, begin that run with it as "
            f"model.path (docs/checkpoints.md, On other data). To go on all the same, delete {file}"
        )
    problem = ""
    if is_leader():
        problem = try_write_json(run.island_folder() / DATA_FILE, {"share": share, "hash": data_hash})
    if problem:
        logger.warning("%s: a resumed run cannot notice that its training data have changed", problem)


def train_on(
    assembled: A, progress: Progress, print_plan: Callable[[A], object], finish: Callable[[A, Progress], object]
) -> int:
    """Trains from `assembled.checkpoint`; returns the exit code.

    Calls `print_plan` before if `assembled.speaks`, and `finish` when training is complete, but not after a stop on
    request.

    Raises:
        CheckpointError: the checkpoint's weights do not fit the model.
        ConfigError: DeepSpeed refuses its configuration.
    """
    from transformers import PrinterCallback

    run, trainer, checkpoint = assembled.run, assembled.trainer, assembled.checkpoint
    if not assembled.speaks:
        trainer.remove_callback(PrinterCallback)  # which would print its logs
    else:
        print_plan(assembled)
        if checkpoint and checkpoint.name == f"checkpoint-{trainer.args.max_steps}":
            say(
                f"the run has ended: {checkpoint} is of its last step. For a new run give another --name; to train "
                "on, a greater training.max_steps"
            )
    try:
        with loading(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except ValidationError as error:  # raised by DeepSpeed for its configuration
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


@contextmanager
def loading(checkpoint: Path | None) -> Iterator[None]:
    """Raises `CheckpointError` if a Trainer inside loads a checkpoint whose weights do not fit the model."""
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


def save_final_model(trainer: Trainer, folder: Path) -> Path:
    """Writes the model and its tokenizer to `folder`/model, completely before it replaces an older one; returns that.

    Collective over the ranks. Raises `CheckpointError` on every rank if one cannot write. If restarted, the run
    finishes from its last checkpoint.
    """
    from hf_diloco.trainer.saving import noting_failures

    ranks, failures = IslandGroup(), list[str]()
    final, temporary, old = (folder / name for name in (MODEL_FOLDER, f".{MODEL_FOLDER}.tmp", f".{MODEL_FOLDER}.old"))
    if trainer.is_world_process_zero():
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_fsdp_enabled:  # with sharded checkpoints it would write no model
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with noting_failures(trainer, failures):
        trainer.save_model(str(temporary))
    if met := [failure for of_rank in ranks.gather(failures[:1]) for failure in of_rank]:
        if trainer.is_world_process_zero():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final} cannot be written ({met[0]}): make room, and run the same command again; it goes on from the "
            "last checkpoint, if there is one"
        )
    if trainer.is_world_process_zero():
        (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json has the same settings
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    return final


def record_end(
    run: BaseRun,
    evaluation: Mapping[str, float],
    more: Mapping[str, Any],
    training: Training,
    progress: Progress,
) -> dict[str, Any]:
    """Writes `summary.json` of this island or node, from its record and the last evaluation; returns it.

    Island or node 0 also writes the model card, and pushes the model to the Hub if `push_to_hub` is set. `more` are
    entries of this task only, `training` facts for the card that the record does not have.
    """
    number = run.meeting.island
    figures = summarise_island(load_island(run.island_folder(), number))
    summary = {
        "island": number,
        "step": figures.steps,
        "eval_loss": evaluation["eval_loss"],
        "bytes_sent": figures.bytes_sent,
        "bytes_received": figures.bytes_received,
        "seconds": sum(figures.seconds.parts().values()) if figures.seconds else None,
        "seconds_exchanging": figures.seconds.exchanging if figures.seconds else None,
        **more,
    }
    if figures.noun == "island":
        summary["num_tokens"], summary["tokens_per_second"] = figures.num_tokens, figures.tokens_per_second
        summary["rounds"] = figures.num_rounds
        summary["seconds_waiting"] = figures.seconds.waiting if figures.seconds else None
    if problem := try_write_json(run.island_folder() / SUMMARY_FILE, summary):
        logger.warning("%s: `hf-diloco report` computes the same from metrics.jsonl", problem)
    if number == 0:
        write_card(run.folder / MODEL_FOLDER, run.folder, training)
        if run.push_to_hub is not None:
            progress.update(message="pushing the model to the Hub")
            publish(run.folder / MODEL_FOLDER, run.push_to_hub)
    return summary
