"""What an island writes to its `metrics.jsonl`, and adds to what the Trainer logs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_diloco.measure import SyncReport
from hf_diloco.metrics import MetricsWriter, RunTotals
from hf_diloco.outer import OuterState

LOGGED = (
    "round",
    "seconds_computing",
    "seconds_waiting",
    "seconds_exchanging",
    "bytes_sent",
    "bytes_received",
    "pseudo_gradient_norm",
    "cosine",
)
"""What trackers are told of a round, as `diloco/*`."""


class IslandRecord:
    """The record of one training of an island, from its first step on.

    Args:
        folder: where `metrics.jsonl` is; None on ranks that write nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._writer = None if folder is None else MetricsWriter(folder / "metrics.jsonl")
        self._totals = RunTotals()
        self._for_trackers: dict[str, float] = {}

    def write(self, event: str, step: int, **values: Any) -> None:
        """Appends one event."""
        if self._writer is not None:
            self._writer.write(event, step, **values)

    def sync(self, report: SyncReport, step: int) -> None:
        """Appends a round, and counts it."""
        self._totals.add(report)
        event = asdict(report)
        self._for_trackers.update({f"diloco/{name}": event[name] for name in LOGGED if event[name] is not None})
        self.write("sync", step, **event)

    def evaluate(self, step: int, metrics: dict[str, float], is_outer: bool) -> None:
        """Appends an evaluation, and of which weights it was."""
        self.write("eval", step, weights="outer" if is_outer else "inner", **metrics)

    def log_outer_loss(self, loss: float) -> None:
        """Has trackers be told of an evaluation of the outer parameters."""
        self._for_trackers["diloco/outer_loss"] = loss

    def take_for_trackers(self) -> dict[str, float]:
        """What trackers have not been told yet, as `diloco/*`."""
        taken, self._for_trackers = self._for_trackers, {}
        return taken

    def end(self, step: int, outer: OuterState, run_is_over: bool) -> None:
        """Appends the sums."""
        totals = self._totals.as_event(outer.round, outer.steps, outer.on_boundary)
        self.write("end", step, **totals, run_is_over=run_is_over)
