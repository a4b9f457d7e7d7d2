"""Overlap-Local-SGD through the real command line: resuming, DeepSpeed's shards, and a store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.resuming import assert_resumed_is_uninterrupted
from tests.equivalence.runs import Runs, assert_islands_agree, events, largest_difference, zero

pytestmark = pytest.mark.distributed

OVERLAP: dict[str, Any] = {"method": "overlap-local-sgd", "sync_every": 2}
TWO_RANKS: dict[str, Any] = {
    "training": {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 3},
    "launch": {"num_processes": 2, "threads": 1},
}


@pytest.mark.slow  # of the same in one process: tests/simulated/test_overlap_local_sgd.py
@pytest.mark.parametrize("stage", [None, 2])
def test_resumed_is_uninterrupted(runs: Runs, stage: int | None) -> None:
    """With an exchange under way."""
    assert_resumed_is_uninterrupted(runs, stage, OVERLAP)


@pytest.mark.slow
def test_zero_2_is_ddp_and_a_store_is_a_connection(runs: Runs) -> None:
    plain = runs.launch("whole-None", **TWO_RANKS, diloco=OVERLAP)
    sharded = runs.launch("whole-2", **TWO_RANKS, deepspeed=zero(2), diloco=OVERLAP)
    assert largest_difference(plain, sharded) < 2e-4
    met = runs.launch(
        "met", **TWO_RANKS, diloco={**OVERLAP, "rendezvous": f"file://{runs.folder}/store", "min_islands": 2}
    )
    assert [record["participants"] for record in events(met, "sync")] == [[0, 1]] * 4
    assert largest_difference(plain, met) == 0.0
    assert_islands_agree(met)
