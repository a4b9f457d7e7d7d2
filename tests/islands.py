"""Islands as threads of the test process: no network, no processes, real code."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

T = TypeVar("T")


def try_islands(num_islands: int, call: Callable[[int], T], timeout: float = 100) -> list[T | BaseException]:
    """Runs `call(island)` in one thread an island; returns what each returned or raised, in order.

    Raises:
        AssertionError: when islands still run after `timeout` seconds; it says how the others ended.
    """
    outcomes = _run(num_islands, call, timeout)
    return [outcomes[island] for island in range(num_islands)]


def run_islands(num_islands: int, call: Callable[[int], T], timeout: float = 100) -> list[T]:
    """As `try_islands`, but raises if an island did: what was raised first, as others may have failed for its sake."""
    outcomes = _run(num_islands, call, timeout)
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [cast(T, outcomes[island]) for island in range(num_islands)]


def _run(num_islands: int, call: Callable[[int], T], timeout: float) -> dict[int, T | BaseException]:
    """What each island returned or raised, in the order in which they ended."""
    outcomes: dict[int, T | BaseException] = {}

    def run(island: int) -> None:
        try:
            outcomes[island] = call(island)
        except BaseException as error:
            outcomes[island] = error

    threads = [threading.Thread(target=run, args=(island,), daemon=True) for island in range(num_islands)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    unfinished = [island for island in range(num_islands) if island not in outcomes]
    assert not unfinished, f"islands {unfinished} still run after {timeout} s; the others: {outcomes}"
    return outcomes


class Beside:
    """Runs `call` in a thread; its end waits for it and yields what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._failures: list[BaseException] = []

        def guarded() -> None:
            try:
                call()
            except BaseException as error:
                self._failures.append(error)

        self._thread = threading.Thread(target=guarded, daemon=True)

    def __enter__(self) -> list[BaseException]:
        self._thread.start()
        return self._failures

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises `KeyboardInterrupt` in what this thread does, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def count_files() -> int:
    """Open files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def count_open() -> tuple[int, int]:
    """Open files and threads of this process."""
    return count_files(), len(os.listdir("/proc/self/task"))
