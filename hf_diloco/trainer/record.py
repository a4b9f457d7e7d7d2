"""The record that an island or node writes to `metrics.jsonl`, and the metrics it adds to the Trainer's logs."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.errors import DuplicateIslandError, MissedRoundError
from hf_diloco.inner.base import Shards
from hf_diloco.methods.outer import find_method
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.session import BaseSession
from hf_diloco.trainer.progress import launchers_folder
from hf_diloco.transport.base import Traffic
from hf_diloco.utils.files import METRICS_FILE, finite
from hf_diloco.utils.redact import redact
from hf_diloco.utils.text import plural

if TYPE_CHECKING:
    from hf_diloco.gossip.node import NodeNeighbours

logger = logging.getLogger("hf_diloco")

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
"""Fields of a round's report that trackers get, as `diloco/*`."""

_OF_A_START = b'{"event": "start",'
_LONGEST_BACKLOG = 1 << 22  # bytes


class Record:
    """The record of one training: events, one JSON object per line.

    Lines are written immediately, so a killed process loses at most one. If the disk is full or fails, logs a warning
    and buffers up to 4 MB of events in memory until writing works again. If the file is deleted, moved or replaced, as
    with its folder, logs a warning and goes on in a new one, which begins with the `start` event again. If another
    process has begun to write it since, as one that took the place of this one while it hung, writes nothing more.

    Args:
        folder: the folder of `metrics.jsonl`; None on ranks that do not write.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / METRICS_FILE
        self._file: FileIO | None = None
        self._start = b""
        self._end = 0  # of the file, when this process last wrote to it
        self._has_successor = False
        self._waiting = b""
        self._is_failing = False
        self._epoch = time.time() - time.monotonic()  # read once: setting the clock must not shift times
        if self._path is not None:
            self._append(self._path)

    def write(self, event: str, step: int, /, **values: Any) -> None:
        """Appends one event. `values` cannot override `event`, `time` and `step`; non-finite numbers become null."""
        if self._path is None:
            return
        of_every_line = {"event": event, "time": self._epoch + time.monotonic(), "step": step}
        record = of_every_line | values | of_every_line
        if event == "start" and (launched_in := launchers_folder()) is not None:
            record["launched_in"] = str(launched_in)
        line = json.dumps(finite(record)).encode() + b"\n"
        if event == "start":
            self._start = line
        elif self._is_gone(self._path):
            self._begin_anew(self._path, step)
        if event != "start" and self._finds_successor():
            return
        if len(self._waiting) + len(line) <= _LONGEST_BACKLOG:
            self._waiting += line
        self._append(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def check_alone(self) -> None:
        """Checks that no other process has begun to train in this folder since.

        Raises:
            DuplicateIslandError: one has, and would be disturbed by a checkpoint of this one.
        """
        if self._path is not None and self._finds_successor():
            raise DuplicateIslandError(
                f"another process has begun to train in {self._path.parent} since this one did: this one ends without "
                "a checkpoint, which would replace those of the other. Give each island its own folder; or start it "
                "only once its old process has ended"
            )

    def _finds_successor(self) -> bool:
        """Whether another process has appended its `start` event; processes of other machines may do so, too."""
        if self._file is not None and not self._has_successor:
            with suppress(OSError):
                size = os.fstat(self._file.fileno()).st_size
                added = os.pread(self._file.fileno(), max(0, size - self._end), self._end)
                self._has_successor = _OF_A_START in added
                self._end = size
        return self._has_successor

    def _is_gone(self, path: Path) -> bool:
        """Whether the path no longer leads to the open file, so that nobody would find what is written to it."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # else the disk may only be failing

    def _begin_anew(self, path: Path, step: int) -> None:
        logger.warning(
            "%s has been deleted, moved or replaced: training goes on, and its events from step %d on are in a new "
            "file there. If its folder was moved, its earlier checkpoints are no longer found: move them back, too",
            path,
            step,
        )
        with suppress(OSError):
            self.close()
        self._file = None
        self._append(path)

    def _append(self, path: Path) -> None:
        try:
            if self._file is None:
                self._file = self._open(path)
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
                self._end = self._file.tell()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "%s cannot be written (%s): training goes on, and its events wait in memory until it can",
                    path,
                    error.strerror,
                )
            self._is_failing = True

    def _open(self, path: Path) -> FileIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "ab+")
        self._end = size = path.stat().st_size
        if size and self._start:  # reopened
            self._has_successor = self._start not in path.read_bytes()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            self._waiting = b"\n" + self._waiting  # end the partial line of a killed process first
        if not size and not self._waiting.startswith(self._start):
            self._waiting = self._start + self._waiting  # the earlier file is gone
        return file


