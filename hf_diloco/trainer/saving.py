"""Checkpoints that the Trainer or an Accelerator writes: what they hold, and those that cannot be written.

One that cannot be written, because the disk is full or fails, is told and removed; training goes on, and the next save
tries again.
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

    Until it ends the Trainer deletes none itself: it ranks them by the clock, and counts those that are not whole.

    Args:
        args: the Trainer's.
        ranks: of the island.
        record, find_whole, find_needed: see `CheckpointFolder`.
        trainer: whose failures to write are met; None where it is not known.
        replacing: what its end gives back to the Trainer.
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
        replacing: ExitStack,
        begins_anew: bool = False,
    ) -> None:
        self._checkpoints = CheckpointFolder(
            folder_of(args), ranks, record, find_whole, find_needed, args.should_save, begins_anew
        )
        self._trainer = trainer
        self._limit = max(args.save_total_limit or 0, 0)  # the Trainer takes 0 and less as none
        self._has_failed = False  # the Trainer's part of the checkpoint under way
        replacing.enter_context(replaced(args, "save_total_limit", None))
        if trainer is not None:
            self._save = trainer._save_checkpoint
            replacing.enter_context(replaced(trainer, "_save_checkpoint", self._try_save))

    def complete(self, state: TrainerState, write: Callable[[Path], object]) -> bool:
        """Makes the checkpoint of this step whole, now that the Trainer has written its part.

        Args:
            state: the Trainer's.
            write: see `CheckpointFolder.complete`.

        Returns:
            Whether it is whole. If not, that has been said.
        """
        if self._has_failed:
            self._has_failed = False
            return False
        best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
        return self._checkpoints.complete(self._checkpoints.path(state.global_step), write, self._limit, best)

    def _try_save(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's own way to save. A rank that cannot write does all else, so that none waits for it."""
        trainer = self._trainer
        assert trainer is not None

        def write(failures: list[str]) -> None:
            with noting_failures(trainer, failures):
                self._save(*args, **kwargs)

        checkpoint = self._checkpoints.path(trainer.state.global_step)
        self._has_failed = not self._checkpoints.begin(checkpoint, write)


@contextmanager
def noting_failures(trainer: Trainer, failures: list[str]) -> Iterator[None]:
    """Adds what cannot be written to `failures`, and has the Trainer go on as if it had been."""
    steps: list[tuple[Any, str]] = [(trainer, "_save")]
    if trainer.is_fsdp_enabled:
        steps += [(trainer_module, name) for name in FSDP_STEPS]
    with noting_in(steps, [trainer.model_wrapped] if trainer.is_deepspeed_enabled else [], failures):
        yield


def describe_model(model: Any, processing_class: Any, checkpoint: Path) -> None:
    """Writes configuration and tokenizer of the model that trains into a checkpoint, if it lacks them.

    The Trainer writes both with whole models; with sharded checkpoints of FSDP it writes neither.

    Args:
        model: the module, also one whose parameters are sharded; of another library than transformers nothing is
            written.
        processing_class: the tokenizer; None if the Trainer has none.
        checkpoint: the folder.

    Raises:
        CheckpointError: it cannot be written.
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
    """The name of the model's class, without the FSDP that `fully_shard` puts before it."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))
