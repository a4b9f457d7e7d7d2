"""The Trainer's limit of checkpoints, kept so that an older one goes only when the newest is whole."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_diloco.checkpoint import complete_checkpoints


class Retention:
    """Lets the Trainer keep more than `save_total_limit` while it trains, and deletes the rest itself.

    The Trainer deletes old checkpoints before `on_save`: until the outer state is written, one more stays. What a
    killed run left without its outer state must not take a whole checkpoint's place either.

    Args:
        args: the Trainer's; its limit is raised until `end`.
        folder: where checkpoints are written.
    """

    def __init__(self, args: TrainingArguments, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._limit = max(args.save_total_limit or 0, 0)  # the Trainer takes 0 and less as none
        if self._limit:
            num_all = len(list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")))
            args.save_total_limit = self._limit + 1 + num_all - len(complete_checkpoints(folder))

    def rotate(self, state: TrainerState) -> None:
        """Deletes what is beyond the limit, now that the newest checkpoint is whole."""
        if self._limit and self._args.should_save:
            rotate_checkpoints(
                output_dir=str(self._folder),
                save_total_limit=self._limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def end(self) -> None:
        """Puts the limit back."""
        if self._limit:
            self._args.save_total_limit = self._limit
