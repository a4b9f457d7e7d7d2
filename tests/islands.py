"""Islands as threads of the test process: no network, no processes, real code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
