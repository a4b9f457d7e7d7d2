"""Reads `progress.json`, in which an island's leader reports its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter, ValidationError

from hf_diloco.utils.files import read_json

BEFORE_TRAINING = "starting"
STOPPED_EARLY = "stopped"
AT_THE_END = ("done", STOPPED_EARLY, "failed")

_Figure = Annotated[float, AfterValidator(lambda value: value if math.isfinite(value) else None)]
"""A float; non-finite numbers become None."""


@dataclass(frozen=True)
class Progress:
    """An island's progress.

    Attributes:
        state: starting, training, syncing, evaluating, saving, done or failed; of a script also stopped: training
            ended early on request.
        step: optimizer steps done, of `max_steps` (0: not known yet).
        round: completed rounds.
        loss: the last training loss.
        tokens_per_second: of the whole island, in `unit`.
        message: details of the state; may be empty.
        noun: what to call the participant, if the file says: island or node.
        can_stop: whether the island stops with a checkpoint on request.
        survives_losses: whether the others go on when one is lost, as a script's callback or loop knows.
    """

    state: str = BEFORE_TRAINING
    step: int = 0
    max_steps: int = 0
    round: int = 0
    loss: _Figure | None = None
    tokens_per_second: _Figure | None = None
    unit: str = "tokens"
    message: str = ""
    noun: str = ""
    can_stop: bool = True
    survives_losses: bool = False

    @property
    def training_has_begun(self) -> bool:
        """Whether the island has anything to save."""
        return self.state != BEFORE_TRAINING

    @property
    def can_save(self) -> bool:
        """Whether the island writes a checkpoint when asked to stop."""
        return self.training_has_begun and self.can_stop

    @property
    def is_ending(self) -> bool:
        """Whether the process is about to exit by itself."""
        return self.state in AT_THE_END


_PROGRESS = TypeAdapter(Progress)


def read_progress(path: Path) -> Progress:
    """Returns the progress in the file; the defaults ("starting") if the file is missing or invalid."""
    known = {name: value for name, value in read_json(path).items() if value is not None}
    try:
        return _PROGRESS.validate_python(known)
    except ValidationError:
        return Progress()
