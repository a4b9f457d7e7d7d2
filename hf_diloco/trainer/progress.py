"""Writes `progress.json`, the island's progress, which the launcher reads a few times per second."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
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
    """Returns the folder from which `hf-diloco launch -- COMMAND` reads this island's files; None without launcher."""
    folder = os.environ.get(ENV_FOLDER)
    return Path(folder) if folder else None


class Progress:
    """`progress.json` of one island, replaced atomically, at most four times per second while the state is the same.

    Args:
        folder: the folder of the file; None on ranks that do not write.
        unit: the unit of the speed, such as "tokens".
        record: the folder of the island's record, if different.
        noun: what to call the participant, if the launcher does not know: "island" or "node".
        can_stop: whether the island stops with a checkpoint on request.
        survives_losses: whether the others go on when one is lost, if the launcher does not know.
    """

    def __init__(
        self,
        folder: Path | None,
        max_steps: int,
        unit: str = "tokens",
        record: Path | None = None,
        noun: str = "",
        can_stop: bool = True,
        survives_losses: bool = False,
    ) -> None:
        self._path = None if folder is None else folder / PROGRESS_FILE
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
            "survives_losses": survives_losses,
        }
        if record is not None:
            self._values["record"] = str(record.absolute())

    def update(self, **values: Any) -> None:
        """Updates some values. Changes of `state`, `message` and `can_stop` are written immediately."""
        if self._path is None:
            return
        values = redact(values)
        urgent = any(self._values[key] != values.get(key, self._values[key]) for key in _URGENT)
        self._values.update(values)
        now = time.monotonic()
        if urgent or now - self._written >= SECONDS_BETWEEN_WRITES:
            self._written = now
            problem = try_write_json(self._path, self._values)
            if problem and not self._is_failing:
                logger.warning("%s: training goes on, and what is shown of it is out of date", problem)
            self._is_failing = bool(problem)


class Speed:
    """Tokens (or other units) per second over the last 20 steps. Time counts from construction or `restart`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=_STEPS_OF_RATE + 1)
        self.restart()

    def restart(self) -> None:
        """Starts measuring anew, after a pause that must not count."""
        self._marks.clear()
        self._marks.append((time.monotonic(), 0.0))

    def count(self, amount: float) -> float:
        """Counts a step of `amount` tokens or other units; returns the units per second."""
        self._marks.append((time.monotonic(), self._marks[-1][1] + amount))
        (begun, before), (now, total) = self._marks[0], self._marks[-1]
        return (total - before) / max(now - begun, 1e-9)


class RunFilesCallback(TrainerCallback):
    """Updates `progress.json`, and optionally evaluates after the last step.

    Args:
        rounds: returns the number of completed rounds.
        sync_every: inner steps between rounds; 0 without rounds.
        tokens_per_step: tokens (or other units) per step of the whole island.
        end_of: in a user's own script: returns the `state` and `message` at the end of training. None with a run file.
        evaluates_at_end: whether to evaluate after the last step; ignored in a user's own script.
    """

    def __init__(
        self,
        progress: Progress,
        rounds: Callable[[], int],
        sync_every: int,
        tokens_per_step: int,
        end_of: Callable[[], Mapping[str, str]] | None = None,
        evaluates_at_end: bool = True,
    ) -> None:
        self._progress = progress
        self._rounds = rounds
        self._sync_every = sync_every
        self._tokens_per_step = tokens_per_step
        self._end_of = end_of
        self._evaluates_at_end = evaluates_at_end and not self.is_in_script
        self._speed = Speed()
        self._is_training = False

    @property
    def is_in_script(self) -> bool:
        """Whether a user's own script trains, instead of a run file."""
        return self._end_of is not None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._is_training = True
        self._speed.restart()
        self._update(state, state="training", message="", max_steps=state.max_steps)  # a script may train again

    def show_round(self, state: TrainerState) -> None:
        """Reports a synchronisation before the first step."""
        self._update(state, state="syncing", message="", max_steps=state.max_steps)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports a synchronisation before it begins."""
        if self._sync_every and (state.global_step + 1) % self._sync_every == 0:
            self._update(state, state="syncing")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Updates step and speed; requests an evaluation after the last step if asked to."""
        if self._evaluates_at_end and state.global_step >= state.max_steps:
            control.should_evaluate = True
        rate = self._speed.count(self._tokens_per_step)
        now = "evaluating" if control.should_evaluate else "saving" if control.should_save else "training"
        self._update(state, state=now, tokens_per_second=rate)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._update(state, loss=float(logs["loss"]))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._resume(state, "saving" if control.should_save else "training")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._resume(state, "training")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reports the final state in a user's own script; with a run file, the caller reports it."""
        self._is_training = not self.is_in_script
        if self._end_of is not None:
            self._update(state, **self._end_of())

    def _resume(self, state: TrainerState, now: str) -> None:
        self._speed.restart()
        if self._is_training:  # a script may evaluate and save later, too
            self._update(state, state=now)

    def _update(self, state: TrainerState, /, **values: Any) -> None:
        self._progress.update(step=state.global_step, round=self._rounds(), **values)
