"""What must be equal to what, shown with real runs of several processes through the real command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.resuming import assert_resumed_is_uninterrupted
from tests.equivalence.runs import (
    Runs,
    assert_identical,
    assert_islands_agree,
    events,
    largest_difference,
    losses,
    merge,
    two_ranks,
    zero,
)

pytestmark = pytest.mark.distributed

# AdamW divides by the root of tiny second moments in the first steps: a last-bit difference of a gradient may grow to
# 1e-4 of the learning rate's size, and eight steps add up.
ROUNDING = 2e-4


def plain(runs: Runs) -> Path:
    return runs.command("plain", [sys.executable], diloco={"enabled": False})


def test_no_synchronisation_in_reach_is_the_plain_trainer(runs: Runs) -> None:
    callback = runs.command("out-of-reach", [sys.executable], diloco={"sync_every": 1000})
    assert_identical_weights_and_losses(plain(runs), callback)


def assert_identical_weights_and_losses(first: Path, second: Path) -> None:
    assert largest_difference(first, second) == 0.0
    assert losses(second)  # the plain run has no record of ours: its losses are compared through the weights


def test_one_island_with_lr_1_and_no_momentum_is_the_plain_trainer(runs: Runs) -> None:
    fedavg = runs.command("identity", [sys.executable], diloco={"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0})
    assert events(fedavg, "sync")
    assert largest_difference(plain(runs), fedavg) < 1e-5


def test_two_islands_with_equal_data_are_one_island(runs: Runs) -> None:
    one = runs.launch("one", diloco={"num_islands": 1}, data={"shares": "same"})
    two = runs.launch("two-same", data={"shares": "same"})
    assert_identical(one, two)
    assert_islands_agree(two)


def two_by_two(runs: Runs, kind: str, name: str = "", **changes: Any) -> Path:
    return runs.launch(kind + name, **merge(two_ranks(kind), changes))


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_zero_stages_are_ddp(runs: Runs, stage: int) -> None:
    ddp = two_by_two(runs, "ddp")
    sharded = two_by_two(runs, f"zero{stage}")
    assert f"ZeRO-{stage}, 2 ranks" in events(sharded, "start")[0]["shards"]
    assert_islands_agree(sharded)
    assert largest_difference(ddp, sharded) < ROUNDING


def test_two_ranks_are_one_rank_with_the_same_data(runs: Runs) -> None:
    one_rank = runs.launch("two-by-one")
    two_ranks = two_by_two(runs, "ddp")
    assert_islands_agree(one_rank)
    assert_islands_agree(two_ranks)
    assert largest_difference(one_rank, two_ranks) < ROUNDING


@pytest.mark.parametrize("stage", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_resumed_is_uninterrupted(runs: Runs, stage: int | None) -> None:
    """Stopped at step 6, in the middle of a round, and started again with the same command."""
    assert_resumed_is_uninterrupted(
        *(runs, "plain" if stage is None else "zero", 6),
        deepspeed=None if stage is None else zero(stage),
        training={"save_strategy": "steps", "save_steps": 6, "save_total_limit": 3},
    )


def test_evaluations_of_the_outer_weights_leave_training_as_it_is(runs: Runs) -> None:
    """Under ZeRO-3, where the weights have to be gathered anew, and back."""
    evaluations = {"eval_strategy": "steps", "eval_steps": 3}
    evaluated = two_by_two(runs, "zero3", "-evaluated", training=evaluations)
    assert [event["weights"] for event in events(evaluated, "eval")][:2] == ["outer", "outer"]
    assert_identical(two_by_two(runs, "zero3"), evaluated)


STREAMING = {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


def streaming(runs: Runs, kind: str) -> Path:
    return two_by_two(runs, kind, "-streaming", diloco=STREAMING)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_streaming_under_zero_is_streaming_under_ddp(runs: Runs, stage: int) -> None:
    """Fragments of two ranks' shards, their rounds behind the inner steps, two islands."""
    ddp, sharded = streaming(runs, "ddp"), streaming(runs, f"zero{stage}")
    assert [record["fragment"] for record in events(sharded, "sync")] == [0, 1, 0, 1, 0], "the last takes in all steps"
    assert_islands_agree(sharded)
    assert events(sharded, "end")[0]["on_boundary"] is True
    assert largest_difference(ddp, sharded) < ROUNDING
    assert largest_difference(ddp, two_by_two(runs, "ddp")) > ROUNDING, "it is another algorithm"


@pytest.mark.slow  # of the same in one process: tests/simulated/test_elastic_streaming.py
@pytest.mark.parametrize(("exchange", "kind"), [("bucket", "zero2"), ("mesh", "zero3")])
def test_streaming_in_an_object_store(runs: Runs, exchange: str, kind: str) -> None:
    met = two_by_two(
        *(runs, kind, f"-{exchange}"),
        diloco={
            **STREAMING,
            "rendezvous": f"file://{runs.folder}/store-{exchange}",
            "exchange": exchange,
            "bind_address": "127.0.0.1" if exchange == "mesh" else None,
        },
    )
    assert [record["fragment"] for record in events(met, "sync")] == [0, 1, 0, 1, 0]
    assert {tuple(record["participants"]) for record in events(met, "sync")} == {(0, 1)}
    assert_islands_agree(met)
    assert events(met, "end")[0]["on_boundary"] is True
    assert events(met, "end")[0]["run_is_over"] is True
    weights = {record["weight"] for island in range(2) for record in events(met, "sync", island)[:4]}
    assert weights == {1.0}, "both have all their steps in every round"
    assert largest_difference(streaming(runs, kind), met) == 0.0


@pytest.mark.slow  # of the same in one process: tests/simulated/test_streaming.py
def test_streaming_resumed_in_the_middle_of_a_round_is_uninterrupted(runs: Runs) -> None:
    """A checkpoint is written after step 4, at which fragment 1 has begun its round; it lands at step 5."""
    _, resumed = assert_resumed_is_uninterrupted(
        *(runs, "streaming", 4),
        deepspeed=zero(2),
        diloco={**STREAMING, "payload": "int4", "error_feedback": 1.0, "connections": 2, "rate_limit": 400},
        training={"save_strategy": "steps", "save_steps": 4, "save_total_limit": 3},
    )
    assert len(events(resumed, "sync")) == 3
