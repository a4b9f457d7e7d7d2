"""The ledger over a store in memory and over a real TCP store; what a rendezvous says when it cannot be."""

from __future__ import annotations

import asyncio
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

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import DuplicateIslandError, IslandLostError, RendezvousError, StopRequested
from hf_diloco.membership import ledger
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.ledger import Ledger
from hf_diloco.membership.records import (
    ArrivalRecord,
    CheckpointsRecord,
    JoinRecord,
    StateRecord,
    VoteRecord,
    parse_records,
)
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import find_address
from hf_diloco.store.server import StoreServer
from hf_diloco.store.signing import Seal
from hf_diloco.store.tcp_store import Rendezvous, meet
from hf_diloco.store.torch_store import ValueStore
from hf_diloco.utils.threads import call_within
from tests.clocks import AT_ONCE, LONG, FastClock
from tests.islands import CountingStore, run_islands, try_islands
from tests.store_servers import serving_app
from tests.tcp_stores import KeptStore

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


def ok(digest: str = "ab") -> dict[str, Any]:
    return {"ok": True, "digest": digest}


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
        return Ledger(stores(island), island, num_islands).share("topic", {"island": island}, 20)

    expected = [{"island": island} for island in range(num_islands)]
    assert run_islands(num_islands, run) == [expected] * num_islands


def test_who_does_not_share_in_time_is_named(stores: Stores) -> None:
    started = time.monotonic()
    with pytest.raises(IslandLostError, match=r"islands \[0, 2\] are missing after 0.3 s") as caught:
        Ledger(stores(1), 1, 3).share("topic", {}, 0.3)
    assert caught.value.islands == (0, 2)
    assert 0.3 <= time.monotonic() - started < AT_ONCE


def test_a_wish_to_stop_ends_a_wait(stores: Stores) -> None:
    with pytest.raises(StopRequested):
        Ledger(stores(0), 0, 2, should_stop=lambda: True).share("topic", {}, 20)


