"""The trained model as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup

if TYPE_CHECKING:
    from transformers import Trainer

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
