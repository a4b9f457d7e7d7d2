"""Tells from the files of a Trainer's checkpoint how the model was sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

SavedKind = Literal["ZeRO", "FSDP2", "plain", ""]

_FILES: tuple[tuple[SavedKind, tuple[str, ...]], ...] = (
    ("ZeRO", ("global_step*/*model_states.pt",)),
    ("FSDP2", ("optimizer_0", "pytorch_model_fsdp*")),
    ("plain", ("optimizer.pt",)),
)


def saved_kind(checkpoint: Path) -> SavedKind:
    """ "ZeRO" (any stage, 0 too), "FSDP2" or "plain" (DDP, too); empty where no file of an optimizer tells."""
    return next((kind for kind, patterns in _FILES if any(any(checkpoint.glob(one)) for one in patterns)), "")
