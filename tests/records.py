"""What an island or a node has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the `metrics.jsonl` of a folder, as far as their lines are whole; none before the first."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]
