"""Saves where a data stream stands with every checkpoint of the Trainer, and goes on from there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.apps.data.stream import PackedStream, Position
from hf_diloco.errors import CheckpointError
from hf_diloco.trainer.frames import move_before_trackers
from hf_diloco.utils.files import write_whole

logger = logging.getLogger("hf_diloco")

FILE_NAME = "data_position.json"


class DataPositionCallback(TrainerCallback):
    """Keeps `checkpoint-N/data_position.json`, so that resuming need not read a stream from its beginning.

    Resume with `stream.seek(read_position(checkpoint))` and `TrainingArguments(ignore_data_skip=True)`.

    Args:
        stream: the training data; rank 0 of the island reads it for all its ranks.
        restore_random_state: called once before the first step after resuming with `ignore_data_skip`: there the
            Trainer restores its random state before it makes the data loader, which draws a number.
    """

    def __init__(self, stream: PackedStream, restore_random_state: Callable[[], None] | None = None) -> None:
        self.stream = stream
        self._restore_random_state = restore_random_state
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the step at which the stream begins, before the callback that records a checkpoint's contents."""
        self._first_step = state.global_step
        move_before_trackers(self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes dropout draw what it would have drawn without the interruption."""
        if self._restore_random_state is not None:
            self._restore_random_state()
            self._restore_random_state = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forgets positions of blocks that have been trained on."""
        state.epoch = state.global_step / state.max_steps  # the Trainer counts from 0 again when it resumes a stream
        if args.process_index == 0:
            self._position(args, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the position of the first block that this checkpoint has not seen."""
        checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.process_index == 0 and checkpoint.is_dir():  # if not, the Trainer could not write it
            try:
                write_position(checkpoint, self._position(args, state))
            except OSError as error:
                logger.warning(
                    "%s cannot be written (%s): resumed from this checkpoint, the stream is read from its beginning",
                    checkpoint / FILE_NAME,
                    error.strerror,
                )

    def _position(self, args: TrainingArguments, state: TrainerState) -> Position:
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return self.stream.position(self.stream.start.num_blocks + (state.global_step - self._first_step) * per_step)


def write_position(checkpoint: Path, position: Position) -> None:
    """Writes the position into a checkpoint folder, whole or not at all."""
    write_whole(checkpoint / FILE_NAME, json.dumps(position._asdict()))


def read_position(checkpoint: Path) -> Position | None:
    """The position in a checkpoint folder; None if it holds none.

    Raises:
        CheckpointError: when the file is damaged.
    """
    path = checkpoint / FILE_NAME
    if not path.exists():
        return None
    try:
        return Position(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it to resume by reading the data again") from None
