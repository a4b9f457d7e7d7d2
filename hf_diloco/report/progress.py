"""`progress.json`: what an island's leader says about itself, read a few times a second."""

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
"""None in the place of what is no finite number."""


@dataclass(frozen=True)
class Progress:
    """Where an island stands.

    Attributes:
        state: starting, training, syncing, evaluating, saving, done or failed; of a script also stopped: its training
            ended early, because it was asked to.
        step: optimizer steps done, of `max_steps` (0: not known yet).
        round: synchronisations done.
        loss: the last training loss; None before the first.
        tokens_per_second: of the whole island; None before the first measurement.
        unit: what is counted in the place of tokens, where that is something else.
        message: what the state alone does not say; may be empty.
        noun: what it is called, where it says so: island, or node.
        can_stop: whether it ends with a checkpoint when it is asked to.
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

    @property
    def training_has_begun(self) -> bool:
        """Whether it has something to save."""
        return self.state != BEFORE_TRAINING

    @property
    def can_save(self) -> bool:
        """Whether it writes a checkpoint when it is asked to end."""
        return self.training_has_begun and self.can_stop

    @property
    def is_ending(self) -> bool:
        """Whether it ends by itself, at any moment."""
        return self.state in AT_THE_END


_PROGRESS = TypeAdapter(Progress)


def read_progress(path: Path) -> Progress:
    """The progress in the file; the state before training where there is none (or none yet)."""
    known = {name: value for name, value in read_json(path).items() if value is not None}
    try:
        return _PROGRESS.validate_python(known)
    except ValidationError:
        return Progress()
