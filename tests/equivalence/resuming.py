"""A run of two islands of two ranks that was stopped in the middle of a round, and goes on, beside a whole one."""

from __future__ import annotations

from typing import Any

from tests.equivalence.runs import Runs, assert_islands_agree, events, largest_difference, losses, zero

STOPPED_AT = 5


def assert_resumed_is_uninterrupted(runs: Runs, stage: int | None, diloco: dict[str, Any]) -> None:
    """Stopped at step 5 of 8, with the outer loop's settings `diloco`; `stage` of ZeRO, or None for DDP."""
    changes = {
        "deepspeed": None if stage is None else zero(stage),
        "training": {
            "per_device_train_batch_size": 2,
            "save_strategy": "steps",
            "save_steps": STOPPED_AT,
            "save_total_limit": 3,
        },
        "launch": {"num_processes": 2, "threads": 1},
        "diloco": diloco,
    }
    whole = runs.launch(f"whole-{stage}", **changes)
    runs.stop(whole, f"resumed-{stage}")
    resumed = runs.launch(f"resumed-{stage}", **changes)
    start = events(resumed, "start")[0]
    assert (start["resumed"], start["step"], start["outer_method"]) == (True, STOPPED_AT, diloco["method"])
    assert largest_difference(whole, resumed) == 0.0
    assert losses(resumed) == losses(whole)[STOPPED_AT:]
    hashes = [record["outer_hash"] for record in events(whole, "sync")]
    again = [record["outer_hash"] for record in events(resumed, "sync")]
    assert again == hashes[-len(again) :]
    assert 0 < len(again) < len(hashes)
    assert_islands_agree(resumed)
