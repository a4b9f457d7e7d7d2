"""Transfers in flight: a thread that blocks on them, deadlines, and notes that tell which island was lost first when
others fail after it."""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hf_diloco.errors import StoreError
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Traffic
from hf_diloco.utils.threads import call_within

NOTE_SECONDS = 2.0
"""Timeout of the store, and the default time to wait for the note of an island that is about to leave."""


class Work(NamedTuple):
    """One transfer in flight, with its peer and the number of the connection."""

    handle: Any
    peer: int
    connection: int


class Failure(NamedTuple):
    """The peer of a transfer that failed, and why."""

    peer: int
    reason: str


class Deadline:
    """One limit for a whole exchange: Gloo's own timeouts are per step, so a trickle of data could go on forever."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> timedelta:
        """Returns the time left, rounded up to milliseconds: Gloo truncates, and would time out too early."""
        return timedelta(milliseconds=max(1, math.ceil(1000 * (self._end - time.monotonic()))))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class Waiter:
    """A thread that blocks on transfers on behalf of others, one request after the other."""

    def __init__(self, name: str) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._num_requests = 0
        self._progress = _Progress()
        threading.Thread(
            target=_wait_for_all,
            args=(self._requests, self._progress),
            name=name,
            daemon=True,  # a transfer that Gloo does not wake must not keep the process alive
        ).start()
        self.end = weakref.finalize(self, self._requests.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether a request is not done yet."""
        return self._progress.num_done < self._num_requests

    @property
    def position(self) -> int:
        """The index of the transfer being waited for, if there is only one request."""
        return self._progress.position

    def start(self, works: list[Work], deadline: Deadline, then: Callable[[Failure | None], object]) -> None:
        """Calls `then`, on the waiter's thread, with None once all are done, or with the first failure."""
        self._num_requests += 1
        self._progress.position = 0
        self._requests.put(_Request(works, deadline, then))


class _Request(NamedTuple):
    works: list[Work]
    deadline: Deadline
    then: Callable[[Failure | None], object]


class _Progress:
    num_done = position = 0


def _wait_for_all(requests: SimpleQueue[_Request | None], progress: _Progress) -> None:
    while (request := requests.get()) is not None:
        failure, then = _first_failure(request.works, request.deadline, progress), request.then
        progress.num_done += 1
        del request  # otherwise it would keep the works, and with them the sockets, alive until the next request
        then(failure)
        del then


def _first_failure(works: list[Work], deadline: Deadline, progress: _Progress) -> Failure | None:
    for work in works:
        try:
            work.handle.wait(deadline.remaining())
        except RuntimeError as error:
            return Failure(work.peer, reason(error))
        progress.position += 1
    return None


class Transfers:
    """Transfers in flight, each with its peer, so that a failure can name the island.

    Attributes:
        damaged: peers whose data arrived corrupt. They were replaced by zeros, which every codec can decode.
        endings: functions that `check` calls at its end; they are not called if the transfers fail.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.damaged: set[int] = set()
        self.endings: list[Callable[[], None]] = []
        self._checks: list[tuple[torch.Tensor, Callable[[], bool], int]] = []
        self._numbers: Counter[tuple[str, int, int]] = Counter()
        self._sent = self._received = 0

    def add(self, work: Work, sent: int = 0, received: int = 0) -> None:
        self.works.append(work)
        self._sent += sent
        self._received += received

    def number(self, operation: str, peer: int, tag: int) -> int:
        """Numbers the transfers in one direction with one tag, from 0; the same at both ends."""
        self._numbers[operation, peer, tag] += 1
        return self._numbers[operation, peer, tag] - 1

    def expect(self, received: torch.Tensor, is_sound: Callable[[], bool], peer: int) -> None:
        """Registers a check of received data, which `check` runs."""
        self._checks.append((received, is_sound, peer))

    def check(self) -> None:
        """Checks the received data once all transfers are done; see `damaged`."""
        for received, is_sound, peer in self._checks:
            if not is_sound():
                received.zero_()
                self.damaged.add(peer)
        for ending in self.endings:
            ending()
        self._checks.clear()
        self.endings.clear()

    def drop(self) -> None:
        """Drops all transfers in flight: they hold the group, and the group its sockets."""
        self.works.clear()
        self._checks.clear()
        self.endings.clear()

    def take_traffic(self) -> Traffic:
        """Returns the traffic since the last call."""
        traffic = Traffic(self._sent, self._received)
        self._sent = self._received = 0
        return traffic


def reason(error: Exception) -> str:
    """Returns Gloo's error text without its source location and general advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0].rstrip(".")


@dataclass(frozen=True)
class LossNotes:
    """One island's notes in the store about a lost peer, one note per lane.

    An island that loses another one writes its number down, and only then closes its own connections. So an island
    that finds a connection closed can tell whether its peer was lost first or merely followed.

    Attributes:
        name: the lane's name.
        patience: seconds that an island which timed out waits for another's note. All time out at about the same
            moment: as far apart as they began.
        keeper: the island that hosts the store; None: none of them does.
    """

    store: ValueStore
    name: str
    island: int
    patience: float = NOTE_SECONDS
    keeper: int | None = 0

    def find_first(self, peer: int, timed_out: bool) -> int:
        """Notes that `peer` is gone or late, and returns the island that was lost first.

        If this end timed out, no connection was closed: `peer` may be about to time out as well and leave its note.
        """
        patience = self.patience if timed_out else 0.0
        suspect, asked = peer, {self.island}
        try:
            call_within(NOTE_SECONDS, lambda: self.store.set(self._key(self.island), str(peer)))
            while suspect not in asked:
                asked.add(suspect)
                note = call_within(patience + NOTE_SECONDS, partial(self._read, suspect, patience))
                if note is None:
                    return suspect
                suspect = note
        except (StoreError, ValueError):  # the store is gone, or an outsider writes there
            return peer if self.keeper is None else self.keeper
        except TimeoutError:  # the store is slow, or its host hangs, which breaks no connection
            return self.keeper if timed_out and self.keeper is not None else peer
        return peer  # islands that blame each other: their link is broken

    def _read(self, island: int, patience: float) -> int | None:
        note = self.store.wait([self._key(island)], patience).get(self._key(island))
        return None if note is None else int(note)

    def _key(self, island: int) -> str:
        return f"lost/{self.name}/{island}"
