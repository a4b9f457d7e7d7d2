"""What is written to `metrics.jsonl`, and what an island adds to what the Trainer logs."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_diloco.inner import Shards
from hf_diloco.methods.outer import find_method
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds import BaseSession
from hf_diloco.rounds.measure import SyncReport
from hf_diloco.utils.text import plural

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


class Record:
    """The record of one training, from its first step on.

    Args:
        folder: where `metrics.jsonl` is; None on ranks that write nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._writer = None if folder is None else MetricsWriter(folder / "metrics.jsonl")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Appends one event."""
        if self._writer is not None:
            self._writer.write(event, step, **values)

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class IslandRecord(Record):
    """That of an island."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self._totals = RunTotals()
        self._for_trackers: dict[str, float] = {}

    def start(
        self,
        state: TrainerState,
        session: BaseSession,
        shards: Shards,
        examples: int,
        tokens: int | None,
        resumed: bool,
    ) -> None:
        """Appends with what training begins.

        Args:
            state: the Trainer's.
            session: that the island has joined.
            shards: of its model.
            examples: that it trains on in a step.
            tokens: likewise; None if that is not known.
            resumed: whether it goes on from a checkpoint.
        """
        config, size = session.config, session.island.size
        self.write(
            "start",
            state.global_step,
            island=config.island,
            num_islands=config.num_islands,
            num_ranks=size,
            shards=f"{shards.description}, {size} {plural('rank', size)}",
            num_parameters=shards.num_parameters,
            payload=config.payload,
            sync_every=config.sync_every,
            num_fragments=config.num_fragments,
            outer_method=find_method(config.method).name,
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
            chosen=session.chosen,
            max_steps=state.max_steps,
            examples_per_step=examples,
            tokens_per_step=tokens,
            resumed=resumed,
            round=session.outer.round,
            has_outer_loop=True,
            comes_and_goes=config.meets_in_store,
            params_hash=session.outer.outer_hash,
        )

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
