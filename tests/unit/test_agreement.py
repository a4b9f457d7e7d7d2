"""Rounds that need all islands, over a store in memory and a real one; what a rendezvous says when it cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings, strategies as st

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DuplicateIslandError, IslandLostError, RendezvousError, StopRequested
from hf_diloco.membership import unanimity as membership_unanimity
from hf_diloco.membership.all_gather import (
    LOOK_SECONDS,
    AllGather,
    CheckpointsRecord,
    JoinRecord,
    StateRecord,
    parse_records,
)
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord, VoteRecord, offer_path, vote_path
from hf_diloco.membership.unanimity import MAX_TRIES
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import find_address
from hf_diloco.store.server import StoreServer
from hf_diloco.store.signing import Seal
from hf_diloco.store.tcp_store import Rendezvous, meet
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.threads import call_within
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import AT_ONCE, LONG, FastClock
from tests.fixed_runs import CountingObjects, Jittery, convene, offer_of, unanimity, vote
from tests.islands import run_islands, try_islands
from tests.store_servers import serving_app
from tests.tcp_stores import KeptStore, await_value

Stores = Callable[[int], ValueStore]


@pytest.fixture(params=["memory", "tcp"])
def stores(request: pytest.FixtureRequest) -> Stores:
    """Gives each island its access to one common store."""
    if request.param == "memory":
        memory = ValueStore.in_memory()
        return lambda island: memory
    keeper, opened = KeptStore(), dict[int, ValueStore]()

    def open_one(island: int) -> ValueStore:
        if island not in opened:
            opened[island] = keeper.client()
        return opened[island]

    return open_one


@pytest.fixture
def clock() -> Iterator[FastClock]:
    """For those who wait for nothing but time."""
    with FastClock() as fast:
        yield fast


# Joining


def test_an_island_number_can_be_taken_once(stores: Stores) -> None:
    """Where no island may come back, also not after its process has ended."""
    Members(stores(0).log, 0).enter(may_return=False)
    Members(stores(1).log, 1).enter(may_return=False)
    with pytest.raises(
        DuplicateIslandError,
        match=rf"already joined this run as island 1 \(process {os.getpid()} on .*\): give every island its own",
    ):
        Members(stores(1).log, 1).enter(may_return=False)


@pytest.mark.parametrize("num_islands", [1, 2, 5])
def test_all_islands_read_all_records_in_order(stores: Stores, num_islands: int) -> None:
    def run(island: int) -> list[Any]:
        return AllGather(stores(island), island, num_islands).share("topic", {"island": island}, 20)

    expected = [{"island": island} for island in range(num_islands)]
    assert run_islands(num_islands, run) == [expected] * num_islands


def test_who_does_not_share_in_time_is_named(stores: Stores) -> None:
    started = time.monotonic()
    with pytest.raises(IslandLostError, match=r"islands \[0, 2\] are missing after 0.3 s") as caught:
        AllGather(stores(1), 1, 3).share("topic", {}, 0.3)
    assert caught.value.islands == (0, 2)
    assert 0.3 <= time.monotonic() - started < AT_ONCE


def test_a_wish_to_stop_ends_a_wait(stores: Stores) -> None:
    with pytest.raises(StopRequested):
        AllGather(stores(0), 0, 2, should_stop=lambda: True).share("topic", {}, 20)


def test_a_farewell_is_waited_for_in_spite_of_a_wish_to_stop(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> int:
        clock.sleep(0.3 * island)
        return len(
            AllGather(stores(island), island, 2, lambda: True, clock=clock).share("done", {}, 20, interruptible=False)
        )

    assert run_islands(2, run) == [2, 2]


# A round


@pytest.mark.parametrize("num_islands", [1, 2, 4])
def test_rounds_that_go_well(stores: Stores, num_islands: int) -> None:
    def run(island: int) -> None:
        one = unanimity(stores(island), island, num_islands)
        for number in (1, 2, 3):
            attempt = convene(one, number, offer_of(island, 1.0 + island, serial=number))
            assert attempt.path == f"rounds/0000000{number}/00"
            assert attempt.plan is not None
            assert [part.weight for part in attempt.plan.participants] == [1.0 + other for other in range(num_islands)]
            assert [offer.serial for offer in attempt.offers] == [number] * num_islands
            outcome = vote(one, number, f"a{number}")
            assert (outcome.kind, outcome.mean) == ("commit", f"a{number}")

    run_islands(num_islands, run)


def say(store: ValueStore, number: int, *records: OfferRecord | VoteRecord) -> None:
    """Leaves what islands say in the first attempt of a round in the store."""
    attempt = Attempt(number, 0)
    for record in records:
        is_vote = isinstance(record, VoteRecord)
        path = vote_path(attempt.path, record.island) if is_vote else offer_path(attempt, record)  # type: ignore[arg-type]
        store.log.put(path, record)


def yes(island: int, mean: str = "ab") -> VoteRecord:
    return VoteRecord(island=island, mean=mean)


@pytest.mark.parametrize("num_islands", [2, 16])
def test_a_round_without_links_takes_as_few_round_trips_with_many_islands_as_with_two(num_islands: int) -> None:
    keeper = KeptStore()
    store = keeper.client()
    counting: Any = CountingObjects(store.log.store)
    one = unanimity(store, 0, num_islands, log=RunLog(counting, store.log.seal))
    say(store, 1, *map(offer_of, range(1, num_islands)), *map(yes, range(1, num_islands)))
    plan = convene(one, 1, offer_of(0)).plan
    assert plan is not None
    assert plan.islands == set(range(num_islands))
    assert vote(one, 1).kind == "commit"
    assert counting.trips == 3, "twice: what do all say; and once: does my outcome count"


def test_votes_that_come_between_two_looks_agree(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look at the others' votes comes just before they vote."""
    log, looked = stores(0).log, threading.Event()
    look = log.store.list

    def look_too_soon(prefix: str = "") -> list[tuple[str, int]]:
        found = look(prefix)
        if not looked.is_set() and prefix.endswith("/votes/"):
            looked.set()
            say(stores(1), 1, yes(1))
        return found

    monkeypatch.setattr(log.store, "list", look_too_soon)
    one = unanimity(stores(0), 0, 2, log=log)
    assert vote(one, 1).kind == "commit"
    assert looked.is_set()
    assert one.current(1).number == 0


