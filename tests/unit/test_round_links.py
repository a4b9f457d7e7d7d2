"""A round over the leaders' links: how many trips it takes, and that all commit it or none, whatever gets lost."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.errors import IslandLostError, RendezvousError, StopRequested
from hf_diloco.membership import ledger
from hf_diloco.membership.ledger import Ledger
from hf_diloco.store.torch_store import ValueStore
from hf_diloco.transport.memory import MemoryNetwork
from tests.islands import CountingStore, run_islands, try_islands


def ok(digest: str = "ab") -> dict[str, Any]:
    return {"ok": True, "digest": digest}


class Links:
    """An end of the links of which some of the others' messages never come."""

    def __init__(
        self, network: MemoryNetwork, island: int, is_lost: Callable[[int], bool] = lambda peer: False
    ) -> None:
        self.lane = network.lane("0", island)
        self.num_sent = 0
        self._is_lost = is_lost
        self._lost: set[int] = set()

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        self.num_sent += 1
        self._lost = {peer for peer in range(self.lane.num_islands) if self._is_lost(peer)}
        return self.lane.send_message(message, notify)

    def messages(self) -> dict[int, bytes]:
        return {peer: message for peer, message in self.lane.messages().items() if peer not in self._lost}


@pytest.mark.parametrize("num_islands", [1, 2, 16])
def test_a_round_takes_one_answer_of_the_store_and_two_messages(
    num_islands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message goes half a round trip: two round trips in all."""
    monkeypatch.setattr(ledger, "LOOK_SECONDS", 60.0)  # a busy machine may take longer than the usual look
    network, store = MemoryNetwork(num_islands), ValueStore.in_memory()

    def run(island: int) -> None:
        counting: Any = CountingStore(store)
        links = Links(network, island)
        book = Ledger(counting, island, num_islands, links=[links])
        for number in (1, 2, 3):
            arrived = book.arrive(number, {"island": island, "round": number}, 50)
            assert arrived == [{"island": other, "round": number} for other in range(num_islands)]
            committed, votes = book.settle(number, ok(f"{number}"), 50)
            assert committed
            assert votes == {str(other): ok(f"{number}") for other in range(num_islands)}
            assert (counting.trips, links.num_sent) == (number, 2 * number)

    run_islands(num_islands, run)


def test_what_the_links_lose_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOOK_SECONDS", 0.1)
    network, store = MemoryNetwork(3), ValueStore.in_memory()

    def run(island: int) -> bool:
        book = Ledger(store, island, 3, links=[Links(network, island, lambda peer: True)])
        assert len(book.arrive(1, {"weight": 1}, 30)) == 3
        return book.settle(1, ok(), 30)[0]

    assert run_islands(3, run) == [True] * 3


@pytest.mark.parametrize(
    "message",
    [b"", b"{}", json.dumps({"topic": "round/1/vote", "record": {}}).encode(), b'{"topic": "round/1/arrived"}'],
)
def test_a_message_about_something_else_is_passed_over(message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOOK_SECONDS", 0.1)
    network, store = MemoryNetwork(2), ValueStore.in_memory()
    network.lane("0", 1).send_message(message, lambda: None)
    store.set("round/1/arrived/1", json.dumps({"weight": 7}))
    book = Ledger(store, 0, 2, links=[network.lane("0", 0)])
    assert book.arrive(1, {"weight": 1}, 30) == [{"weight": 1}, {"weight": 7}]


@pytest.mark.parametrize("message", [b"nonsense", b"[1]", b"[" * 50_000])
def test_a_message_that_is_no_record_is_refused(message: bytes) -> None:
    network = MemoryNetwork(2)
    network.lane("0", 1).send_message(message, lambda: None)
    with pytest.raises(RendezvousError, match="the record round/1/arrived/1 is not JSON of this package"):
        Ledger(ValueStore.in_memory(), 0, 2, links=[network.lane("0", 0)]).arrive(1, {}, 30)


def test_who_goes_on_while_another_leaves_learns_why_its_exchange_fails() -> None:
    """Island 1 leaves because it misses the message of island 2; island 0 has heard both."""
    network, store = MemoryNetwork(3), ValueStore.in_memory()
    has_left = threading.Event()

    def run(island: int) -> bool:
        links = Links(network, island, lambda peer: island == 1 and peer == 2)
        book = Ledger(store, island, 3, lambda: island == 1 and len(links.messages()) == 1, links=[links])
        if island == 1:
            with pytest.raises(StopRequested):
                book.arrive(1, {}, 30)
            has_left.set()
            return False
        assert len(book.arrive(1, {}, 30)) == 3, "it has heard all"
        assert has_left.wait(30)
        committed, _ = book.settle(1, {"ok": False, "digest": "", "reason": "island 1 was lost"}, 30)
        with pytest.raises(IslandLostError, match="island 1 left the run before round 1"):
            book.check_plan(1, 30)
        return committed

    assert run_islands(3, run) == [False] * 3


def test_a_plan_that_nobody_wrote_explains_nothing() -> None:
    Ledger(ValueStore.in_memory(), 0, 2).check_plan(1, 30)


def test_who_is_asked_to_stop_as_well_stops() -> None:
    store = ValueStore.in_memory()
    Ledger(store, 1, 2).leave(1)
    with pytest.raises(StopRequested):
        Ledger(store, 0, 2, should_stop=lambda: True).check_plan(1, 30)


class Jittery:
    """Lets other threads in between any two operations of a store or of links."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            result = operation(*arguments)
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            return result

        return call


def take_round(book: Ledger, patience: float, has_gone: threading.Event) -> bool:
    """One island's round, with an exchange in which all must take part; whether it is committed."""
    try:
        book.arrive(1, {}, patience)
    except (StopRequested, IslandLostError):
        has_gone.set()
        return False
    exchanged = not has_gone.wait(0.003)
    committed, _ = book.settle(1, ok() if exchanged else {"ok": False, "digest": ""}, patience)
    if not committed:
        has_gone.set()
    return committed


@given(
    seed=st.integers(0, 1 << 30),
    patience=st.lists(st.sampled_from([0.0, 0.003, 0.01, 5.0]), min_size=2, max_size=4),
    losing=st.sets(st.integers(0, 3)),
    stopping=st.sampled_from([None, None, 0.0, 0.005, 0.015]),
)
@settings(max_examples=80)
def test_all_commit_a_round_or_none_whoever_leaves_gives_up_or_loses_its_links(
    seed: int, patience: Sequence[float], losing: set[int], stopping: float | None
) -> None:
    """Island 0 may stop; islands with little patience give up; those in `losing` miss half of the messages."""
    num_islands = len(patience)
    network, store, has_gone = MemoryNetwork(num_islands), ValueStore.in_memory(), threading.Event()
    chance = random.Random(seed)

    def run(island: int) -> bool:
        asked = time.monotonic() + stopping if stopping is not None and island == 0 else float("inf")
        links = Links(network, island, lambda peer: island in losing and chance.random() < 0.5)
        jittery: list[Any] = [Jittery(store, seed + island), Jittery(links, seed - island)]
        book = Ledger(jittery[0], island, num_islands, lambda: time.monotonic() > asked, links=jittery[1:])
        return take_round(book, patience[island], has_gone)

    with mock.patch.object(ledger, "LOOK_SECONDS", 0.02):
        outcomes = set(run_islands(num_islands, run))
    assert len(outcomes) == 1
    if min(patience) == 5.0 and stopping is None:
        assert outcomes == {True}


def test_again_and_again_keeps_the_links_in_step() -> None:
    """Each try has its own messages, though island 1 is always slower than the others."""
    network, store = MemoryNetwork(3), ValueStore.in_memory()

    def run(island: int) -> list[bool]:
        book = Ledger(store, island, 3, links=[network.lane("0", island)])
        committed = []
        for number in (1, 1, 1, 2):
            time.sleep(0.02 if island == 1 else 0)
            again = {"ok": False, "digest": "", "reason": "damaged", "again": True}
            book.arrive(number, {"island": island}, 30)
            is_damaged = number == 1 and book.tries(1) == island
            committed.append(book.settle(number, again if is_damaged else ok(), 30)[0])
        return committed

    assert try_islands(3, run)[0] == [False, False, False, True]
