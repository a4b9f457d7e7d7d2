"""A run that was stopped, and goes on by the same command, beside one that nothing has stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.equivalence.runs import Runs, assert_islands_agree, events, largest_difference, losses, merge, two_ranks


def assert_resumed_is_uninterrupted(runs: Runs, name: str, stopped_at: int, **changes: Any) -> tuple[Path, Path]:
    """Two islands that were stopped after a step, within a round. Returns the folders of the whole run and of this.

    `changes` of the run file have a checkpoint saved at that step.
    """
    whole = runs.launch(f"whole-{name}", **changes)
    runs.stop(whole, f"resumed-{name}")
    resumed = runs.launch(f"resumed-{name}", **changes)
    start = events(resumed, "start")[0]
    assert (start["resumed"], start["step"]) == (True, stopped_at)
    assert largest_difference(whole, resumed) == 0.0
    assert losses(resumed) == losses(whole)[stopped_at:]
    hashes, again = ([record["outer_hash"] for record in events(run, "sync")] for run in (whole, resumed))
    assert 0 < len(again) < len(hashes)
    assert again == hashes[-len(again) :]
    assert_islands_agree(resumed)
    return whole, resumed


def assert_two_ranks_resume(runs: Runs, kind: str, diloco: dict[str, Any]) -> None:
    """Islands of two ranks that share the model as `kind` of `SHARDINGS`, stopped at step 5."""
    saving = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}
    changes = merge(two_ranks(kind), {"training": saving, "diloco": diloco})
    _, resumed = assert_resumed_is_uninterrupted(runs, kind, 5, **changes)
    assert events(resumed, "start")[0]["outer_method"] == diloco["method"]
