"""What is written to `metrics.jsonl`, and what an island adds to what the Trainer logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_diloco.inner import Shards
from hf_diloco.methods.outer import find_method
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds import BaseSession
from hf_diloco.rounds.measure import SyncReport
from hf_diloco.trainer.metrics import MetricsWriter, RunTotals
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

    def refuse(self, step: int, refused: Mapping[int, str]) -> None:
        """Appends whose contributions were refused, with the reasons, if any were."""
        if refused:
            self.write("refused", step, islands={str(island): reason for island, reason in sorted(refused.items())})

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
