"""`diloco: {enabled: false}`: the plain Trainer, with the record and the clean stop that other runs have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_diloco.island import IslandGroup
from hf_diloco.lm.runfile import DiLoCoBlock
from hf_diloco.metrics import MetricsWriter
from hf_diloco.stop import StopFlag


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
        self.moved_at_end = False
        self.stopped = False

    def common_checkpoint(self, output_dir: str | Path) -> Path | None:
        """The newest checkpoint; there are no other islands to agree with."""
        newest = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
        return Path(newest) if newest else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins the record."""
        self._begin = time.monotonic()
        self._stop.install(IslandGroup(), during=Trainer.train)
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
        if self._writer and "loss" in logs:
            self._writer.write("train", state.global_step, **_floats(logs))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records evaluations, of the island's own weights: there are no others."""
        metrics = kwargs.get("metrics") or {}
        if self._writer and "eval_loss" in metrics:
            self._writer.write("eval", state.global_step, weights="inner", **_floats(metrics))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the record of training; the evaluation after it is still recorded."""
        self._stop.uninstall()
        if self._writer:
            seconds = time.monotonic() - self._begin
            traffic = {"seconds_waiting": 0.0, "seconds_exchanging": 0.0, "bytes_sent": 0, "bytes_received": 0}
            self._writer.write(
                "end", state.global_step, seconds_total=seconds, seconds_computing=seconds, rounds=0, **traffic
            )


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # under ZeRO-3 the parameter itself is empty


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
