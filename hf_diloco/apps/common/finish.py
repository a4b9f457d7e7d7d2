"""The end of a run: the trained model as a Hugging Face folder, with its card and on the Hub, and `summary.json`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.apps.common.hub import publish
from hf_diloco.apps.common.model_card import Training, write_card
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.report.island import IslandReport, summarise_island
from hf_diloco.report.read import load_run
from hf_diloco.utils.files import SUMMARY_FILE, try_write_json

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_diloco.apps.common.base import BaseRun
    from hf_diloco.trainer.progress import Progress

logger = logging.getLogger("hf_diloco")

MODEL_FOLDER = "model"


def save_final_model(trainer: Trainer, folder: Path) -> Path:
    """Writes the model and its tokenizer to `folder`/model, whole before an older one goes. Collective over the ranks.

    Returns:
        The folder, which `AutoModelForCausalLM.from_pretrained` loads.

    Raises:
        CheckpointError: it cannot be written; on every rank. Started again, the run ends from its last checkpoint.
    """
    from hf_diloco.trainer.saving import noting_failures

    ranks, failures = IslandGroup(), list[str]()
    final, temporary, old = (folder / name for name in (MODEL_FOLDER, f".{MODEL_FOLDER}.tmp", f".{MODEL_FOLDER}.old"))
    if trainer.is_world_process_zero():
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_fsdp_enabled:  # else it writes nothing where checkpoints are of a part a rank
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with noting_failures(trainer, failures):
        trainer.save_model(str(temporary))
    if met := [failure for of_rank in ranks.gather(failures[:1]) for failure in of_rank]:
        if trainer.is_world_process_zero():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final} cannot be written ({met[0]}): make room, and run the same command again; it goes on from the "
            "last checkpoint"
        )
    if trainer.is_world_process_zero():
        (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json says the same
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    return final


def write_card_and_publish(run: BaseRun, training: Training, progress: Progress) -> None:
    """Writes the card of the model that `save_final_model` wrote; pushes both to the Hub where the run asks for it."""
    folder = run.folder / MODEL_FOLDER
    write_card(folder, run.folder, training)
    if run.push_to_hub is not None:
        progress.update(message="pushing the model to the Hub")
        publish(folder, run.push_to_hub)


def write_summary(
    run: BaseRun, evaluation: Mapping[str, float], more: Callable[[IslandReport], Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes `summary.json` of this island, or node, from its record and the last evaluation; returns it.

    `more` says what only runs of this task have, by the island's figures.
    """
    number = run.meeting.island
    record = next(island for island in load_run(run.folder).islands if island.island == number)
    figures = summarise_island(record)
    summary = {
        "island": number,
        "step": figures.steps,
        "eval_loss": evaluation["eval_loss"],
        "bytes_sent": figures.bytes_sent,
        "bytes_received": figures.bytes_received,
        "seconds": sum(figures.seconds.parts().values()) if figures.seconds else None,
        "seconds_exchanging": figures.seconds.exchanging if figures.seconds else None,
        **more(figures),
    }
    if problem := try_write_json(run.island_folder() / SUMMARY_FILE, summary):
        logger.warning("%s: `hf-diloco report` computes the same from metrics.jsonl", problem)
    return summary
