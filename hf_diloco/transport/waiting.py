"""Waiting for sends and receives under way: a thread that blocks on them, until when, and with whom it began where
islands give up one after the other.
"""

from __future__ import annotations

import math
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from hf_diloco.errors import StoreError
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.threads import call_within

NOTE_SECONDS = 2.0
"""How long the store may take, and, where nothing else is said, a note that an island is about to leave."""


class Work(NamedTuple):
    """One send or receive under way, and over which of the connections to its peer."""

    handle: Any
    peer: int
    connection: int


class Failure(NamedTuple):
    """The peer of a transfer that failed, and why."""

    peer: int
    reason: str


class Deadline:
    """One limit for a whole exchange: Gloo's own timeouts are per step, and a trickle could go on for ever."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> timedelta:
        """Rounded up to milliseconds: Gloo cuts off the rest, and would time out just before the deadline is over."""
        return timedelta(milliseconds=max(1, math.ceil(1000 * (self._end - time.monotonic()))))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


class Waiter:
    """A thread that blocks on transfers, so that nobody else must: on those of one request after the other.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._num_requests = 0
        self._progress = _Progress()
        threading.Thread(
            target=_wait_for_all,
            args=(self._requests, self._progress),
            name=name,
            daemon=True,  # a transfer that Gloo does not wake must not keep the process
        ).start()
        self.end = weakref.finalize(self, self._requests.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether a request has yet to be done."""
        return self._progress.num_done < self._num_requests

    @property
    def position(self) -> int:
        """The number of the transfer that is waited for, among those of the only request."""
        return self._progress.position

    def start(self, works: list[Work], deadline: Deadline, then: Callable[[Failure | None], object]) -> None:
        """Calls `then`, on that thread, with None once all are done, or with the first failure."""
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
        del request  # or it would keep the works, and through them the sockets, until the next
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


def reason(error: Exception) -> str:
    """What Gloo says, without the place in its source and its general advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0].rstrip(".")


class LossNotes:
    """One island's notes in the store, one a lane.

    An island that loses another writes its number down, and only then closes its own connections. So whoever finds a
    connection closed can tell an island that is gone from one that merely followed.

    Args:
        store: reaches all islands.
        name: the lane's name.
        island: this island's number.
        patience: seconds that an island which timed out waits for another's note. All time out at about the same
            moment: as far apart as they began.
        keeper: the island that keeps the store; None: none of them does.
    """

    def __init__(
        self, store: ValueStore, name: str, island: int, patience: float = NOTE_SECONDS, keeper: int | None = 0
    ) -> None:
        self._store = store
        self._name = name
        self._island = island
        self._patience = patience
        self._keeper = keeper

    def find_first(self, peer: int, timed_out: bool) -> int:
        """Notes that `peer` is gone, or late, and returns the island with which it began.

        Args:
            peer: whom this island found missing.
            timed_out: nothing was closed: `peer` may be about to find out the same and leave its note.
        """
        patience = self._patience if timed_out else 0.0
        suspect, asked = peer, {self._island}
        try:
            call_within(NOTE_SECONDS, lambda: self._store.set(self._key(self._island), str(peer)))
            while suspect not in asked:
                asked.add(suspect)
                note = call_within(patience + NOTE_SECONDS, partial(self._read, suspect, patience))
                if note is None:
                    return suspect
                suspect = note
        except (StoreError, ValueError):  # the store is gone, or somebody else writes there
            return peer if self._keeper is None else self._keeper
        except TimeoutError:  # it is slow; or its keeper stands still, which breaks no connection
            return self._keeper if timed_out and self._keeper is not None else peer
        return peer  # they blame each other: it is the link that is gone

    def _read(self, island: int, patience: float) -> int | None:
        note = self._store.wait([self._key(island)], patience).get(self._key(island))
        return None if note is None else int(note)

    def _key(self, island: int) -> str:
        return f"lost/{self._name}/{island}"
