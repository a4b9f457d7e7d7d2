"""What a run says that finds a checkpoint which it cannot use."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import trainer as trainer_module

from hf_diloco.apps.common.training import loading
from hf_diloco.errors import CheckpointError
from hf_diloco.inner import checkpoints
from hf_diloco.inner.checkpoints import check_stage
from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.resuming import resume_across_ranks
from tests.islands import try_islands
from tests.thread_group import ThreadGroup


def test_weights_of_another_model_are_named() -> None:
    with (
        pytest.raises(
            CheckpointError, match=r"checkpoint-4 is of another model.*size mismatch.*delete the checkpoints"
        ),
        loading(Path("checkpoint-4")),
    ):
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict())


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), loading(Path("checkpoint-4")):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("was", range(4))
@pytest.mark.parametrize("now", range(4))
def test_other_stages_of_zero_are_named(tmp_path: Path, was: int, now: int) -> None:
    """By the files that DeepSpeed writes."""
    for rank in range(2):
        if was:
            (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
        (tmp_path / f"{f'zero_pp_rank_{rank}_' * (was == 3)}mp_rank_00_model_states.pt").touch()
    if was == now or {was, now} == {1, 2}:
        check_stage(tmp_path, now, now > 0, IslandGroup())
        return
    before = ("ZeRO-0", "ZeRO-1 or 2", "ZeRO-1 or 2", "ZeRO-3")[was]
    with pytest.raises(CheckpointError, match=f"was written under {before}, and here ZeRO-{now} trains, .*export"):
        check_stage(tmp_path, now, now > 0, IslandGroup())


def test_stage_0_may_cut_the_optimizers_state(tmp_path: Path) -> None:
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    check_stage(tmp_path, 0, True, IslandGroup())


def test_a_folder_of_nothing_is_left_to_deepspeed(tmp_path: Path) -> None:
    check_stage(tmp_path, 2, True, IslandGroup())


def test_each_callback_of_a_process_patches_the_trainer_and_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "deepspeed_load_checkpoint", trainer_module.deepspeed_load_checkpoint)
    resume_across_ranks()
    first = trainer_module.deepspeed_load_checkpoint
    resume_across_ranks()
    assert trainer_module.deepspeed_load_checkpoint is first


def test_no_rank_goes_on_before_the_converted_copy_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that looked through the checkpoint while the leader deleted the copy ended in a FileNotFoundError."""
    meeting, items, has_gone_on = threading.Barrier(2), dict[int, Any](), threading.Event()
    delete, were_early = shutil.rmtree, list[bool]()

    def delete_late(folder: Path, **kwargs: Any) -> None:
        were_early.append(has_gone_on.wait(0.2))
        delete(folder, **kwargs)

    def resume(rank: int) -> str:
        with checkpoints._converted(tmp_path / "global_step4", 1, ThreadGroup(rank, meeting, items)) as universal:
            assert (universal / "zero").is_dir()
        if rank:
            has_gone_on.set()
        return checkpoints.saved_kind(tmp_path)

    def convert(_: Path, universal: Path, *__: int) -> None:
        (universal / "zero").mkdir(parents=True)

    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").touch()
    monkeypatch.setattr(checkpoints, "_convert", convert)
    monkeypatch.setattr(shutil, "rmtree", delete_late)
    assert try_islands(2, resume) == ["ZeRO", "ZeRO"]
    assert were_early == [False]
    assert [path.name for path in tmp_path.iterdir()] == ["global_step4"]


def test_islands_that_resume_from_one_checkpoint_convert_it_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deleted the copy that the other was reading."""
    converts_again, were_early = threading.Event(), list[bool]()

    def resume(_: int) -> bool:
        with checkpoints._converted(tmp_path / "global_step4", 1, IslandGroup()) as universal:
            were_early.append(converts_again.wait(0.2))
            return (universal / "zero").is_dir()

    def convert(_: Path, universal: Path, *__: int) -> None:
        if were_begun.pop():
            converts_again.set()
        (universal / "zero").mkdir(parents=True, exist_ok=True)

    were_begun = [True, False]
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    monkeypatch.setattr(checkpoints, "_convert", convert)
    assert try_islands(2, resume) == [True, True]
    assert were_early == [False, True]
