"""`diloco: {enabled: false}`: the plain Trainer, with the record and the clean stop of other runs."""

from __future__ import annotations

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_diloco.apps.lm.runfile import DiLoCoBlock
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.manifest import (
    FILES_RECORD,
    FileRecord,
    check_contents,
    check_sizes,
    first_sound,
    record_files,
    recover_replaced,
)
from hf_diloco.trainer.arguments import examples_per_step, folder_of
from hf_diloco.trainer.base import RunCallback
from hf_diloco.trainer.frames import find_trainer
from hf_diloco.trainer.record import Record
from hf_diloco.trainer.resuming import refuse_fewer_steps
from hf_diloco.utils.files import read_json, telling, write_whole


class PlainCallback(RunCallback[Record]):
    """Writes `metrics.jsonl` for a Trainer, and stops it with a checkpoint on request. Does not change its results.

    The existence of `stop_file` requests the stop; the other arguments are for the record.
    """

    has_outer_loop = False
    round = 0

    def __init__(self, config: DiLoCoBlock, tokens_per_example: int, stop_file: Path) -> None:
        super().__init__(stop_file)
        self._config = config
        self._tokens_per_example = tokens_per_example
        self._began = time.monotonic()

    @cached_property
    def _ranks(self) -> IslandGroup:
        return IslandGroup()

    def common_checkpoint(self, output_dir: str | Path) -> Path | None:
        """Returns the newest checkpoint; there are no other islands to agree with."""

        def look() -> list[str]:
            folder = Path(output_dir)
            recover_replaced(folder, _find_whole)
            return [str(path) for path in _find_whole(folder)]

        found = [Path(path) for path in self._ranks.on_leader(look)]
        return first_sound(found[::-1], _read_files, self._ranks)

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """Raises `CheckpointError` if a file of the checkpoint is missing or corrupt; the message names it."""
        check_contents(Path(checkpoint), _read_files, self._ranks)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        refuse_fewer_steps(state)
        self._began = time.monotonic()
        self._begin(args, self._ranks, find_trainer(), FILES_RECORD, _find_whole)
        examples = examples_per_step(args)
        trained = [one for one in kwargs["model"].parameters() if one.requires_grad]
        self._record = Record(folder_of(args) if state.is_world_process_zero else None)
        self._record.write(
            "start",
            state.global_step,
            island=self._config.island,
            num_islands=1,
            num_ranks=args.world_size,
            shards="no outer loop",
            has_outer_loop=False,
            # under ZeRO-3 the parameter itself is empty
            num_parameters=sum(int(getattr(one, "ds_numel", one.numel())) for one in trained),
            max_steps=state.max_steps,
            examples_per_step=examples,
            tokens_per_step=examples * self._tokens_per_example,
            resumed=state.global_step > 0,
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._stop.agreed():
            self.stopped = True
            self._end_early(control)

    def _complete(self, checkpoint: Path, state: TrainerState) -> None:
        files = [file.model_dump() for file in record_files(checkpoint, self._ranks, FILES_RECORD)]

        def write() -> None:
            with telling(checkpoint):
                write_whole(checkpoint / FILES_RECORD, json.dumps(files, indent=1))

        self._ranks.on_leader(write)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Writes the `end` event; the evaluation afterwards is still recorded."""
        self._end()
        seconds = time.monotonic() - self._began
        traffic = {"seconds_waiting": 0.0, "seconds_exchanging": 0.0, "bytes_sent": 0, "bytes_received": 0}
        self._need_record().write(
            "end", state.global_step, seconds_total=seconds, seconds_computing=seconds, rounds=0, **traffic
        )


# Complete checkpoints: those with a list of their files, which is written last


def _read_files(checkpoint: Path) -> list[FileRecord]:
    """Returns the files that a checkpoint lists; none if a Trainer without this callback wrote it."""
    path = checkpoint / FILES_RECORD
    try:
        return [FileRecord(**file) for file in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an earlier checkpoint") from None


def _find_whole(folder: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first. If none lists its files, those that the Trainer finished."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    numbered.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    finished = [path for path in numbered if read_json(path / "trainer_state.json")]
    return [path for path in numbered if _is_listed(path)] or finished


def _is_listed(checkpoint: Path) -> bool:
    try:
        files = _read_files(checkpoint)
        check_sizes(checkpoint, files)
    except CheckpointError:
        return False
    return bool(files)