def test_a_farewell_is_waited_for_in_spite_of_a_wish_to_stop(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> int:
        clock.sleep(0.3 * island)
        return len(
            Ledger(stores(island), island, 2, lambda: True, clock=clock).share("done", {}, 20, interruptible=False)
        )

    assert run_islands(2, run) == [2, 2]


# A round


@pytest.mark.parametrize("num_islands", [1, 2, 4])
def test_rounds_that_go_well(stores: Stores, num_islands: int) -> None:
    def run(island: int) -> None:
        book = Ledger(stores(island), island, num_islands)
        for number in (1, 2, 3):
            arrived = book.arrive(number, {"weight": island, "round": number}, 20)
            assert arrived == [{"weight": other, "round": number} for other in range(num_islands)]
            committed, votes = book.settle(number, ok(f"{number}"), 20)
            assert committed
            assert votes == {str(other): ok(f"{number}") for other in range(num_islands)}

    run_islands(num_islands, run)


@pytest.mark.parametrize("num_islands", [2, 16])
def test_a_round_without_links_takes_as_few_round_trips_with_many_islands_as_with_two(
    stores: Stores, num_islands: int
) -> None:
    store: Any = CountingStore(stores(0))
    book = Ledger(store, 0, num_islands)
    for other in range(1, num_islands):
        stores(1).set(f"round/1/arrived/{other}", json.dumps({"weight": 1}))
        stores(1).set(f"round/1/vote/{other}", json.dumps(ok()))
    stores(1).check([f"round/1/vote/{num_islands - 1}"])  # they have come
    assert book.arrive(1, {"weight": 1}, 20) == [{"weight": 1}] * num_islands
    committed, votes = book.settle(1, ok(), 20)
    assert committed
    assert votes == {str(island): ok() for island in range(num_islands)}
    assert store.trips == 3, "twice: what do all say; and once: does my outcome count"


class Late:
    """A store in which the first look at the others' votes comes just before they vote."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._is_first = True

    def check(self, keys: list[str]) -> bool:
        is_early, self._is_first = self._is_first and "/vote/" in keys[0], False
        return not is_early and self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_votes_that_come_between_two_looks_agree(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOOK_SECONDS", 0.0)
    stores(1).set("round/1/vote/1", json.dumps(ok()))
    assert stores(1).check(["round/1/vote/1"])
    late: Any = Late(stores(0))
    book = Ledger(late, 0, 2)
    assert book.settle(1, ok(), 20)[0]
    assert book.tries(1) == 0


def test_who_does_not_arrive_in_time_is_named_to_all(stores: Stores) -> None:
    def run(island: int) -> None:
        if island != 1:
            Ledger(stores(island), island, 3).arrive(4, {}, 0.5 if island == 0 else 20)

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


def test_who_leaves_wakes_those_who_wait(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> None:
        book = Ledger(stores(island), island, 3, clock=clock)
        if island == 2:
            clock.sleep(0.3)
            book.leave(1)
        else:
            book.arrive(1, {}, 60)

    assert_both_lose_island_2_at_once(run, "island 2 left the run before round 1")


def test_who_is_asked_to_stop_while_waiting_leaves(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> None:
        asked = clock.now() + 0.3 if island == 0 else float("inf")
        if island != 2:
            Ledger(stores(island), island, 3, lambda: clock.now() > asked, clock=clock).arrive(1, {}, 60)

    first, second, _ = try_islands(3, run)
    assert isinstance(first, StopRequested)
    assert isinstance(second, IslandLostError)
    assert second.islands == (0,)


def test_once_all_have_arrived_it_is_too_late_to_leave(stores: Stores) -> None:
    """Island 1 goes on with the round: an island that knows it must take part."""
    book = Ledger(stores(0), 0, 2, should_stop=lambda: True)
    stores(1).set("round/1/arrived/1", json.dumps({"weight": 1}))
    assert stores(1).check(["round/1/arrived/1"])
    assert book.arrive(1, {"weight": 0}, 5) == [{"weight": 0}, {"weight": 1}]


def test_who_is_gone_is_not_waited_for(stores: Stores, clock: FastClock) -> None:
    """Island 2's connection breaks; island 0's breaks as well, but it is there."""

    def run(island: int) -> None:
        if island != 2:
            Ledger(stores(island), island, 3, find_broken=lambda: {0, 2}, clock=clock).arrive(1, {}, 60)

    assert_both_lose_island_2_at_once(run, "island 2 lost before round 1: the connection broke")


def test_a_connection_that_is_broken_once_is_no_reason(stores: Stores, clock: FastClock) -> None:
    looks = iter([{1}, set(), {1}, set()])

    def run(island: int) -> None:
        if island == 0:
            Ledger(stores(0), 0, 2, find_broken=lambda: next(looks, set()), clock=clock).arrive(1, {}, 60)
        else:
            clock.sleep(4.5 * ledger.LOOK_SECONDS)
            Ledger(stores(1), 1, 2, clock=clock).arrive(1, {}, 60)

    run_islands(2, run)
    assert next(looks, None) is None, "it has looked four times"


def test_who_is_gone_cannot_vote(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> bool:
        if island == 2:
            return False
        committed, votes = Ledger(stores(island), island, 3, find_broken=lambda: {2}, clock=clock).settle(1, ok(), 60)
        assert "2" not in votes
        return committed

    started = time.monotonic()
    assert run_islands(3, run) == [False] * 3
    assert time.monotonic() - started < AT_ONCE


def test_after_a_round_that_failed_who_gave_it_up_before_is_named(stores: Stores) -> None:
    """Who had a vote gave up later, and is not to blame."""
    book = Ledger(stores(0), 0, 3)
    book.check_plan(1, 20)
    Ledger(stores(1), 1, 3).leave(1)
    book.check_plan(1, 20, silent=[2])
    for silent in (None, [1], [1, 2]):
        with pytest.raises(IslandLostError, match="island 1 left the run before round 1") as caught:
            book.check_plan(1, 20, silent)
        assert caught.value.islands == (1,)


def test_different_digests_abort(stores: Stores) -> None:
    def run(island: int) -> tuple[bool, int]:
        committed, votes = Ledger(stores(island), island, 3).settle(1, ok("ab" if island else "cd"), 20)
        return committed, len(votes)

    assert run_islands(3, run) == [(False, 3)] * 3


def test_different_digests_have_the_round_taken_again_and_the_third_time_end_it(stores: Stores) -> None:
    def run(island: int) -> list[int]:
        book = Ledger(stores(island), island, 2)
        tries = []
        for _ in range(3):
            assert len(book.arrive(1, {"weight": 1}, 20)) == 2
            committed, _ = book.settle(1, ok("ab" if island else "cd"), 20)
            assert not committed
            tries.append(book.tries(1))
        return tries

    assert run_islands(2, run) == [[1, 2, 2]] * 2


def test_what_came_damaged_has_the_round_taken_again(stores: Stores) -> None:
    def run(island: int) -> tuple[bool, bool]:
        book = Ledger(stores(island), island, 2)
        vote = ok() if island else {"ok": False, "digest": "", "reason": "damaged", "again": True}
        first, _ = book.settle(1, vote, 20)
        assert book.tries(1) == 1
        return first, book.settle(1, ok(), 20)[0]

    assert run_islands(2, run) == [(False, True)] * 2


def test_one_who_failed_aborts_at_once(stores: Stores) -> None:
    def run(island: int) -> bool:
        vote = ok() if island else {"ok": False, "digest": "", "reason": "link cut"}
        committed, votes = Ledger(stores(island), island, 3).settle(1, vote, 60)
        assert votes["0"].get("reason") == "link cut"
        return committed

    started = time.monotonic()
    assert run_islands(3, run) == [False] * 3
    assert time.monotonic() - started < AT_ONCE


def test_one_who_does_not_vote_aborts_in_time(stores: Stores, clock: FastClock) -> None:
    def run(island: int) -> bool:
        if island == 2:
            return False
        committed, votes = Ledger(stores(island), island, 3, clock=clock).settle(1, ok(), 0.4)
        assert "2" not in votes
        return committed

    assert run_islands(3, run) == [False] * 3


class JitteryStore:
    """Begins late, and lets other threads in between any two operations."""

    def __init__(self, store: ValueStore, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        time.sleep(self._random.choice([0, 0.005, 0.01, 0.02]))

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            result = operation(*arguments)
            time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
            return result

        return call


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
        jittery = JitteryStore(store, seed + island)
        book = Ledger(jittery, island, len(patience))  # type: ignore[arg-type]
        vote = {"ok": False, "digest": ""} if island == failing else ok()
        committed, _ = book.settle(1, vote, patience[island])
        return committed

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
        Ledger(stores(0), 0, 2).share("topic", {}, 5)


def test_records_of_rounds_that_are_over_go(stores: Stores) -> None:
    """A run may have many thousands, and who keeps the store has it in memory."""

    def run(island: int) -> None:
        book = Ledger(stores(island), island, 2)
        for number in range(1, 6):
            book.arrive(number, {"weight": 1}, 20)
            assert book.settle(number, ok(), 20)[0]

    run_islands(2, run)
    kinds = ["arrived/0", "arrived/1", "vote/0", "vote/1", "outcome"]
    old = [f"round/{number}/{kind}" for number in range(1, 5) for kind in kinds]
    deadline = time.monotonic() + AT_ONCE
    while left := stores(0).find_all(old):
        assert time.monotonic() < deadline, left.keys()
        time.sleep(0.02)
    assert stores(0).check([f"round/5/{kind}" for kind in kinds])


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the record values/topic/0\.json has 4\d{6,} bytes, more than"):
        Ledger(ValueStore.in_memory(), 0, 2).share("topic", {"text": "x" * (3 << 20)}, 5)


@pytest.mark.parametrize("plan", [b"\xff\xff", b"late x y", b"leaves", b"{}", b"late 99999999999999999999", b" "])
def test_a_strange_plan_ends_the_round(stores: Stores, clock: FastClock, plan: bytes) -> None:
    stores(1).set("round/1/plan", plan)
    with pytest.raises(IslandLostError):
        Ledger(stores(0), 0, 2, clock=clock).arrive(1, {}, 5)


@pytest.mark.parametrize("vote", [b"{", b"[]", b'{"ok": 1}', b'{"ok": true}', b'{"ok": "yes", "digest": "ab"}'])
def test_a_strange_vote_commits_nothing(stores: Stores, vote: bytes) -> None:
    stores(1).set("round/1/vote/1", vote)
    try:
        committed, _ = Ledger(stores(0), 0, 2).settle(1, ok(), 5)
    except RendezvousError:
        committed = False
    assert not committed
    assert not stores(1).check(["round/1/outcome"]) or stores(1).get("round/1/outcome") != b"commit"


JOIN = {
    "host": "h",
    "folder": "/f",
    "fingerprint": {"sync_every": 5, "payload": "fp32", "outer_lr": 0.7, "nesterov": True, "x": None},
    "layout": {"ranks": ["ab", "cd"], "replicated": False},
}
RECORDS: list[tuple[Any, dict[str, Any]]] = [
    (JoinRecord, JOIN),
    (StateRecord, {"round": 3, "digest": "ab12", "resumed": False}),
    (ArrivalRecord, {"weight": 2.5, "norm": 1.5, "digest": "ab12", "rates": [1e-3, 0.0]}),
    (VoteRecord, {"ok": True, "digest": "ab12", "reason": "", "again": False}),
    (CheckpointsRecord, {"rounds": [1, 2]}),
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
            parse_records(kind, Ledger(store, 0, 2).share("topic", good, 5))
        except RendezvousError:
            continue
        assert isinstance(content, dict)


@pytest.mark.parametrize("digest", ["", "xyz", "AB", "a" * 65, "ab\n"])
def test_a_digest_is_hexadecimal(digest: str) -> None:
    with pytest.raises(RendezvousError, match="digest"):
        parse_records(ArrivalRecord, [{"weight": 1.0, "digest": digest}])


# The store is gone


def test_a_dead_store_means_island_0_is_lost() -> None:
    keeper = KeptStore()
    book = Ledger(keeper.client(), 1, 2)
    ended = threading.Timer(0.3, keeper_ends := [keeper].clear)
    del keeper
    ended.start()
    with pytest.raises(
        IslandLostError, match=r"rendezvous, which island 0 keeps, does not answer .*Start all islands again"
    ) as caught:
        book.arrive(1, {}, 30)
    assert caught.value.islands == (0,)
    for call in (lambda: book.settle(1, ok(), 5), lambda: book.leave(2), lambda: book.share("done", {}, 5)):
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
        book = Ledger(ValueStore(RunLog(store, Seal(b"", "run")), LONG), 1, 2)
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
    return DiLoCoConfig(**{"num_islands": 2, "island": island, "rendezvous": url, "join_timeout": 0.5, **more})


def connect(config: DiLoCoConfig, is_host: bool) -> Rendezvous:
    return meet(config, Credentials(), is_host, f"island {config.island}", LONG)


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
        one.close()


def test_both_ends_meet(free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    opened: list[ValueStore] = []

    def run(island: int) -> str:
        time.sleep(0.5 * (1 - island))  # island 1 knocks before anybody is there
        store, _, address, _ = connect(settings_for(url, island, join_timeout=10), is_host=island == 0)
        opened.append(store)
        store.set(str(island), address)
        return store.get(str(1 - island)).decode()

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
        connect(settings_for(url, 0 if is_host else 1), is_host=is_host)


def test_nobody_there_is_told_in_time(free_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(
        RendezvousError, match=rf"nobody answers at tcp://127.0.0.1:{free_port} after 0.5 s \(join_timeout\)"
    ):
        connect(settings_for(f"tcp://127.0.0.1:{free_port}"), is_host=False)
    assert 0.5 <= time.monotonic() - started < AT_ONCE


def test_a_machine_that_cannot_be_reached_is_told_in_time() -> None:
    """A documentation address: nobody answers, or a proxy of this network does."""
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"nobody answers at|is not the rendezvous"):
        connect(settings_for("tcp://198.51.100.1:29400"), is_host=False)
    assert time.monotonic() - started < AT_ONCE


def answer_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
    connection.close()


@pytest.mark.parametrize("behave", [answer_http, socket.socket.close, lambda connection: None])
def test_something_else_on_the_port_is_told(listener: Callable[..., str], behave: Callable[..., object]) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"is not the rendezvous of a run .*choose another port"):
        connect(settings_for(listener(behave)), is_host=False)
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
