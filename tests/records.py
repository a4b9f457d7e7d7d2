"""What an island or a node has recorded."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.processes import Process


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the `metrics.jsonl` of a folder, as far as their lines are whole; none before the first."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def wait_for_step(launched: Process, run: Path, *islands: int, step: int = 1) -> None:
    """Until islands of a run folder have trained `step` steps, as their launcher sees it."""
    deadline = time.monotonic() + 400
    for island in islands:
        while not _has_trained(run / f"island-{island}" / "progress.json", step):
            assert launched.popen.poll() is None, launched.output
            assert time.monotonic() < deadline, launched.output
            time.sleep(0.02)


def _has_trained(file: Path, step: int) -> bool:
    progress = json.loads(file.read_text()) if file.exists() else {"state": "starting"}
    return progress["state"] != "starting" and int(progress["step"]) >= step
