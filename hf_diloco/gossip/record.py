"""What a node writes to its `metrics.jsonl`, and adds to what the Trainer logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hf_diloco.exchange.base import Traffic
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.metrics import MetricsWriter


class NodeRecord:
    """The record of one training of a node, from its first step to its last.

    Args:
        folder: where `metrics.jsonl` is; None on ranks that write nothing.
        node: whose seconds and bytes are counted.
        step: optimizer steps taken before.
    """

    def __init__(self, folder: Path | None, node: NodeNeighbours, step: int) -> None:
        self._writer = None if folder is None else MetricsWriter(folder / "metrics.jsonl")
        self._node = node
        self._began = time.monotonic()
        self._seconds_before, self._total_before = node.seconds, node.total
        self._last = (step, node.seconds, node.total)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Appends one event."""
        if self._writer is not None:
            self._writer.write(event, step, **values)

    def mix(self, step: int) -> dict[str, float]:
        """Appends what the steps since the last such event have cost; returns it as `gossip/*`, for trackers."""
        (last_step, last_seconds, last_total), node = self._last, self._node
        self._last = (step, node.seconds, node.total)
        seconds = node.seconds - last_seconds
        counts = {"num_steps": max(1, step - last_step), **_counts(node.total, last_total)}
        self.write("mix", step, seconds_exchanging=seconds, **counts)
        return {f"gossip/{name}": float(value) for name, value in {**counts, "seconds_exchanging": seconds}.items()}

    def end(self, step: int) -> None:
        """Appends the last `mix`, and the sums."""
        self.mix(step)
        seconds = time.monotonic() - self._began
        exchanging = self._node.seconds - self._seconds_before
        self.write(
            "end",
            step,
            seconds_total=seconds,
            seconds_computing=max(0.0, seconds - exchanging),
            seconds_waiting=0.0,
            seconds_exchanging=exchanging,
            **_counts(self._node.total, self._total_before),
            on_boundary=True,
            steps_since_sync=0,
        )

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def _counts(now: Traffic, before: Traffic) -> dict[str, int]:
    return {
        "bytes_sent": now.bytes_sent - before.bytes_sent,
        "bytes_received": now.bytes_received - before.bytes_received,
    }
