"""What a run says that finds a checkpoint which it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hf_diloco.apps.common.resume import loading
from hf_diloco.errors import CheckpointError


def test_weights_of_another_model_are_named() -> None:
    with (
        pytest.raises(CheckpointError, match=r"checkpoint-4 is of another model.*size mismatch.*--resume never"),
        loading(Path("checkpoint-4")),
    ):
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict())


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), loading(Path("checkpoint-4")):
        raise RuntimeError("out of memory")