class IslandRecord(Record):
    """The record of an island; sums the seconds and bytes of its rounds since training began."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self._began = time.monotonic()
        names = ("seconds_waiting", "seconds_exchanging", "seconds_hidden", "bytes_sent", "bytes_received")
        self._sums = dict.fromkeys(names, 0.0)
        self._for_trackers: dict[str, float] = {}

    def start(self, step: int, session: BaseSession, shards: Shards, examples: int | None, resumed: bool) -> None:
        """Appends the `start` event, when the island has joined; `examples`: per step, None if unknown."""
        config, size = session.config, session.island.size
        self.write(
            "start",
            step,
            island=config.island,
            num_islands=config.num_islands,
            rendezvous=redact(config.rendezvous),
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
            max_steps=session.num_steps,
            examples_per_step=examples,
            tokens_per_step=session.tokens_per_step,
            resumed=resumed,
            round=session.outer.round,
            has_outer_loop=True,
            comes_and_goes=config.meets_in_store,
            params_hash=session.outer.outer_hash,
        )

    def sync(self, report: SyncReport, step: int) -> None:
        """Appends a round, and adds it to the sums."""
        event = asdict(report)
        for name in self._sums:
            self._sums[name] += event[name]
        self._for_trackers.update({f"diloco/{name}": event[name] for name in LOGGED if event[name] is not None})
        self.write("sync", step, **event)

    def miss(self, step: int, session: BaseSession, error: MissedRoundError) -> None:
        """Appends that a round failed, and which islands' contributions were refused."""
        self.write("missed", step, round=session.outer.round + 1, reason=str(error))
        self.refuse(step, session.take_refused())

    def refuse(self, step: int, refused: Mapping[int, str]) -> None:
        """Appends which islands' contributions were refused and why; no-op if none were."""
        if refused:
            self.write("refused", step, islands={str(island): reason for island, reason in sorted(refused.items())})

    def log_outer_loss(self, loss: float, name: str) -> None:
        """Queues an evaluation loss of the outer parameters for trackers; `name` as `name_evaluated` returns it."""
        self._for_trackers[f"diloco/outer_{name}loss"] = loss

    @property
    def has_round_for_trackers(self) -> bool:
        """Whether a round's metrics are queued for trackers."""
        return "diloco/round" in self._for_trackers

    def take_for_trackers(self) -> dict[str, float]:
        """Returns and clears the metrics queued for trackers, as `diloco/*`."""
        taken, self._for_trackers = self._for_trackers, {}
        return taken

    def end(self, step: int, outer: OuterState, run_is_over: bool) -> None:
        """Appends the `end` event, with the sums."""
        total, sums = time.monotonic() - self._began, self._sums
        self.write(
            "end",
            step,
            seconds_total=total,
            seconds_computing=total - (sums["seconds_waiting"] + sums["seconds_exchanging"] - sums["seconds_hidden"]),
            seconds_waiting=sums["seconds_waiting"],
            seconds_exchanging=sums["seconds_exchanging"],
            bytes_sent=int(sums["bytes_sent"]),
            bytes_received=int(sums["bytes_received"]),
            rounds=outer.round,
            on_boundary=outer.on_boundary,
            steps_since_sync=outer.steps,
            run_is_over=run_is_over,
        )


class NodeRecord(Record):
    """The record of one training of a gossip node.

    Args:
        node: whose seconds and bytes are counted.
        step: optimizer steps taken before this training.
    """

    def __init__(self, folder: Path | None, node: NodeNeighbours, step: int) -> None:
        super().__init__(folder)
        self._node = node
        self._began = time.monotonic()
        self._before = self._last = self._told = _Sums.of(node, step)

    def mix(self, step: int) -> None:
        """Appends the seconds and bytes since the last `mix` event, if there were any.

        A resume discards the events after its checkpoint, so each checkpoint needs a `mix` event.
        """
        last, self._last = self._last, _Sums.of(self._node, step)
        if self._last != last:
            self.write("mix", step, **self._last.since(last), num_steps=max(1, step - last.step))

    def take_for_trackers(self, step: int) -> dict[str, float]:
        """Appends a `mix` event, and returns the exchanges since the last call for trackers, as `gossip/*`."""
        self.mix(step)
        told, self._told = self._told, self._last
        values = {**self._last.since(told), "num_steps": max(1, step - told.step)}
        return {f"gossip/{name}": float(value) for name, value in values.items()}

    def tell_news(self, step: int) -> None:
        """Logs and appends news of other nodes."""
        for news in self._node.take_events():
            logger.warning("%s", news)
            self.write("neighbour", step, news=news)

    def end(self, step: int) -> None:
        """Appends the last `mix` event, and the `end` event with the sums."""
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
    """A node's counters at a step; see `NodeNeighbours`."""

    step: int
    seconds: float
    seconds_hidden: float
    total: Traffic

    @classmethod
    def of(cls, node: NodeNeighbours, step: int) -> _Sums:
        """Returns the node's present counters."""
        return cls(step, node.seconds, node.seconds_hidden, node.total)

    def since(self, before: _Sums) -> dict[str, float]:
        """Returns the increase since `before`. Exchange time is the time that training paused plus the hidden time."""
        hidden = self.seconds_hidden - before.seconds_hidden
        return {
            "seconds_exchanging": self.seconds - before.seconds + hidden,
            "seconds_hidden": hidden,
            "bytes_sent": self.total.bytes_sent - before.total.bytes_sent,
            "bytes_received": self.total.bytes_received - before.total.bytes_received,
        }
