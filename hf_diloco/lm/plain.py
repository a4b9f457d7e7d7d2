"""`diloco: {enabled: false}`: the plain Trainer, with the record and the clean stop that other runs have."""

from __future__ import annotations

import inspect
import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.errors import CheckpointError
from hf_diloco.files import telling, write_whole
from hf_diloco.island import IslandGroup
from hf_diloco.lm.runfile import DiLoCoBlock
from hf_diloco.manifest import FileRecord, find_damage, first_sound, lacks_files, record_files, recover_replaced
from hf_diloco.metrics import MetricsWriter
from hf_diloco.saving import Saving
from hf_diloco.stop import StopFlag
from hf_diloco.trainer_arguments import floats, is_of_training
from hf_diloco.trainer_frames import find_trainer

_FILES = "files.json"


class PlainCallback(TrainerCallback):
    """Watches a Trainer without touching what it computes: `metrics.jsonl`, and an end with a checkpoint on request.

    Args:
        config: this island's number and the number of islands, for the record.
        tokens_per_example: for the record.
        stop_file: its existence asks for the end.

    Attributes:
        round: always 0.
        stopped: training ended early because it was asked to.
    """

    round = 0

    def __init__(self, config: DiLoCoBlock, tokens_per_example: int, stop_file: Path) -> None:
        self._config = config
        self._tokens_per_example = tokens_per_example
        self._stop = StopFlag(stop_file)
        self._writer: MetricsWriter | None = None
        self._begin = time.monotonic()
        self._saving: Saving | None = None
        self.moved_at_end = False
        self.stopped = False

    @cached_property
    def _ranks(self) -> IslandGroup:
        return IslandGroup()

    def common_checkpoint(self, output_dir: str | Path) -> Path | None:
        """The newest checkpoint; there are no other islands to agree with."""

        def look() -> list[str]:
            folder = Path(output_dir)
            recover_replaced(folder, _find_whole)
            return [str(path) for path in _find_whole(folder)]

        found = [Path(path) for path in self._ranks.on_leader(look)]
        return first_sound(found[::-1], _read_files, self._ranks)

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """Raises `CheckpointError`, which names it, if a file does not hold what was written to it."""
        files = self._ranks.on_all(lambda: _read_files(Path(checkpoint)))
        if damage := find_damage(Path(checkpoint), files, self._ranks):
            raise CheckpointError(f"{damage}: resume from an earlier checkpoint")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins the record."""
        self._begin = time.monotonic()
        self._stop.install(self._ranks, during=Trainer.train)
        frame = inspect.currentframe()
        self._saving = Saving(args, self._ranks, _find_whole, find_trainer(frame.f_back if frame else None))
        if not state.is_world_process_zero:
            return
        examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._writer = MetricsWriter(Path(str(args.output_dir)) / "metrics.jsonl")
        self._writer.write(
            "start",
            state.global_step,
            island=self._config.island,
            num_islands=1,
            num_ranks=args.world_size,
            shards="no outer loop",
            has_outer_loop=False,
            num_parameters=sum(
                _numel(parameter) for parameter in kwargs["model"].parameters() if parameter.requires_grad
            ),
            max_steps=state.max_steps,
            examples_per_step=examples,
            tokens_per_step=examples * self._tokens_per_example,
            resumed=state.global_step > 0,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends training when asked to."""
        if self._stop.agreed():
            self.stopped = True
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Records losses."""
        logs = kwargs.get("logs") or {}
        if self._writer and is_of_training(logs):
            self._writer.write("train", state.global_step, **floats(logs))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records evaluations, of the island's own weights: there are no others."""
        metrics = kwargs.get("metrics") or {}
        if self._writer and "eval_loss" in metrics:
            self._writer.write("eval", state.global_step, weights="inner", **floats(metrics))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Marks the checkpoint as whole."""
        assert self._saving is not None, "on_train_begin has not run"
        self._saving.complete(state, lambda checkpoint: _write_files(checkpoint, self._ranks))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the record of training; the evaluation after it is still recorded."""
        self._stop.uninstall()
        if self._saving:
            self._saving.end()
        if self._writer:
            seconds = time.monotonic() - self._begin
            traffic = {"seconds_waiting": 0.0, "seconds_exchanging": 0.0, "bytes_sent": 0, "bytes_received": 0}
            self._writer.write(
                "end", state.global_step, seconds_total=seconds, seconds_computing=seconds, rounds=0, **traffic
            )


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # under ZeRO-3 the parameter itself is empty


# Which checkpoints are whole: those that list their files, the list written last


def _write_files(checkpoint: Path, ranks: IslandGroup) -> None:
    files = [file.model_dump() for file in record_files(checkpoint, ranks, [_FILES])]

    def write() -> None:
        with telling(checkpoint):
            write_whole(checkpoint / _FILES, json.dumps(files, indent=1))

    ranks.on_leader(write)


def _read_files(checkpoint: Path) -> list[FileRecord]:
    """What a checkpoint lists; nothing where an earlier version of this package wrote it."""
    path = checkpoint / _FILES
    try:
        return [FileRecord(**file) for file in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an earlier checkpoint") from None


def _find_whole(folder: Path) -> list[Path]:
    """Oldest first. Where none lists its files, those that the Trainer has finished."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    numbered.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    return [path for path in numbered if _is_listed(path)] or [path for path in numbered if _is_finished(path)]


def _is_listed(checkpoint: Path) -> bool:
    try:
        files = _read_files(checkpoint)
    except CheckpointError:
        return False
    return bool(files) and lacks_files(checkpoint, files) is None


def _is_finished(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
