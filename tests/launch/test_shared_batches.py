"""A batch that an island's ranks share: Accelerate's `split_batches`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.two_ranks import SHAPE, events_of, launch, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_examples_of_a_batch_that_ranks_share_count_once(tmp_path: Path) -> None:
    """In the island's weight, in the record, and in the position of a stream."""
    settings: dict[str, Any] = {
        "model": {"config": {"model_type": "llama", **SHAPE}},
        "training": {"max_steps": 4, "save_steps": 4, "accelerator_config": {"split_batches": True}},
        "diloco": {"num_islands": 1, "sync_every": 2, "weight_by": "examples"},
    }
    file = write_run(tmp_path, settings)
    launch(file, "data.streaming=true")
    events = events_of(tmp_path / "runs" / "run")
    assert events[0]["num_ranks"] == 2
    assert events[0]["examples_per_step"] == 2
    assert [event["weight"] for event in events if event["event"] == "sync"] == [4, 4]
    position = tmp_path / "runs" / "run" / "island-0" / "checkpoint-4" / "data_position.json"
    assert json.loads(position.read_text())["num_blocks"] == 8