def test_who_does_not_come_in_time_is_named_to_all(stores: Stores) -> None:
    def run(island: int) -> None:
        if island != 1:
            convene(unanimity(stores(island), island, 3, 0.5 if island == 0 else 20.0), 4, offer_of(island))

    outcomes = try_islands(3, run)
    for island in (0, 2):
        outcome = outcomes[island]
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (1,)
        assert "island 1 did not reach round 4" in str(outcome)
        assert "sync_timeout" in str(outcome)
        assert "start all islands again" in str(outcome)


def assert_both_lose_island_2_at_once(run: Callable[[int], None], text: str) -> None:
    started = time.monotonic()
    outcomes = try_islands(3, run)
    assert time.monotonic() - started < AT_ONCE
    for outcome in outcomes[:2]:
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (2,)
        assert text in str(outcome)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ({}, "island 2 left the run before round 1: it was asked to stop"),
        ({"failed": True}, "island 2 left the run before round 1: its training ended in an error"),
        ({"finished": True}, "island 2 ended after round 0, and others have more steps to take"),
    ],
)
def test_who_leaves_wakes_those_who_wait(stores: Stores, clock: FastClock, ending: dict[str, bool], text: str) -> None:
    def run(island: int) -> None:
        one = unanimity(stores(island), island, 3, 60.0, clock=clock)
        if island == 2:
            clock.sleep(0.3)
            one.leave(1, **ending)
        else:
            convene(one, 1, offer_of(island))

    assert_both_lose_island_2_at_once(run, text)


