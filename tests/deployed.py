"""A small run that engines start, and what its islands say of themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import ROOT
from tests.records import events

STEPS, SYNC_EVERY = 200, 5
ROUNDS = STEPS // SYNC_EVERY
RUN_FILE: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "tokenizer": {"train": {"vocab_size": 400, "max_megabytes": 0.2}},
    "data": {"source": "embedded", "sequence_length": 32, "num_eval_sequences": 8},
    "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 5, "save_steps": 1000},
    "deepspeed": json.loads((ROOT / "configs" / "deepspeed" / "zero2.json").read_text()),
    "diloco": {"num_islands": 2, "sync_every": SYNC_EVERY},
    "launch": {"use_cpu": True},
}


def wait_until(met: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.2)


def progress(island: Path) -> dict[str, object]:
    file = island / "progress.json"
    found: dict[str, object] = json.loads(file.read_text()) if file.exists() else {"state": "", "round": 0, "step": 0}
    return found


def assert_run_has_ended(*islands: Path) -> None:
    """Each has taken all its steps, or the run's last round, which may come before: alone, if the others had ended."""
    for one in map(progress, islands):
        assert one["state"] == "done"
        assert one["step"] == STEPS or one["round"] == ROUNDS, one


def starts(island: Path) -> list[str]:
    """How each process of an island began: "anew", or "resumed" from a checkpoint."""
    return ["resumed" if start["resumed"] else "anew" for start in events(island, "start")]
