"""A training that is killed in the middle of its saves: each start goes on from the newest whole checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos_checkpoints import Job, kill_while_saving

NUM_KILLS = 3


@pytest.mark.distributed
def test_kills_cost_only_the_steps_after_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), num_ranks=1)
    verdict = kill_while_saving(job, NUM_KILLS, random.Random(0))
    assert verdict.problems == []
    assert verdict.figures["kills in the middle of a save"] == NUM_KILLS
    assert verdict.figures["lives that began at the newest whole checkpoint"] == NUM_KILLS
    assert verdict.figures["islands that came to the last step"] == 1
    assert verdict.figures["diverged"] == 0
