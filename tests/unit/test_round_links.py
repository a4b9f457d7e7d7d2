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
from hf_diloco.membership import all_gather
from hf_diloco.membership.round_records import Attempt, offer_path
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.store.log import RunLog
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.memory import MemoryNetwork
from tests.fixed_runs import CountingObjects, Jittery, convene, offer_of, unanimity, vote
from tests.islands import run_islands, try_islands


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

    def find_broken(self) -> list[int]:
        return self.lane.find_broken()


@pytest.mark.parametrize("num_islands", [1, 2, 16])
def test_a_round_takes_one_answer_of_the_store_and_two_messages(
    num_islands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message goes half a round trip: two round trips in all."""
    monkeypatch.setattr(all_gather, "LOOK_SECONDS", 60.0)  # a busy machine may take longer than the usual look
    network, store = MemoryNetwork(num_islands), ValueStore.in_memory()

    def run(island: int) -> None:
        counting: Any = CountingObjects(store.log.store)
        links = Links(network, island)
        one = unanimity(store, island, num_islands, 50.0, links=[links], log=RunLog(counting, store.log.seal))
        for number in (1, 2, 3):
            attempt = convene(one, number, offer_of(island, serial=number))
            said = [(offer.island, offer.serial) for offer in attempt.offers]
            assert said == [(i, number) for i in range(num_islands)]
            assert vote(one, number, f"a{number}").kind == "commit"
            assert (counting.trips, links.num_sent) == (number, 2 * number)

    run_islands(num_islands, run)


def test_what_the_links_lose_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "LOOK_SECONDS", 0.1)
    network, store = MemoryNetwork(3), ValueStore.in_memory()

    def run(island: int) -> str:
        one = unanimity(store, island, 3, 30.0, links=[Links(network, island, lambda peer: True)])
        convene(one, 1, offer_of(island))
        return vote(one, 1).kind

    assert run_islands(3, run) == ["commit"] * 3


OFFERS = f"{Attempt(1, 0).path}/offers"


def message(topic: str, record: Any) -> bytes:
    return json.dumps({"topic": topic, "record": record}).encode()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"{}",
        message("rounds/00000001/00/votes", {}),
        message("rounds/00000001/01/offers", {}),
        message(OFFERS, None),
        message(OFFERS, offer_of(0).model_dump()),
    ],
    ids=["empty", "nothing", "votes", "another attempt", "no record", "in another's name"],
)
def test_a_message_about_something_else_is_passed_over(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "LOOK_SECONDS", 0.1)
    network, store = MemoryNetwork(2), ValueStore.in_memory()
    network.lane("0", 1).send_message(sent, lambda: None)
    store.log.put(offer_path(Attempt(1, 0), offer_of(1)), offer_of(1, weight=7.0))
    plan = convene(unanimity(store, 0, 2, 30.0, links=[network.lane("0", 0)]), 1, offer_of(0)).plan
    assert plan is not None
    assert [part.weight for part in plan.participants] == [1.0, 7.0]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"nonsense", "the record rounds/00000001/00/offers/1 is not JSON of this package"),
        (b"[1]", "the record rounds/00000001/00/offers/1 is not JSON of this package"),
        (b"[" * 50_000, "the record rounds/00000001/00/offers/1 is not JSON of this package"),
        (message(OFFERS, {}), "island 1 sent a OfferRecord .* install the same version on all islands"),
        (
            message(OFFERS, offer_of(1).model_dump() | {"x": 1}),
            "island 1 sent a OfferRecord .*install the same version",
        ),
    ],
)
def test_a_message_that_is_no_record_is_refused(sent: bytes, text: str) -> None:
    network = MemoryNetwork(2)
    network.lane("0", 1).send_message(sent, lambda: None)
    one = unanimity(ValueStore.in_memory(), 0, 2, 30.0, links=[network.lane("0", 0)])
    with pytest.raises(RendezvousError, match=text):
        convene(one, 1, offer_of(0))


def test_who_goes_on_while_another_leaves_learns_why_its_exchange_fails() -> None:
    """Island 1 leaves because it misses the message of island 2; island 0 has heard both."""
    network, store = MemoryNetwork(3), ValueStore.in_memory()
    has_left = threading.Event()

    def run(island: int) -> None:
        links = Links(network, island, lambda peer: island == 1 and peer == 2)
        should_stop = lambda: island == 1 and len(links.messages()) == 1  # noqa: E731
        one = unanimity(store, island, 3, 30.0, should_stop, links=[links])
        if island == 1:
            with pytest.raises(StopRequested):
                convene(one, 1, offer_of(island))
            has_left.set()
            return
        attempt = convene(one, 1, offer_of(island))
        assert attempt.plan is not None, "it has heard all"
        assert has_left.wait(30)
        with pytest.raises(IslandLostError, match="island 1 left the run before round 1"):
            one.abort(attempt, "", "island 1 was lost")

    run_islands(3, run)


def test_who_is_asked_to_stop_as_well_stops() -> None:
    store = ValueStore.in_memory()
    unanimity(store, 1, 2).leave(1)
    with pytest.raises(StopRequested):
        unanimity(store, 0, 2, should_stop=lambda: True).abort(Attempt(1, 0), "", "island 1 was lost")


def take_round(one: Unanimity, island: int, has_gone: threading.Event) -> bool:
    """One island's round, with an exchange in which all must take part; whether it is committed."""
    try:
        attempt = convene(one, 1, offer_of(island))
        outcome = one.abort(attempt, "", "cut") if has_gone.wait(0.003) else one.commit(attempt, "ab")
        if outcome.kind == "commit":
            return True
    except (StopRequested, IslandLostError):
        pass
    has_gone.set()
    return False


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
        jittery: Any = Jittery(store.log.store, seed + island)
        slow: list[Any] = [Jittery(links, seed - island)]
        log, should_stop = RunLog(jittery, store.log.seal), lambda: time.monotonic() > asked
        one = unanimity(store, island, num_islands, patience[island], should_stop, links=slow, log=log)
        return take_round(one, island, has_gone)

    with mock.patch.object(all_gather, "LOOK_SECONDS", 0.02):
        outcomes = set(run_islands(num_islands, run))
    assert len(outcomes) == 1
    if min(patience) == 5.0 and stopping is None:
        assert outcomes == {True}


def test_again_and_again_keeps_the_links_in_step() -> None:
    """Each try has its own messages, though island 1 is always slower than the others."""
    network, store = MemoryNetwork(3), ValueStore.in_memory()

    def run(island: int) -> list[str]:
        one = unanimity(store, island, 3, 30.0, links=[network.lane("0", island)])
        kinds: list[str] = []
        for number in (1, 1, 1, 2):
            time.sleep(0.02 if island == 1 else 0)
            attempt = convene(one, number, offer_of(island))
            is_damaged = number == 1 and attempt.number == island < 2
            outcome = one.abort(attempt, "an offer", "damaged") if is_damaged else one.commit(attempt, "ab")
            kinds.append(outcome.kind)
        return kinds

    assert try_islands(3, run)[0] == ["abort", "abort", "commit", "commit"]
