"""Islands as threads of the test process: no network, no processes, real code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def try_islands(num_islands: int, call: Callable[[int], T], timeout: float = 60) -> list[T | BaseException]:
    """Runs `call(island)` in one thread an island; returns what each returned or raised, in order.

    Raises:
        AssertionError: when an island still runs after `timeout` seconds.
    """
    outcomes: dict[int, T | BaseException] = {}

    def run(island: int) -> None:
        try:
            outcomes[island] = call(island)
        except BaseException as error:
            outcomes[island] = error

    threads = [threading.Thread(target=run, args=(island,), daemon=True) for island in range(num_islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    unfinished = [island for island in range(num_islands) if island not in outcomes]
    assert not unfinished, f"islands {unfinished} still run after {timeout} s; the others: {outcomes}"
    return [outcomes[island] for island in range(num_islands)]


def run_islands(num_islands: int, call: Callable[[int], T], timeout: float = 60) -> list[T]:
    """As `try_islands`, but raises the first island's error if there is one."""
    results = []
    for outcome in try_islands(num_islands, call, timeout):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
