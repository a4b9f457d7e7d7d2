"""What a node writes to its `metrics.jsonl`, and adds to what the Trainer logs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.trainer.record import Record
from hf_diloco.transport.base import Traffic


class NodeRecord(Record):
    """The record of one training of a node, from its first step to its last.

    Args:
        folder: where `metrics.jsonl` is; None on ranks that write nothing.
        node: whose seconds and bytes are counted.
        step: optimizer steps taken before.
    """

    def __init__(self, folder: Path | None, node: NodeNeighbours, step: int) -> None:
        super().__init__(folder)
        self._node = node
        self._began = time.monotonic()
        self._before = self._last = _Sums.of(node, step)

    def mix(self, step: int) -> dict[str, float]:
        """Appends what the steps since the last such event have cost; returns it as `gossip/*`, for trackers."""
        last, now = self._last, _Sums.of(self._node, step)
        self._last = now
        values = {**now.since(last), "num_steps": max(1, step - last.step)}
        self.write("mix", step, **values)
        return {f"gossip/{name}": float(value) for name, value in values.items()}

    def end(self, step: int) -> None:
        """Appends the last `mix`, and the sums."""
        self.mix(step)
        seconds = time.monotonic() - self._began
        stood_still = self._last.seconds - self._before.seconds
        self.write(
            "end",
            step,
            seconds_total=seconds,
            seconds_computing=max(0.0, seconds - stood_still),
            seconds_waiting=0.0,
            **self._last.since(self._before),
            on_boundary=True,
            steps_since_sync=0,
        )


@dataclass(frozen=True)
class _Sums:
    """What a node has counted up to a step; see `NodeNeighbours`."""

    step: int
    seconds: float
    seconds_hidden: float
    total: Traffic

    @classmethod
    def of(cls, node: NodeNeighbours, step: int) -> _Sums:
        """As they are now."""
        return cls(step, node.seconds, node.seconds_hidden, node.total)

    def since(self, before: _Sums) -> dict[str, float]:
        """What has been added. Exchanges took the time that the node stood still, and what was hidden."""
        hidden = self.seconds_hidden - before.seconds_hidden
        return {
            "seconds_exchanging": self.seconds - before.seconds + hidden,
            "seconds_hidden": hidden,
            "bytes_sent": self.total.bytes_sent - before.total.bytes_sent,
            "bytes_received": self.total.bytes_received - before.total.bytes_received,
        }
