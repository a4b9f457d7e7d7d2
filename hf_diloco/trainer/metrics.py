"""The record of a run: one JSON object a line, appended as things happen."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any

from hf_diloco.rounds.measure import SyncReport

logger = logging.getLogger("hf_diloco")


_LONGEST_BACKLOG = 1 << 22  # bytes


class MetricsWriter:
    """Appends events to a `metrics.jsonl`. Each line is written at once, so a killed process loses at most one.

    A disk that is full, or fails, is a warning: the events wait in memory, up to 4 MB, until it takes them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._waiting = b""
        self._is_failing = False
        self._append()

    def write(self, event: str, step: int, **values: Any) -> None:
        """Appends one event. Numbers that are not finite, which JSON does not have, become null."""
        record = {"event": event, "time": time.time(), "step": step, **values}
        line = json.dumps({key: _finite(value) for key, value in record.items()}).encode() + b"\n"
        if len(self._waiting) + len(line) <= _LONGEST_BACKLOG:
            self._waiting += line
        self._append()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "%s cannot be written (%s): training goes on, and its events wait in memory until it can",
                    self._path,
                    error.strerror,
                )
            self._is_failing = True

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(self._path, "ab+")
        size = self._path.stat().st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            self._waiting = b"\n" + self._waiting  # a line that a killed process left unfinished must not swallow it
        return file


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
        """The values of the record's "end" event."""
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