def test_who_is_asked_to_stop_while_waiting_leaves(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> None:
        asked = clock.now() + 0.3 if island == 0 else float("inf")
        if island != 2:
            one = unanimity(stores(island), island, 3, 60.0, lambda: clock.now() > asked, clock=clock)
            convene(one, 1, offer_of(island))

    first, second, _ = try_islands(3, run)
    assert isinstance(first, StopRequested)
    assert isinstance(second, IslandLostError)
    assert second.islands == (0,)


def test_once_all_have_come_it_is_too_late_to_leave(stores: Stores) -> None:
    """Island 1 goes on with the round: an island that knows it must take part."""
    say(stores(1), 1, offer_of(1))
    plan = convene(unanimity(stores(0), 0, 2, should_stop=lambda: True), 1, offer_of(0)).plan
    assert plan is not None
    assert plan.islands == {0, 1}


def test_who_is_gone_is_not_waited_for(stores: Stores, clock: FastClock) -> None:
    """Island 2's connection breaks; island 0's breaks as well, but it is there."""

    def run(island: int) -> None:
        if island != 2:
            one = unanimity(stores(island), island, 3, 60.0, find_broken=lambda: {0, 2}, clock=clock)
            convene(one, 1, offer_of(island))

    assert_both_lose_island_2_at_once(run, "island 2 lost before round 1: the connection broke")


def test_a_connection_that_is_broken_once_is_no_reason(stores: Stores, clock: FastClock) -> None:
    looks = iter([{1}, set(), {1}, set()])

    def run(island: int) -> None:
        if island == 0:
            one = unanimity(stores(0), 0, 2, 60.0, find_broken=lambda: next(looks, set()), clock=clock)
        else:
            clock.sleep(4.5 * LOOK_SECONDS)
            one = unanimity(stores(1), 1, 2, 60.0, clock=clock)
        convene(one, 1, offer_of(island))

    run_islands(2, run)
    assert next(looks, None) is None, "it has looked four times"


def assert_island_2_has_no_vote(outcomes: list[Any]) -> None:
    for outcome in outcomes[:2]:
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (2,)
        assert "round 1 was aborted; islands [2] did not vote, being lost or late; start all" in str(outcome)


def test_who_is_gone_cannot_vote(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> None:
        if island != 2:
            vote(unanimity(stores(island), island, 3, 60.0, find_broken=lambda: {2}, clock=clock), 1)

    started = time.monotonic()
    assert_island_2_has_no_vote(try_islands(3, run))
    assert time.monotonic() - started < AT_ONCE


def test_one_who_does_not_vote_aborts_in_time(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> None:
        if island != 2:
            vote(unanimity(stores(island), island, 3, 0.4, clock=clock), 1)

    assert_island_2_has_no_vote(try_islands(3, run))


def test_of_a_round_that_failed_who_gave_it_up_before_is_named(stores: Stores) -> None:
    unanimity(stores(1), 1, 3).leave(1)
    with pytest.raises(IslandLostError, match="island 1 left the run before round 1") as caught:
        unanimity(stores(0), 0, 3).abort(Attempt(1, 0), "", "the link was cut")
    assert caught.value.islands == (1,)


def test_who_leaves_when_a_round_has_failed_is_not_to_blame(stores: Stores) -> None:
    assert not unanimity(stores(0), 0, 3).abort(Attempt(1, 0), "", "the link was cut").lost
    unanimity(stores(1), 1, 3).leave(1)
    with pytest.raises(IslandLostError, match="round 1 was aborted; island 0: the link was cut; start all") as caught:
        vote(unanimity(stores(2), 2, 3), 1)
    assert caught.value.islands == ()


def test_different_averages_have_the_round_taken_again_and_the_third_time_end_it(stores: Stores) -> None:
    def run(island: int) -> list[tuple[str, int]]:
        one = unanimity(stores(island), island, 3)
        seen = []
        for _ in range(3):
            plan = convene(one, 1, offer_of(island)).plan
            assert plan is not None
            assert plan.islands == {0, 1, 2}
            outcome = vote(one, 1, "ab" if island else "cd")
            assert outcome.is_split
            seen.append((outcome.reason, one.current(1).number))
        return seen

    reason = (
        "the islands computed different averages (island 0: cd, island 1: ab, island 2: ab): suspect memory of island "
        "0, or what differs between machines"
    )
    assert run_islands(3, run) == [[(reason, 1), (reason, 2), (reason, 3)]] * 3
    assert MAX_TRIES == 3


def test_what_came_damaged_has_the_round_taken_again(stores: Stores) -> None:
    def run(island: int) -> list[bool]:
        one = unanimity(stores(island), island, 2)
        first = vote(one, 1) if island else one.abort(Attempt(1, 0), "the offer", "damaged")
        assert (first.reason, one.current(1).number) == ("island 0: damaged", 1)
        return [first.is_split, vote(one, 1).kind == "commit"]

    assert run_islands(2, run) == [[True, True]] * 2


def test_what_came_damaged_in_the_last_attempt_ends_the_round(stores: Stores) -> None:
    one = unanimity(stores(0), 0, 2, 60.0)
    assert not one.abort(Attempt(1, MAX_TRIES - 1), "the offer", "damaged").is_split


def test_an_outcome_that_was_damaged_ends_the_round_of_who_cannot_know_what_it_was(stores: Stores) -> None:
    log = stores(0).log
    log.store.put("rounds/00000001/00/outcome.json", b"made up")
    log.put(vote_path("rounds/00000001/00", 1), VoteRecord(island=1, mean="ab"))
    with pytest.raises(IslandLostError, match=r"outcome\.json is damaged, and an island that has voted .*; start all"):
        unanimity(stores(0), 0, 2).abort(Attempt(1, 0), "", "the link was cut")


def test_one_who_failed_aborts_at_once(stores: Stores) -> None:
    def run(island: int) -> None:
        one = unanimity(stores(island), island, 3, 60.0)
        if island:
            vote(one, 1)
        else:
            assert one.abort(Attempt(1, 0), "", "link cut").kind == "abort"

    started = time.monotonic()
    outcomes = try_islands(3, run)
    assert outcomes[0] is None
    for outcome in outcomes[1:]:
        assert isinstance(outcome, IslandLostError)
        assert "round 1 was aborted; island 0: link cut" in str(outcome)
    assert time.monotonic() - started < AT_ONCE


@given(
    seed=st.integers(0, 1 << 30),
    patience=st.lists(st.sampled_from([0.0, 0.003, 0.01, 5.0]), min_size=2, max_size=4),
    failing=st.sampled_from([None, None, None, 0, 1]),
)
@settings(max_examples=40)
def test_giving_up_races_with_committing_and_all_read_one_outcome(
    seed: int, patience: list[float], failing: int | None
) -> None:
    store = ValueStore.in_memory()

    def run(island: int) -> bool:
        time.sleep(random.Random(seed + island).choice([0, 0.005, 0.01, 0.02]))  # one begins late
        jittery: Any = Jittery(store.log.store, seed + island)
        log = RunLog(jittery, store.log.seal)
        one = unanimity(store, island, len(patience), patience[island], log=log)
        try:
            outcome = one.abort(Attempt(1, 0), "", "cut") if island == failing else vote(one, 1)
        except IslandLostError:
            return False
        return outcome.kind == "commit"

    outcomes = set(run_islands(len(patience), run))
    assert len(outcomes) == 1
    if failing is not None:
        assert outcomes == {False}
    if failing is None and min(patience) == 5.0:
        assert outcomes == {True}


# Strange records


BAD_JSON = [b"", b"\xff\xfe", b"{", b"[1, 2]", b'"text"', b"null", b"7", b"[" * 100_000, b"9" * 10_000]


@pytest.mark.parametrize("raw", BAD_JSON, ids=[raw[:10].decode(errors="replace") for raw in BAD_JSON])
def test_what_is_no_record_is_refused(stores: Stores, raw: bytes) -> None:
    stores(1).set("topic/1", raw)
    with pytest.raises(RendezvousError, match="the record topic/1 is not JSON of this package"):
        AllGather(stores(0), 0, 2).share("topic", {}, 5)


def test_records_of_rounds_that_are_over_go(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may have many thousands, and who keeps the store has it in memory."""
    monkeypatch.setattr(membership_unanimity, "KEPT_ATTEMPTS", 2)

    def run(island: int) -> None:
        one = unanimity(stores(island), island, 2)
        for number in range(1, 6):
            convene(one, number, offer_of(island))
            assert vote(one, number).kind == "commit"

    run_islands(2, run)
    said = ["offers/00000-000001-000001", "offers/00001-000001-000001", "votes/00000", "votes/00001"]
    decided = ["outcome", "plan"]
    kept = [f"rounds/00000005/00/{name}.json" for name in sorted([*decided, *said])]
    kept = [*(f"rounds/00000004/00/{name}.json" for name in decided), *kept]
    deadline = time.monotonic() + AT_ONCE
    while (left := stores(0).log.list("rounds")) != kept:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the record values/topic/0\.json has 4\d{6,} bytes, more than"):
        AllGather(ValueStore.in_memory(), 0, 2).share("topic", {"text": "x" * (3 << 20)}, 5)


@pytest.mark.parametrize("rubbish", [b"\xff\xff", b"{}", b" ", b'{"body": "{}", "mac": "00"}'])
def test_rubbish_in_the_place_of_a_decision_decides_nothing(stores: Stores, clock: FastClock, rubbish: bytes) -> None:
    for name in ("plan", "outcome"):
        stores(1).log.store.put(f"rounds/00000001/00/{name}.json", rubbish)

    def run(island: int) -> str:
        one = unanimity(stores(island), island, 2, clock=clock)
        convene(one, 1, offer_of(island))
        return vote(one, 1).kind

    assert run_islands(2, run) == ["commit"] * 2
    assert stores(0).log.read("rounds/00000001/00/outcome-2.json", OutcomeRecord)


@pytest.mark.parametrize("rubbish", [b"{", b"[]", b'{"island": 1, "mean": "ab"}'])
def test_rubbish_in_the_place_of_a_vote_commits_nothing(stores: Stores, clock: FastClock, rubbish: bytes) -> None:
    stores(1).log.store.put(vote_path("rounds/00000001/00", 1), rubbish)
    with pytest.raises(IslandLostError, match=r"islands \[1\] did not vote"):
        vote(unanimity(stores(0), 0, 2, 5.0, clock=clock), 1)


def test_a_commit_of_another_average_ends_the_run(stores: Stores) -> None:
    """Whoever has the run's key can write one."""
    stores(1).log.put("rounds/00000001/00/outcome.json", OutcomeRecord(by=1, kind="commit", mean="cd"))
    say(stores(1), 1, yes(1))
    with pytest.raises(IslandLostError, match="island 1 says that all hold another average; start all islands again"):
        vote(unanimity(stores(0), 0, 2), 1)


JOIN = {
    "host": "h",
    "folder": "/f",
    "fingerprint": {"sync_every": 5, "payload": "fp32", "outer_lr": 0.7, "nesterov": True, "x": None},
    "layout": {"ranks": ["ab", "cd"], "replicated": False},
}
RECORDS: list[tuple[Any, dict[str, Any]]] = [
    (JoinRecord, JOIN),
    (StateRecord, {"round": 3, "digest": "ab12", "resumed": False}),
    (CheckpointsRecord, {"rounds": {1: ["ab12"], 2: ["cd34", "ef56"]}}),
]


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_good_records_are_understood(kind: Any, record: dict[str, Any]) -> None:
    sent = json.loads(json.dumps(record))
    assert [parsed.model_dump() for parsed in parse_records(kind, [sent, sent])] == [record, record]


@pytest.mark.parametrize(("kind", "record"), RECORDS)
@pytest.mark.parametrize("wrong", [None, [], {}, "text", -1, float("nan"), float("inf"), 10**400, {"deep": [[[]]]}])
def test_records_of_wrong_types_are_refused_with_the_island(kind: Any, record: dict[str, Any], wrong: object) -> None:
    for key, right in record.items():
        changed = {**record, key: wrong}
        if isinstance(wrong, type(right)) and wrong != -1:  # of the right type, if nothing else
            continue
        with pytest.raises(RendezvousError, match=rf"^island 1 sent a {kind.__name__} .*install the same version"):
            parse_records(kind, [record, changed])


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_records_with_more_or_fewer_keys_are_refused(kind: Any, record: dict[str, Any]) -> None:
    with pytest.raises(RendezvousError, match=r"island 0 sent a .*extra"):
        parse_records(kind, [{**record, "extra": 1}])
    first = next(iter(record))
    with pytest.raises(RendezvousError, match=rf"island 0 sent a .*{first}"):
        parse_records(kind, [{key: value for key, value in record.items() if key != first}])


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_record_crashes(content: Any) -> None:
    store = ValueStore.in_memory()
    store.set("topic/1", json.dumps(content))
    for kind, good in RECORDS:
        store.set("topic/0", json.dumps(good))
        try:
            parse_records(kind, AllGather(store, 0, 2).share("topic", good, 5))
        except RendezvousError:
            continue
        assert isinstance(content, dict)


@pytest.mark.parametrize("digest", ["", "xyz", "AB", "a" * 65, "ab\n"])
def test_a_digest_is_hexadecimal(digest: str) -> None:
    with pytest.raises(RendezvousError, match="digest"):
        parse_records(StateRecord, [{"round": 1, "digest": digest, "resumed": False}])


# The store is gone


def test_a_dead_store_means_island_0_is_lost() -> None:
    keeper = KeptStore()
    store = keeper.client()
    one = unanimity(store, 1, 2, 30.0)
    ended = threading.Timer(0.3, keeper_ends := [keeper].clear)
    del keeper
    ended.start()
    with pytest.raises(
        IslandLostError, match=r"rendezvous, which island 0 keeps, does not answer .*Start all islands again"
    ) as caught:
        convene(one, 1, offer_of(1))
    assert caught.value.islands == (0,)
    for call in (lambda: vote(one, 1), lambda: one.leave(2), lambda: AllGather(store, 1, 2).share("done", {}, 5)):
        with pytest.raises(IslandLostError):
            call()
    assert keeper_ends is not None


def test_a_store_that_does_not_answer_is_given_up_once(tmp_path: Path) -> None:
    """A machine that has stopped: connections stay open and nothing answers."""
    has_stopped = threading.Event()

    @web.middleware
    async def stop(request: web.Request, handler: Any) -> web.StreamResponse:
        while has_stopped.is_set():
            await asyncio.sleep(0.05)
        answer: web.StreamResponse = await handler(request)
        return answer

    application = StoreServer(tmp_path).app()
    application.middlewares.append(stop)
    with serving_app(application) as address:
        store = ObjectStore(f"{address}/run", timeout=1.5)  # twenty times that is more than AT_ONCE
        book = AllGather(ValueStore(RunLog(store, Seal(b"", "run"))), 1, 2)
        has_stopped.set()
        started = time.monotonic()
        for _ in range(20):
            with pytest.raises(IslandLostError, match="does not answer") as caught:
                book.share("topic", {}, 30)
            assert caught.value.islands == (0,)
        assert time.monotonic() - started < AT_ONCE
        has_stopped.clear()


def test_a_call_has_its_time() -> None:
    assert call_within(5, lambda: 7) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        call_within(5, lambda: int("x"))
    with pytest.raises(TimeoutError, match=r"no answer for 0.1 s"):
        call_within(0.1, lambda: time.sleep(5))
    assert call_within(5, lambda: None) is None


# Rendezvous


def settings_for(url: str, island: int = 1, **more: Any) -> DiLoCoConfig:
    return DiLoCoConfig(**{"num_islands": 2, "island": island, "rendezvous": url, "join_timeout": LONG, **more})


def connect(config: DiLoCoConfig, is_host: bool) -> Rendezvous:
    size = {"num_islands": config.num_islands}
    return meet(config, Credentials(), is_host, f"island {config.island}", size, LONG, WaitNotes(config.island))


@pytest.fixture
def listener() -> Iterator[Callable[[Callable[[socket.socket], object]], str]]:
    """Opens a port where something else answers; returns its URL."""
    opened: list[socket.socket] = []

    def open_port(behave: Callable[[socket.socket], object]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        opened.append(server)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                opened.append(connection)
                behave(connection)

        threading.Thread(target=serve, daemon=True).start()
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"

    yield open_port
    for one in opened:
        with contextlib.suppress(OSError):  # the other end has closed it
            one.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread that accepts
        one.close()


def test_both_ends_meet(free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    opened: list[ValueStore] = []

    def run(island: int) -> str:
        time.sleep(0.5 * (1 - island))  # island 1 knocks before anybody is there
        store, _, address, _ = connect(settings_for(url, island), is_host=island == 0)
        opened.append(store)
        store.set(str(island), address)
        return await_value(store, str(1 - island)).decode()

    assert run_islands(2, run) == ["127.0.0.1", "127.0.0.1"]


def test_a_machine_may_be_told_its_own_address(free_port: int) -> None:
    config = settings_for(f"tcp://localhost:{free_port}", 0, bind_address="127.0.0.1")
    assert connect(config, is_host=True).address == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_addresses_of_version_6_work(free_port: int) -> None:
    config = settings_for(f"tcp://[::1]:{free_port}", 0)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback ({error})")
    assert connect(config, is_host=True).address == "::1"


@pytest.mark.parametrize("setting", ["rendezvous", "bind_address"])
@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_address_is_refused_unless_it_is_wanted(address: str, setting: str) -> None:
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:29400" if setting == "rendezvous" else "tcp://127.0.0.1:29400"
    changes: dict[str, Any] = {} if setting == "rendezvous" else {"bind_address": address}
    with pytest.raises(RendezvousError, match=r"is a public address.*VPN.*allow_public_address"):
        connect(settings_for(url, 0, **changes), is_host=True)
    if ":" not in address:  # a machine need not speak version 6
        with pytest.raises(RendezvousError, match="is not an address of this machine"):
            connect(settings_for(url, 0, allow_public_address=True, **changes), is_host=True)


def test_a_port_in_use_is_told(listener: Callable[..., str]) -> None:
    url = listener(lambda connection: None)
    with pytest.raises(RendezvousError, match=r"port \d+ on 127.0.0.1 is in use.*choose another port"):
        connect(settings_for(url, 0), is_host=True)


def test_a_host_that_is_another_machine_is_told() -> None:
    with pytest.raises(
        RendezvousError, match=r"198.51.100.1 is not an address of this machine.*start island 0 on that"
    ):
        connect(settings_for("tcp://198.51.100.1:29400", 0), is_host=True)


@pytest.mark.parametrize("is_host", [True, False])
def test_a_host_without_an_address_is_told(is_host: bool) -> None:
    url = "tcp://no-such-host.invalid:29400"
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid.*([Cc]orrect it|Check the rendezvous)"):
        connect(settings_for(url, 0 if is_host else 1, join_timeout=0.5), is_host=is_host)


def test_a_name_service_that_is_not_there_yet_is_waited_for(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that has just been started."""
    url = f"tcp://localhost:{free_port}"
    host = connect(settings_for(url, 0), is_host=True)
    connect_to, failures = socket.create_connection, [socket.gaierror(socket.EAI_AGAIN, "Temporary failure")] * 3

    def connect_later(*args: Any, **named: Any) -> socket.socket:
        if failures:
            raise failures.pop()
        return connect_to(*args, **named)

    monkeypatch.setattr(socket, "create_connection", connect_later)
    island = connect(settings_for(url, 1), is_host=False)
    host.store.set("a", b"x")
    assert island.store.find("a") == b"x"


@pytest.mark.parametrize("num_islands", [1, 3])
def test_whoever_counts_other_islands_is_refused(free_port: int, num_islands: int) -> None:
    """Else each would wait for others than the other does. Whoever comes with the right number is let in."""
    url = f"tcp://127.0.0.1:{free_port}"
    host = connect(settings_for(url, 0), is_host=True)
    config = settings_for(url, num_islands=num_islands, island=num_islands - 1)
    told = f"island {config.island} has num_islands={num_islands}, and the run at {url} num_islands=2: set the same"
    with pytest.raises(RendezvousError, match=told):
        connect(config, is_host=False)
    connect(settings_for(url, 1), is_host=False).store.set("there", b"")
    assert host.store.find("there") == b""


def test_nobody_there_is_told_in_time(free_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(
        RendezvousError, match=rf"nobody answers at tcp://127.0.0.1:{free_port} after 0.5 s \(join_timeout\)"
    ):
        connect(settings_for(f"tcp://127.0.0.1:{free_port}", join_timeout=0.5), is_host=False)
    assert 0.5 <= time.monotonic() - started < AT_ONCE


def test_a_machine_that_cannot_be_reached_is_told_in_time() -> None:
    """A documentation address: nobody answers, or a proxy of this network does."""
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"nobody answers at|is not the rendezvous"):
        connect(settings_for("tcp://198.51.100.1:29400", join_timeout=0.5), is_host=False)
    assert time.monotonic() - started < AT_ONCE


def answer_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
    connection.close()


@pytest.mark.parametrize("behave", [answer_http, socket.socket.close, lambda connection: None])
def test_something_else_on_the_port_is_told(listener: Callable[..., str], behave: Callable[..., object]) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"is not the rendezvous of a run .*choose another port"):
        connect(settings_for(listener(behave), join_timeout=0.5), is_host=False)
    assert time.monotonic() - started < AT_ONCE


# Where an island listens that has met the others in an object store


def test_an_island_listens_at_bind_address_or_where_the_network_is() -> None:
    settings: dict[str, Any] = {"rendezvous": "memory://here", "exchange": "mesh"}
    assert find_address(DiLoCoConfig(**settings, bind_address="127.0.0.3")) == "127.0.0.3"
    found = find_address(DiLoCoConfig(**settings, allow_public_address=True))
    socket.create_server((found, 0)).close()  # an address of this machine


def test_an_island_does_not_listen_at_a_public_address() -> None:
    settings: dict[str, Any] = {"rendezvous": "memory://here", "exchange": "mesh", "bind_address": "8.8.8.8"}
    with pytest.raises(RendezvousError, match=r"8\.8\.8\.8 .*public address.*allow_public_address"):
        find_address(DiLoCoConfig(**settings))
    assert find_address(DiLoCoConfig(**settings, allow_public_address=True)) == "8.8.8.8"
