"""What a run says that finds a checkpoint which it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hf_diloco.apps.common.resume import loading
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.checkpoints import check_stage, resume_across_ranks
from hf_diloco.inner.island import IslandGroup


def test_weights_of_another_model_are_named() -> None:
    with (
        pytest.raises(CheckpointError, match=r"checkpoint-4 is of another model.*size mismatch.*--resume never"),
        loading(Path("checkpoint-4")),
    ):
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict())


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), loading(Path("checkpoint-4")):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("was_stage_3", [True, False])
@pytest.mark.parametrize("is_stage_3", [True, False])
def test_other_stages_of_zero_are_named(tmp_path: Path, was_stage_3: bool, is_stage_3: bool) -> None:
    """By the files that DeepSpeed writes."""
    for rank in range(2):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
        part = f"zero_pp_rank_{rank}_" if was_stage_3 else ""
        (tmp_path / f"{part}mp_rank_00_model_states.pt").touch()
    if was_stage_3 == is_stage_3:
        check_stage(tmp_path, is_stage_3, IslandGroup())
        return
    before, now = ("ZeRO-3", "another stage") if was_stage_3 else ("another stage", "ZeRO-3")
    with pytest.raises(CheckpointError, match=f"was written under {before}, and here {now} trains, .*export"):
        check_stage(tmp_path, is_stage_3, IslandGroup())


def test_each_training_of_a_process_asks_deepspeed_for_it_and_the_first_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed import DeepSpeedEngine

    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", DeepSpeedEngine.load_checkpoint)
    resume_across_ranks()
    first = DeepSpeedEngine.load_checkpoint
    resume_across_ranks()
    assert DeepSpeedEngine.load_checkpoint is first
