"""SlowMo through the real command line: resuming, DeepSpeed's shards, and an island that is killed in a store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import trainer_islands
from tests.equivalence.resuming import assert_two_ranks_resume
from tests.equivalence.runs import Runs, events, largest_difference, merge, two_ranks
from tests.processes import Processes

pytestmark = pytest.mark.distributed

SLOWMO: dict[str, Any] = {"method": "slowmo", "sync_every": 2, "outer_momentum": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_resumed_is_uninterrupted(runs: Runs, kind: str) -> None:
    """With a learning rate that falls to 0."""
    assert_two_ranks_resume(runs, kind, SLOWMO)


@pytest.mark.slow
def test_zero_2_is_ddp(runs: Runs) -> None:
    """The learning rates are seen, and the parameter groups, where DeepSpeed has the optimizer."""
    saving = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}
    ddp, sharded = (
        runs.launch(f"whole-{kind}", **merge(two_ranks(kind), {"training": saving, "diloco": SLOWMO}))
        for kind in ("ddp", "zero2")
    )
    assert largest_difference(ddp, sharded) < 2e-4
    heavy_ball = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.6, "nesterov": False}
    plain = runs.launch("heavy-ball", **two_ranks("ddp"), diloco=heavy_ball)
    assert largest_difference(ddp, plain) > 2e-4, "the learning rate falls, and momentum with it"


def test_an_island_that_is_killed_comes_back_with_the_learning_rates_of_the_rounds(tmp_path: Path) -> None:
    """The other island goes on alone to the end of the run; what comes back ends with the same weights."""

    settings: dict[str, Any] = {"max_steps": 12, "save_steps": 2, "schedule": "linear"}
    settings["diloco"] = {**SLOWMO, "min_islands": 1, "grace": 60}
    with Processes() as processes:
        start = partial(trainer_islands.start, processes, tmp_path, rendezvous=f"file://{tmp_path}/store", **settings)
        survivor = start(island=0)
        start(island=1, fail_at=7).wait(timeout=150, expect=-9)
        survivor.wait(timeout=150)
        start(island=1, resume="common").wait(timeout=150)
    rounds = [record["participants"] for record in events(tmp_path, "sync")]
    assert rounds == [[0, 1]] * 3 + [[0]] * 3
    trainer_islands.assert_equal(*trainer_islands.trained_weights(tmp_path))
