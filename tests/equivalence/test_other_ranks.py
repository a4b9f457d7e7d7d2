"""Stopped on some number of ranks, gone on with on another: the same run within rounding, through the command line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.runs import (
    LAUNCH,
    SHARDINGS,
    Runs,
    assert_islands_agree,
    events,
    losses,
    relative_difference,
)
from tests.processes import run

pytestmark = pytest.mark.distributed

ROUNDING = 1e-6  # of the weights' length
BATCH = 6  # of an island, whatever its number of ranks
STOPPED_AT = 6  # of 8 steps, in the middle of the second round
KINDS: dict[str, dict[str, Any]] = {
    **{kind: SHARDINGS[kind] for kind in ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")},
    "fsdp2 full": {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
}
IN_SHORT = (("zero3", 2, 1),)
OUTSIDE_BRIEF = tuple(
    pytest.param(kind, before, after, marks=pytest.mark.slow)
    for kind in KINDS
    for before, after in ((1, 2), (2, 1), (2, 3))
    if (kind, before, after) not in IN_SHORT
)


def settings(kind: str, num_ranks: int, **training: Any) -> dict[str, Any]:
    """Two islands of some ranks, with weight decay for some parameters and a learning rate that falls."""
    return {
        **KINDS[kind],
        "launch": {"num_processes": num_ranks, "threads": 1},
        "training": {
            **{"per_device_train_batch_size": BATCH // num_ranks, "weight_decay": 0.1},
            **{"save_strategy": "steps", "save_steps": STOPPED_AT, "save_total_limit": 3, **training},
        },
    }


@pytest.mark.parametrize(("kind", "before", "after"), [*IN_SHORT, *OUTSIDE_BRIEF])
def test_other_number_of_ranks_is_the_same_run(runs: Runs, kind: str, before: int, after: int) -> None:
    whole = runs.launch(f"{kind}-{before}".replace(" ", "-"), **settings(kind, before))
    name = f"{kind}-{before}-{after}".replace(" ", "-")
    runs.stop(whole, name)
    resumed = runs.launch(name, **settings(kind, after))
    start = events(resumed, "start")[0]
    assert (start["resumed"], start["step"]) == (True, STOPPED_AT)
    assert f"{after} rank" in start["shards"]
    assert relative_difference(whole, resumed) < ROUNDING
    assert losses(resumed) == pytest.approx(losses(whole)[STOPPED_AT:], rel=1e-5)
    assert_islands_agree(resumed)
    left = {path.name for path in (resumed / "island-0" / f"checkpoint-{STOPPED_AT}").iterdir()}
    assert not [name for name in left if name.endswith("_converted") or name == "latest_universal"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("zero1", "zero2"), ("zero2", "zero1")])
def test_stages_that_read_each_other_go_on_with_the_same_run(runs: Runs, before: str, after: str) -> None:
    whole = runs.launch(f"{before}-2", **settings(before, 2))
    runs.stop(whole, name := f"{before}-as-{after}")
    resumed = runs.launch(name, **settings(after, 2))
    assert events(resumed, "start")[0]["step"] == STOPPED_AT
    assert relative_difference(whole, resumed) < ROUNDING
    assert losses(resumed) == pytest.approx(losses(whole)[STOPPED_AT:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("zero0", "zero1"), ("zero2", "zero0")])
def test_stages_that_do_not_are_refused(runs: Runs, before: str, after: str) -> None:
    runs.stop(runs.launch(f"{before}-2", **settings(before, 2)), name := f"{before}-as-{after}")
    output = run([*LAUNCH, runs.write(name, settings(after, 2))], timeout=240, expect=1).output
    assert f"and here ZeRO-{after[-1]} trains, which cannot read it" in " ".join(output.split())


def test_another_way_to_train_is_refused(runs: Runs) -> None:
    """It would begin with an optimizer that knows nothing of the steps before."""
    runs.stop(runs.launch("zero3-2", **settings("zero3", 2)), "to-ddp")
    output = run([*LAUNCH, runs.write("to-ddp", settings("ddp", 2))], timeout=240, expect=1).output
    assert "holds the optimizer's state of DeepSpeed, and here DDP trains, which cannot read it" in " ".join(
        output.split()
    )


@pytest.mark.slow
def test_what_deepspeed_cannot_convert_names_the_ways_out(runs: Runs) -> None:
    """Its converter reads Adam's two moments by name."""
    changes = settings("zero2", 2, optim="sgd")
    runs.stop(runs.launch("sgd", **changes), "sgd-1")
    changes["launch"]["num_processes"] = 1
    output = " ".join(run([*LAUNCH, runs.write("sgd-1", changes)], timeout=240, expect=1).output.split())
    assert "was written by 2 ranks, and this island has 1: DeepSpeed cannot convert it" in output
    assert "Start 2 ranks, or a new run from its parameters (hf-diloco checkpoint export)" in output
