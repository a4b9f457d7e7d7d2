"""How many requests to the store follow one another in a round: each takes as long as a trip to a bucket and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_diloco.rounds import open as opening
from hf_diloco.store import log, long_poll, objects
from hf_diloco.store.backends import Cloud, Server
from hf_diloco.store.long_poll import MAX_WAIT_SECONDS
from hf_diloco.utils.threads import ask_together
from tests.clocks import FastClock
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting, Member, bury
from tests.store_servers import serving

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
        bury()  # after the clock has ended, their threads would not
    later = sorted(taken)[: num_islands * (ROUNDS - 1)]  # not the first: connections are made
    assert max(later) < 19, later


@pytest.mark.parametrize("engine", ENGINES)
def test_at_a_server_of_ours_a_round_asks_a_few_questions(engine: str, tmp_path: Path) -> None:
    """One after the other: before the round, offer, plan, vote, and outcome, unless that was there with the votes."""
    with serving(tmp_path) as address:
        meeting = Meeting(tmp_path, 3, min_islands=3, grace=60.0, sync_timeout=60.0, **ENGINES[engine])
        meeting.url = f"{address}/run"
        at_once = threading.Barrier(3)
        asked: list[int] = []

        def island(number: int) -> Member:
            member = meeting.island(number)
            store = member.session.store
            server = store._backend
            assert isinstance(server, Server)
            for _ in range(ROUNDS):
                member.step()
                member.step()
                at_once.wait()
                with (
                    mock.patch.object(store, "poll", wraps=store.poll) as ask,
                    mock.patch.object(server, "create", wraps=server.create) as create,
                ):
                    member.sync()
                asked.append(ask.call_count + create.call_count)
            return member

        members = run_islands(3, island)
    assert [len(member.reports) for member in members] == [ROUNDS] * 3
    assert len({member.hash for member in members}) == 1
    assert 4 <= min(asked) <= 5, asked


@pytest.fixture
def num_requests(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many requests this thread has made, one after another; those made together count once."""
    numbers = threading.local()

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            numbers.own = count() + 1
            return operation(*args, **options)

        return run

    def count() -> int:
        return getattr(numbers, "own", 0)

    monkeypatch.setattr(objects.ObjectStore, "_retry", counted(objects.ObjectStore._retry))
    for module in (log, long_poll):
        monkeypatch.setattr(module, "ask_together", counted(ask_together))
    return count


@pytest.mark.parametrize("num_islands", [2, 4, 8])
def test_at_island_0_a_round_takes_two_requests_however_many_islands_there_are(
    num_islands: int, num_requests: Callable[[], int], free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offer, answered by the plan; vote, answered by the outcome. While connections are made, also one before."""
    monkeypatch.setattr(opening, "_LINGER_SECONDS", MAX_WAIT_SECONDS)  # so many islands share this machine
    quorum: dict[str, Any] = {"min_islands": num_islands - 1, "grace": 60.0, "sync_timeout": 60.0}
    meeting = Meeting(tmp_path, num_islands, bind_address="127.0.0.1", **quorum)
    meeting.url = f"tcp://127.0.0.1:{free_port}"
    at_once = threading.Barrier(num_islands)
    fewest: dict[int, int] = {}

    def island(number: int) -> Member:
        member = meeting.island(number)
        for _ in range(ROUNDS):
            member.step()
            member.step()
            at_once.wait()
            before = num_requests()
            member.sync()
            fewest[number] = min(fewest.get(number, 100), num_requests() - before)
        at_once.wait()
        return member.leave()

    members = run_islands(num_islands, island)
    assert [len(member.reports) for member in members] == [ROUNDS] * num_islands
    assert len({member.hash for member in members}) == 1
    assert [fewest[number] for number in range(1, num_islands)] == [2] * (num_islands - 1)
