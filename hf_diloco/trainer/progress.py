"""What an island leaves in its folder for the launcher, which reads it a few times a second: progress.json."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.utils.files import PROGRESS_FILE, try_write_json
from hf_diloco.utils.redact import redact

logger = logging.getLogger("hf_diloco")

SECONDS_BETWEEN_WRITES = 0.25
_STEPS_OF_RATE = 20
_URGENT = ("state", "message", "can_stop")


def launchers_folder() -> Path | None:
    """Where `hf-diloco launch -- COMMAND` looks for what the island of this process says; None without one."""
    folder = os.environ.get(ENV_FOLDER)
    return Path(folder) if folder else None


class Progress:
    """`progress.json` of one island, replaced whole, at most four times a second while the state stays the same.

    Args:
        folder: where it lies.
        max_steps: of the run.
        enabled: whether it is written.
        unit: what is counted.
        record: the folder of the island's record, if that is another.
        noun: what the island is called, where the launcher does not know it.
        can_stop: whether it ends with a checkpoint when it is asked to.
    """

    def __init__(
        self,
        folder: Path,
        max_steps: int,
        enabled: bool = True,
        unit: str = "tokens",
        record: Path | None = None,
        noun: str = "",
        can_stop: bool = True,
    ) -> None:
        self._path = folder / PROGRESS_FILE
        self._enabled = enabled
        self._written = 0.0
        self._is_failing = False
        self._values: dict[str, Any] = {
            "state": "starting",
            "step": 0,
            "max_steps": max_steps,
            "round": 0,
            "loss": None,
            "tokens_per_second": None,
            "unit": unit,
            "message": "",
            "noun": noun,
            "can_stop": can_stop,
        }
        if record is not None:
            self._values["record"] = str(record.absolute())

    def update(self, **values: Any) -> None:
        """Changes some values; what is new of those that tell the launcher what to do is written at once."""
        values = redact(values)
        urgent = any(self._values[key] != values.get(key, self._values[key]) for key in _URGENT)
        self._values.update(values)
        now = time.monotonic()
        if self._enabled and (urgent or now - self._written >= SECONDS_BETWEEN_WRITES):
            self._written = now
            problem = try_write_json(self._path, self._values)
            if problem and not self._is_failing:
                logger.warning("%s: training goes on, and what is shown of it is out of date", problem)
            self._is_failing = bool(problem)


class Speed:
    """How many tokens, or whatever is counted, the last steps took a second. Time counts from when it is made."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=_STEPS_OF_RATE + 1)
        self.restart()

    def restart(self) -> None:
        """A pause has ended, which is none of the speed."""
        self._marks.clear()
        self._marks.append((time.monotonic(), 0.0))

    def count(self, amount: float) -> float:
        """A step has ended, of this many tokens or the like; returns how many a second there were."""
        self._marks.append((time.monotonic(), self._marks[-1][1] + amount))
        (begun, before), (now, total) = self._marks[0], self._marks[-1]
        return (total - before) / max(now - begun, 1e-9)


class RunFilesCallback(TrainerCallback):
    """Keeps `progress.json`, and may let training end with an evaluation.

    Args:
        progress: where to.
        rounds: gives the number of rounds completed.
        sync_every: inner steps between rounds; 0 for none.
        tokens_per_step: of the whole island.
        was_stopped: of a user's own script, whose training is left as it is: whether it ended because it was asked to.
        evaluates_at_end: lets training end with an evaluation, but not in a script.
    """

    def __init__(
        self,
        progress: Progress,
        rounds: Callable[[], int],
        sync_every: int,
        tokens_per_step: int,
        was_stopped: Callable[[], bool] | None = None,
        evaluates_at_end: bool = True,
    ) -> None:
        self._progress = progress
        self._rounds = rounds
        self._sync_every = sync_every
        self._tokens_per_step = tokens_per_step
        self._was_stopped = was_stopped
        self._evaluates_at_end = evaluates_at_end and not self.is_in_script
        self._speed = Speed()
        self._is_training = False

    @property
    def is_in_script(self) -> bool:
        """Whether it is a user's own script's."""
        return self._was_stopped is not None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training begins."""
        self._is_training = True
        self._speed.restart()
        self._update(state, state="training", message="", max_steps=state.max_steps)  # a script may train again

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Says that the islands synchronise, before they do."""
        if self._sync_every and (state.global_step + 1) % self._sync_every == 0:
            self._update(state, state="syncing")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Counts, and lets training end with an evaluation."""
        if self._evaluates_at_end and state.global_step >= state.max_steps:
            control.should_evaluate = True
        rate = self._speed.count(self._tokens_per_step)
        now = "evaluating" if control.should_evaluate else "saving" if control.should_save else "training"
        self._update(state, state=now, tokens_per_second=rate)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keeps the last loss."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._update(state, loss=float(logs["loss"]))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluation has ended."""
        self._resume(state, "saving" if control.should_save else "training")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint is on disk."""
        self._resume(state, "training")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training has ended, and nobody else says when all is done."""
        self._is_training = not self.is_in_script
        if self._was_stopped is not None:
            self._update(state, state="stopped" if self._was_stopped() else "done")

    def _resume(self, state: TrainerState, now: str) -> None:
        self._speed.restart()
        if self._is_training:  # a script may evaluate and save later, too
            self._update(state, state=now)

    def _update(self, state: TrainerState, /, **values: Any) -> None:
        if state.is_world_process_zero:
            self._progress.update(step=state.global_step, round=self._rounds(), **values)
