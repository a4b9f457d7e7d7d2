"""How many requests to the store follow one another in a round: each takes as long as a trip to a bucket and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.store import objects
from hf_diloco.store.backends import Cloud
from tests.clocks import FastClock
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting

REQUEST_SECONDS = 0.2
ROUNDS = 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FastClock:
    """By which each request takes `REQUEST_SECONDS`."""
    clock = FastClock()

    def delayed(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            clock.sleep(REQUEST_SECONDS)
            return operation(*args, **options)

        return run

    monkeypatch.setattr(objects, "NEAR", frozenset())
    for name in ("create", "put", "read", "read_range", "find", "delete"):
        monkeypatch.setattr(Cloud, name, delayed(getattr(Cloud, name)))
    return clock


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_islands", [2, 6])
def test_a_round_takes_few_requests_one_after_another_however_many_islands_there_are(
    num_islands: int, engine: str, clock: FastClock, tmp_path: Path
) -> None:
    """Before: 24 to 30 of two islands, and two for each further one."""
    meeting = Meeting(tmp_path, num_islands, min_islands=num_islands, grace=60.0, sync_timeout=60.0, **ENGINES[engine])
    meeting.clock = clock  # type: ignore[misc]
    at_once = threading.Barrier(num_islands)
    taken: list[float] = []

    def island(number: int) -> None:
        member = meeting.island(number)
        for _ in range(ROUNDS):
            for _ in range(2):
                member.step()
            at_once.wait()
            begun = clock.now()
            member.sync()
            taken.append((clock.now() - begun) / REQUEST_SECONDS)

    with clock:
        run_islands(num_islands, island)
    later = sorted(taken)[: num_islands * (ROUNDS - 1)]  # not the first: connections are made
    assert max(later) < 19, later
