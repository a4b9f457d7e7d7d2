"""Overlap-Local-SGD through the real command line: resuming, DeepSpeed's shards, and a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.resuming import assert_two_ranks_resume
from tests.equivalence.runs import Runs, assert_islands_agree, events, largest_difference, merge, two_ranks

pytestmark = pytest.mark.distributed

OVERLAP: dict[str, Any] = {"method": "overlap-local-sgd", "sync_every": 2}
SAVING = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}


@pytest.mark.slow  # of the same in one process: tests/simulated/test_overlap_local_sgd.py
@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_resumed_is_uninterrupted(runs: Runs, kind: str) -> None:
    """With an exchange under way."""
    assert_two_ranks_resume(runs, kind, OVERLAP)


@pytest.mark.slow
def test_zero_2_is_ddp_and_a_store_is_a_connection(runs: Runs) -> None:
    def launch(name: str, kind: str, **diloco: Any) -> Path:
        return runs.launch(name, **merge(two_ranks(kind), {"training": SAVING, "diloco": {**OVERLAP, **diloco}}))

    plain, sharded = (launch(f"whole-{kind}", kind) for kind in ("ddp", "zero2"))
    assert largest_difference(plain, sharded) < 2e-4
    met = launch("met", "ddp", rendezvous=f"file://{runs.folder}/store", min_islands=2)
    assert [record["participants"] for record in events(met, "sync")] == [[0, 1]] * 4
    assert largest_difference(plain, met) == 0.0
    assert_islands_agree(met)
