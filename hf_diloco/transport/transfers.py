"""Sends and receives under way: whom they are with, whether what came is sound, and a thread that waits for them."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.transport.base import Traffic


class Work(NamedTuple):
    """One send or receive under way, over which of the connections to its peer, and what messages call that."""

    handle: Any
    peer: int
    connection: int
    name: str


class _Check(NamedTuple):
    received: torch.Tensor
    is_sound: Callable[[], bool]
    peer: int


class Transfers:
    """Sends and receives under way, each with its peer, so that a failure can be told by the island's number.

    Attributes:
        damaged: peers of whom something has come that is not what they sent. It was replaced by zeros, which every
            codec can decode.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.damaged: set[int] = set()
        self._checks: list[_Check] = []
        self._endings: list[Callable[[], None]] = []
        self._numbers: Counter[tuple[str, int, int]] = Counter()
        self._traffic = Traffic()

    def add(self, work: Work, sent: int = 0, received: int = 0) -> None:
        self.works.append(work)
        self._traffic += Traffic(sent, received)

    def number(self, operation: str, peer: int, tag: int) -> int:
        """Counts what goes one way with one tag, from 0; the same at both ends."""
        self._numbers[operation, peer, tag] += 1
        return self._numbers[operation, peer, tag] - 1

    def expect(self, received: torch.Tensor, is_sound: Callable[[], bool], peer: int) -> None:
        """Has `check` ask whether what was received is what the peer sent."""
        self._checks.append(_Check(received, is_sound, peer))

    def when_done(self, ending: Callable[[], None]) -> None:
        """Has `check` call this; it is not called if the transfers fail."""
        self._endings.append(ending)

    def check(self) -> None:
        """Looks at what has come, once it has; see `damaged`."""
        for received, is_sound, peer in self._checks:
            if not is_sound():
                received.zero_()
                self.damaged.add(peer)
        for ending in self._endings:
            ending()
        self._checks.clear()
        self._endings.clear()

    def drop(self) -> None:
        """Lets go of all that are under way: they hold the group, and the group its sockets."""
        self.works.clear()
        self._checks.clear()
        self._endings.clear()

    def take_traffic(self) -> Traffic:
        """What was moved since the last call."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic


class Deadline:
    """One limit for a whole exchange: Gloo's own timeouts are per step, and a trickle could go on for ever."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class Waiter:
    """A thread that blocks on transfers, so that nobody else must."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[list[Work], Deadline] | None] = SimpleQueue()
        self._results: SimpleQueue[IslandLostError | None] = SimpleQueue()
        self._progress = _Progress()
        self.is_busy = False
        thread = threading.Thread(
            target=_wait_for_all,
            args=(self._requests, self._results, self._progress),
            name="hf-diloco-transfers",
            daemon=True,  # a transfer that Gloo does not wake must not keep the process
        )
        thread.start()
        self.end = weakref.finalize(self, self._requests.put, None)

    @property
    def position(self) -> int:
        """The number of the transfer that is waited for."""
        return self._progress.position

    def start(self, works: list[Work], deadline: Deadline) -> None:
        self.is_busy = True
        self._progress.position = 0
        self._requests.put((works, deadline))

    def result(self, timeout: float) -> IslandLostError | None:
        """None once all are done, or the error of the first that failed; raises `Empty` while neither is known."""
        result = self._results.get(timeout=timeout)
        self.is_busy = False
        return result


class _Progress:
    position = 0


def _wait_for_all(
    requests: SimpleQueue[tuple[list[Work], Deadline] | None],
    results: SimpleQueue[IslandLostError | None],
    progress: _Progress,
) -> None:
    while (request := requests.get()) is not None:
        error = _first_failure(*request, progress)
        del request  # or it would keep the works, and through them the sockets, until the next
        results.put(error)


def _first_failure(works: list[Work], deadline: Deadline, progress: _Progress) -> IslandLostError | None:
    for work in works:
        try:
            work.handle.wait(deadline.remaining())
        except RuntimeError as error:
            return lost(work.peer, work.name, reason(error))
        progress.position += 1
    return None


def lost(peer: int, name: str, reason: str) -> IslandLostError:
    """The error for a peer that is gone or late; `name` is what it is called."""
    return IslandLostError(
        f"{name} was lost during the exchange ({reason}). If its machine is well, the link may be too slow for "
        "exchange_timeout; else start all islands again: the run resumes from the newest round that all hold",
        [peer],
    )


def reason(error: Exception) -> str:
    """What Gloo says, without the place in its source and its general advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0].rstrip(".")
