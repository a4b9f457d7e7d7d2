"""Small run folders for the tests of the report, written line by line as an island writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARAMETERS = 1000
BYTES_A_ROUND = 4000
TOKENS_A_STEP = 100
EVAL_LOSS = math.log(8)


def start(island: int = 0, step: int = 0, time: float = 1000.0, **changes: Any) -> dict[str, Any]:
    """The start of an island that synchronises every 2 of 4 steps."""
    record = {
        "event": "start",
        "time": time,
        "step": step,
        "island": island,
        "num_islands": 2,
        "num_ranks": 1,
        "shards": "ZeRO-2, 1 rank",
        "num_parameters": PARAMETERS,
        "payload": "fp32",
        "sync_every": 2,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "max_steps": 4,
        "examples_per_step": 4,
        "tokens_per_step": TOKENS_A_STEP,
        "resumed": step > 0,
        "params_hash": "aa",
    }
    return record | changes


def train(step: int, loss: float | None, time: float = 1001.0) -> dict[str, Any]:
    return {"event": "train", "time": time, "step": step, "loss": loss, "learning_rate": 0.1, "grad_norm": 1.0}


def evaluation(step: int, loss: float | None, weights: str = "outer") -> dict[str, Any]:
    return {"event": "eval", "time": 1001.0, "step": step, "eval_loss": loss, "weights": weights}


def sync(number: int, step: int, waiting: float = 0.0, time: float = 1002.0, **changes: Any) -> dict[str, Any]:
    record = {
        "event": "sync",
        "time": time,
        "step": step,
        "round": number,
        "participants": [0, 1],
        "seconds_computing": 3.0,
        "seconds_waiting": waiting,
        "seconds_exchanging": 0.5,
        "seconds_applying": 0.25,
        "bytes_sent": BYTES_A_ROUND,
        "bytes_received": BYTES_A_ROUND,
        "pseudo_gradient_norm": 2.0,
        "cosine": 0.5,
        "weight": 1.0,
        "outer_hash": f"hash-{number}",
    }
    return record | changes


def end(step: int = 4, seconds: float = 10.0, on_boundary: bool = True, since: int = 0) -> dict[str, Any]:
    return {
        "event": "end",
        "time": 1000.0 + seconds,
        "step": step,
        "seconds_total": seconds,
        "on_boundary": on_boundary,
        "steps_since_sync": since,
    }


def whole_record(island: int = 0, waiting: float = 0.0) -> list[dict[str, Any]]:
    """4 steps in 10 seconds, 2 rounds, `waiting` seconds lost in each."""
    return [
        start(island),
        train(1, 3.0 + island),
        sync(1, 2, waiting),
        train(3, 2.5 + island),
        sync(2, 4, waiting),
        {"event": "save", "time": 1009.0, "step": 4, "path": "checkpoint-4"},
        end(),
        evaluation(4, EVAL_LOSS),
    ]


def write_island(run: Path, island: int, records: Iterable[dict[str, Any]], tail: str = "") -> Path:
    """Writes `island-N/metrics.jsonl`; `tail` is what a killed process left of its last line."""
    folder = run / f"island-{island}"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def write_run(run: Path) -> Path:
    """Two islands that ended well; island 0 waited 1 second in each round."""
    write_island(run, 0, whole_record(0, waiting=1.0))
    write_island(run, 1, whole_record(1))
    return run
