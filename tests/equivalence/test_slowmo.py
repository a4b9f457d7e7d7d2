"""SlowMo through the real command line: resuming, DeepSpeed's shards, and an island that is killed in a store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.resuming import assert_resumed_is_uninterrupted
from tests.equivalence.runs import Runs, events, largest_difference, zero
from tests.processes import ROOT, Processes, find_free_port

pytestmark = pytest.mark.distributed

PROGRAM = ROOT / "tests" / "programs" / "trainer_island.py"
SLOWMO: dict[str, Any] = {"method": "slowmo", "sync_every": 2, "outer_momentum": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 2])
def test_resumed_is_uninterrupted(runs: Runs, stage: int | None) -> None:
    """With a learning rate that falls to 0."""
    assert_resumed_is_uninterrupted(runs, stage, SLOWMO)


@pytest.mark.slow
def test_zero_2_is_ddp(runs: Runs) -> None:
    """The learning rates are seen, and the parameter groups, where DeepSpeed has the optimizer."""
    ddp, sharded = (
        runs.launch(
            f"whole-{stage}",
            deepspeed=None if stage is None else zero(stage),
            training={"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 5},
            launch={"num_processes": 2, "threads": 1},
            diloco=SLOWMO,
        )
        for stage in (None, 2)
    )
    assert largest_difference(ddp, sharded) < 2e-4
    plain = runs.launch(
        "heavy-ball",
        training={"per_device_train_batch_size": 2},
        launch={"num_processes": 2, "threads": 1},
        diloco={"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.6, "nesterov": False},
    )
    assert largest_difference(ddp, plain) > 2e-4, "the learning rate falls, and momentum with it"


def test_an_island_that_is_killed_comes_back_with_the_learning_rates_of_the_rounds(tmp_path: Path) -> None:
    """The other island goes on alone to the end of the run; what comes back ends with the same weights."""

    def start(processes: Processes, island: int, **settings: Any) -> Any:
        whole = {
            "output_dir": str(tmp_path / f"island-{island}"),
            "result": str(tmp_path / f"result-{island}.json"),
            "data_seed": island,
            "max_steps": 12,
            "save_steps": 2,
            "schedule": "linear",
            "diloco": {**SLOWMO, "min_islands": 1, "grace": 60, "join_timeout": 120},
            **settings,
        }
        environment = {
            "HF_DILOCO_ISLAND": island,
            "HF_DILOCO_NUM_ISLANDS": 2,
            "HF_DILOCO_RENDEZVOUS": f"file://{tmp_path}/store",
            "MASTER_PORT": find_free_port(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ROOT,
        }
        return processes.spawn([sys.executable, PROGRAM, json.dumps(whole)], env=environment)

    with Processes() as processes:
        survivor = start(processes, 0)
        start(processes, 1, fail_at=7).wait(timeout=150, expect=-9)
        survivor.wait(timeout=150)
        start(processes, 1, resume="common").wait(timeout=150)
    rounds = [record["participants"] for record in events(tmp_path, "sync")]
    assert rounds == [[0, 1]] * 3 + [[0]] * 3
    first, second = (torch.load(tmp_path / f"result-{island}.json.pt", weights_only=True) for island in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
