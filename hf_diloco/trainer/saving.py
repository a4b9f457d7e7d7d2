"""Checkpoints that the Trainer writes: completing them, and handling write failures.

If a checkpoint cannot be written, because the disk is full or fails, logs it and removes the partial checkpoint;
training continues, and the next save retries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments, trainer as trainer_module

from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.arguments import folder_of
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from hf_diloco.trainer.write_failures import FSDP_STEPS, noting_in, replaced
from hf_diloco.utils.files import telling

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


class Saving:
    """The checkpoints of one training by the Trainer. Collective over the island's ranks.

    Turns off the Trainer's own deletion until training ends: the Trainer sorts checkpoints by time, and counts
    incomplete ones.

    Args:
        args: the Trainer's arguments.
        ranks: the island's ranks.
        record, find_whole, find_needed, check_alone: see `CheckpointFolder`.
        trainer: the Trainer whose write failures are handled; None if unknown.
        replacing: restores the Trainer's attributes when closed.
        begins_anew: see `CheckpointFolder`.
    """

    def __init__(
        self,
        args: TrainingArguments,
        ranks: IslandGroup,
        record: str,
        find_whole: Callable[[Path], Collection[Path]],
        trainer: Trainer | None,
        find_needed: Callable[[Path, Collection[Path]], Collection[Path]] | None,
        check_alone: Callable[[], object],
        replacing: ExitStack,
        begins_anew: bool = False,
    ) -> None:
        self._checkpoints = CheckpointFolder(
            folder_of(args), ranks, record, find_whole, find_needed, check_alone, args.should_save, begins_anew
        )
        self._trainer = trainer
        self._limit = max(args.save_total_limit or 0, 0)  # the Trainer takes 0 and less as none
        self._failure = ""  # why the Trainer's part of the current checkpoint failed
        replacing.enter_context(replaced(args, "save_total_limit", None))
        if trainer is not None:
            self._save = trainer._save_checkpoint
            replacing.enter_context(replaced(trainer, "_save_checkpoint", self._try_save))

    def complete(self, state: TrainerState, write: Callable[[Path], object]) -> bool:
        """Completes the checkpoint of this step after the Trainer has written its part.

        Args:
            state: the Trainer's state.
            write: see `CheckpointFolder.complete`.

        Returns:
            Whether the checkpoint is complete. If not, the failure has been logged.
        """
        best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
        checkpoint, failure = self._checkpoints.path(state.global_step), self._failure
        self._failure = ""
        return self._checkpoints.complete(checkpoint, write, self._limit, best, failure)

    def _try_save(self, *args: Any, **kwargs: Any) -> None:
        """Runs the Trainer's save. A rank that cannot write runs all other steps, so that no rank waits for it."""
        trainer = self._trainer
        assert trainer is not None

        def write(failures: list[str]) -> None:
            with noting_failures(trainer, failures):
                self._save(*args, **kwargs)

        checkpoint = self._checkpoints.path(trainer.state.global_step)
        self._failure = self._checkpoints.begin(checkpoint, write)


@contextmanager
def noting_failures(trainer: Trainer, failures: list[str]) -> Iterator[None]:
    """Appends write failures inside the block to `failures`; the Trainer continues as if writing had worked."""
    steps: list[tuple[Any, str]] = [(trainer, "_save")]
    if trainer.is_fsdp_enabled:
        steps += [(trainer_module, name) for name in FSDP_STEPS]
    with noting_in(steps, [trainer.model_wrapped] if trainer.is_deepspeed_enabled else [], failures):
        yield


def describe_model(model: Any, processing_class: Any, checkpoint: Path) -> None:
    """Writes the model's configuration and tokenizer into a checkpoint that lacks them.

    The Trainer writes both with unsharded models, but neither with FSDP's sharded checkpoints.

    Args:
        model: the module, whose parameters may be sharded. For models that are not from transformers, no
            configuration is written.
        processing_class: the tokenizer; None if the Trainer has none.
        checkpoint: the folder.

    Raises:
        CheckpointError: the files cannot be written.
    """
    if any((checkpoint / name).exists() for name in (_CONFIG, _ADAPTER_CONFIG)):
        return
    with telling(checkpoint):
        checkpoint.mkdir(parents=True, exist_ok=True)
        for adapter in getattr(model, "peft_config", {}).values():
            adapter.save_pretrained(str(checkpoint))
        if not hasattr(model, "peft_config") and hasattr(model, "config"):
            config = copy.deepcopy(model.config)
            config.architectures = [_class_name(model)]
            config.save_pretrained(str(checkpoint))
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(str(checkpoint))


def _class_name(model: nn.Module) -> str:
    """Returns the name of the model's class, skipping the FSDP class that `fully_shard` creates."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))
