"""Outer state saved by islands of some number of ranks and resumed by others; and a rank that dies while saving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_diloco.errors import CheckpointError
from hf_diloco.outer.checkpoint import complete_checkpoints, load_outer, read_index
from tests.distributed.torchrun import torchrun
from tests.processes import run

PROGRAM = ("-m", "tests.programs.partition_checkpoint")


@pytest.mark.distributed
def test_islands_of_1_2_and_3_ranks_resume_each_others_state(tmp_path: Path) -> None:
    """Every number of ranks from every other, mid-round, replicated and sharded: equal to going on, bit for bit."""
    run(torchrun(3, *PROGRAM, tmp_path), timeout=120)
    assert json.loads((tmp_path / "result.json").read_text()) == []


@pytest.mark.distributed
def test_a_rank_killed_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    died = run(torchrun(2, *PROGRAM, tmp_path, "die"), timeout=120, expect=None)
    assert died.returncode != 0
    assert "Signal 9 (SIGKILL)" in died.output
    newer = tmp_path / "checkpoint-4"
    assert (newer / "diloco" / "rank-00001.partial").is_file()  # it had got that far
    with pytest.raises(CheckpointError, match=r"outer\.json is missing.*Resume from an earlier checkpoint"):
        read_index(newer)
    ((older, index),) = complete_checkpoints(tmp_path)
    assert older == tmp_path / "checkpoint-2"
    state = load_outer(older, index, [(0, index.num_parameters)])
    assert {name: bool(torch.isfinite(values).all()) for name, values in state.items()} == {
        "anchor": True,
        "momentum": True,
    }


@pytest.mark.distributed
def test_a_callback_that_is_added_later_resumes_across_ranks_too(tmp_path: Path) -> None:
    """Though it was made before DeepSpeed was imported."""

    def island(num_ranks: int, **changes: object) -> list[str]:
        settings: dict[str, object] = {
            **{"output_dir": str(tmp_path / "run"), "result": str(tmp_path / f"{num_ranks}.json"), "zero": 2},
            **{"per_device_batch": 4 // num_ranks, "diloco": {"sync_every": 2}, "adds_callback": True, **changes},
        }
        return torchrun(num_ranks, "-m", "tests.programs.trainer_island", json.dumps(settings))

    run(island(2, save_steps=4, max_steps=4), timeout=120)
    run(island(1, resume=str(tmp_path / "run" / "checkpoint-4")), timeout=120)
    assert json.loads((tmp_path / "1.json").read_text())["steps"] == 6
