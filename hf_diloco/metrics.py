"""The record of a run: one JSON object a line, appended as things happen."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from hf_diloco.measure import SyncReport


class MetricsWriter:
    """Appends events to a `metrics.jsonl`. Each line is flushed, so a killed process loses at most one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file = path.open("a", encoding="utf-8")
        if torn:  # a line that a killed process left unfinished must not swallow the next one
            self._file.write("\n")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Appends one event. Numbers that are not finite, which JSON does not have, become null."""
        record = {"event": event, "time": time.time(), "step": step, **values}
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RunTotals:
    """What the rounds since training began have cost."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        names = ("seconds_waiting", "seconds_exchanging", "seconds_hidden", "bytes_sent", "bytes_received")
        self._sums = dict.fromkeys(names, 0.0)

    def add(self, report: SyncReport) -> None:
        """Counts one more round."""
        for name in self._sums:
            self._sums[name] += getattr(report, name)

    def as_event(self, rounds: int, steps_since_sync: int, on_boundary: bool) -> dict[str, Any]:
        """The values of the record\'s "end" event."""
        total = time.monotonic() - self._begin
        idle = self._sums["seconds_waiting"] + self._sums["seconds_exchanging"] - self._sums["seconds_hidden"]
        return {
            "seconds_total": total,
            "seconds_computing": total - idle,
            "seconds_waiting": self._sums["seconds_waiting"],
            "seconds_exchanging": self._sums["seconds_exchanging"],
            "bytes_sent": int(self._sums["bytes_sent"]),
            "bytes_received": int(self._sums["bytes_received"]),
            "rounds": rounds,
            "on_boundary": on_boundary,
            "steps_since_sync": steps_since_sync,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
