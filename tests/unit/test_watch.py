"""Asking a server of ours once instead of again and again: it writes, waits and reads in one request."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from aiohttp import web

from hf_diloco.errors import ForgedError, RendezvousError, StoreError
from hf_diloco.store import backends, changes
from hf_diloco.store.failures import TooLargeError
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.long_poll import (
    MAX_DATA_BYTES,
    MAX_PAUSE_SECONDS,
    MAX_WAIT_SECONDS,
    Awaited,
    Listing,
    PollRequest,
    Watch,
    look,
)
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.utils.clock import REAL
from tests.clocks import AT_ONCE, LONG, StillClock
from tests.store_servers import serving, serving_app


class Note(Record):
    text: str


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served")) as address:
        yield address


@pytest.fixture
def store(address: str, request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(f"{address}/{request.node.name.replace('[', '-').rstrip(']')}")


def test_one_request_creates_and_shows_what_lies_there(store: ObjectStore) -> None:
    store.put("a/1", b"one")
    store.put("b/2", b"two")
    first = look(store, ["a"], create={"a/3": b"three", "a/1": b"other"})
    assert first.objects == {"a/1": b"one", "a/3": b"three"}
    assert first.created == {"a/3": b"three", "a/1": b"one"}
    assert first.below("a") == [("a/1", 3), ("a/3", 5)]
    second = look(store, ["a", "b"], first)
    assert second.objects == {"a/1": b"one", "a/3": b"three", "b/2": b"two"}, "told anew, or known before"


@pytest.mark.parametrize("is_mounted", [False, True])
def test_who_waits_hears_at_once_what_is_written(is_mounted: bool, tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        waiting = ObjectStore(f"{address}/run")
        other = ObjectStore(f"file://{tmp_path}/objects/run" if is_mounted else f"{address}/run")
        before = look(waiting, ["a"])
        found: list[Listing] = []
        thread = threading.Thread(target=lambda: found.append(look(waiting, ["a"], before, 29.0)))
        thread.start()
        other.put("b/1", b"elsewhere")
        time.sleep(0.1)
        assert thread.is_alive()
        other.put("a/1", b"news")
        thread.join(AT_ONCE)
        assert [sight.objects for sight in found] == [{"a/1": b"news"}]


def test_who_waits_in_vain_is_told_when_the_time_is_over(store: ObjectStore) -> None:
    before = look(store, ["a"])
    begun = time.monotonic()
    assert look(store, ["a"], before, 0.3).objects == {}
    assert 0.3 <= time.monotonic() - begun < AT_ONCE


PLAN = Awaited(path="a/plan", linger=MAX_WAIT_SECONDS)


@pytest.mark.parametrize("is_first", [False, True])
def test_other_news_wait_for_what_is_awaited(store: ObjectStore, is_first: bool) -> None:
    store.delete(["a/1", "a/plan"])
    before = None if is_first else look(store, ["a"])
    found: list[Listing] = []
    thread = threading.Thread(target=lambda: found.append(look(store, ["a"], before, 29.0, {"a/1": b"news"}, PLAN)))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    store.put("a/plan", b"awaited")
    thread.join(AT_ONCE)
    assert [sight.objects for sight in found] == [{"a/1": b"news", "a/plan": b"awaited"}]
    begun = time.monotonic()
    assert look(store, ["a"], awaited=PLAN).objects == found[0].objects
    assert time.monotonic() - begun < MAX_WAIT_SECONDS, "it is there"


def test_what_is_awaited_in_vain_keeps_other_news_for_a_moment_only(store: ObjectStore) -> None:
    before = look(store, ["a"])
    store.put("a/1", b"news")
    begun = time.monotonic()
    assert look(store, ["a"], before, 29.0, awaited=Awaited(path="a/plan", linger=0.3)).objects == {"a/1": b"news"}
    assert 0.3 <= time.monotonic() - begun < AT_ONCE


@pytest.mark.parametrize(("name", "most"), [("MAX_WAITING", 1), ("MAX_WAITING_BYTES", 60)])
def test_of_more_questions_than_may_wait_each_is_answered_at_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(changes, name, most)
    before = look(store, ["a"])
    found: list[Listing] = []
    is_there = threading.Event()
    await_change = changes.Changes._await_change

    def note(*args: Any) -> Any:
        is_there.set()
        return await_change(*args)

    monkeypatch.setattr(changes.Changes, "_await_change", note)
    thread = threading.Thread(target=lambda: found.append(look(store, ["a"], before, 29.0)))
    thread.start()
    assert is_there.wait(AT_ONCE)
    begun = time.monotonic()
    assert look(store, ["a"], before, 29.0).objects == look(store, ["a"], awaited=PLAN).objects == {}
    assert time.monotonic() - begun < AT_ONCE
    clock = StillClock()
    watch = Watch(store, ["a"], clock)
    for _ in range(30):
        watch.ask()
    assert 27 * MAX_PAUSE_SECONDS > clock.now() - 100.0 > 10 * MAX_PAUSE_SECONDS, "with growing pauses"
    store.put("a/1", b"news")
    thread.join(AT_ONCE)
    assert [sight.objects for sight in found] == [{"a/1": b"news"}]
    assert watch.ask(lambda: store.get("a/1", 10)) == [b"news"]


def test_a_deletion_is_news(store: ObjectStore) -> None:
    store.put("a/1", b"one")
    before = look(store, ["a"])
    store.delete(["a/1"])
    assert look(store, ["a"], before, LONG / 3).objects == {}


def test_what_a_thread_asks_is_answered_from_what_it_saw(store: ObjectStore) -> None:
    store.put("a/1", b"one")
    store.put("a/large", bytes(MAX_DATA_BYTES + 1))
    sight = look(store, ["a"])
    store.put("a/1", b"later")
    store.put("a/2", b"later")
    with store.listings.answer_from(sight):
        assert store.get("a/1", 10) == b"one"
        assert store.get("a/2", 10) is None
        assert [path for path, _ in store.list("a")] == ["a/1", "a/large"]
        with pytest.raises(TooLargeError):
            store.get("a/large", 10)
        assert store.get("ab/1", 10) is None, "elsewhere it asks"
    assert store.get("a/1", 10) == b"later"


@pytest.mark.parametrize("scheme", ["http", "memory"])
def test_a_record_is_decided_once(address: str, scheme: str) -> None:
    url = f"{address}/decided" if scheme == "http" else "memory://decided"
    log = RunLog(ObjectStore(url), Seal(b"", "run"))
    assert log.decide("a/plan.json", Note(text="mine")) == Note(text="mine")
    assert log.decide("a/plan.json", Note(text="mine")) == Note(text="mine"), "the answer may have been lost"
    assert log.decide("a/plan.json", Note(text="other")) == Note(text="mine")
    log.store.put("b/plan.json", b"rubbish")
    with pytest.raises(ForgedError):
        log.decide("b/plan.json", Note(text="mine"))


@pytest.mark.parametrize("there", [None, b"rubbish"])
def test_a_watch_first_writes_its_own_record_also_in_place_of_rubbish(store: ObjectStore, there: bytes | None) -> None:
    path = f"a/{'rubbish' if there else 'nothing'}.json"
    if there:
        store.put(path, there)
    log = RunLog(store, Seal(b"", "run"))
    watch = log.watch(["a"], REAL, path, Note(text="mine"))
    watch.ask(lambda: None)
    assert log.read(path, Note) == Note(text="mine")
    (found,) = watch.ask(lambda: log.read(path, Note))
    assert found == Note(text="mine")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("run", b"nonsense"),
        ("run", b'{"prefixes": ["../other"]}'),
        ("run", b'{"prefixes": ["a"], "seconds": 1e9, "known": {}}'),
        ("run", b'{"create": {"/etc/x": "YQ=="}}'),
        ("run", b'{"create": {"a": 1}}'),
        ("run", b'{"prefixes": %s}' % str(["a"] * 17).replace("'", '"').encode()),
        ("..%2Fother", b"{}"),
        ("run", b'{"prefixes": ["a"], "awaited": "a/plan"}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "b/plan", "linger": 1}}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/../b", "linger": 1}}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/%s", "linger": 1}}' % (b"x" * 5000)),
        ("run", b'{"prefixes": ["%s"]}' % (b"x" * 5000)),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/plan"}}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/plan", "linger": 0}}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/plan", "linger": 1e9}}'),
        ("run", b'{"prefixes": ["a"], "awaited": {"path": "a/plan", "linger": NaN}}'),
        ("run", b'{"paths": [%s"a"]}' % (b'"a",' * changes.MAX_ITEMS)),
        ("run", b'{"more": [%s[]]}' % (b"[]," * changes.MAX_ITEMS)),
        ("run", b"[" * changes.MAX_ITEMS),
        ("run", b'{"known": {"\xff": "0"}}'),
        ("run", b'{"known": {"\\ud800": "0"}}'),
        ("run", b'{"seconds": %s}' % (b"9" * 5000)),
    ],
)
def test_what_makes_no_sense_is_refused(address: str, path: str, body: bytes) -> None:
    with pytest.raises(HTTPError, match="400") as refusal:
        urllib.request.urlopen(urllib.request.Request(f"{address}/changes/{path}", body), timeout=LONG)
    assert len(refusal.value.read()) <= 2000


def test_as_many_values_as_an_island_may_send_are_no_more_than_are_taken(store: ObjectStore) -> None:
    known = {f"a/{number}": "" for number in range(100_000)}
    paths = [f"b/{number}" for number in range(4096)]
    few = {f"c/{number}": b"" for number in range(16)}
    question = PollRequest(create=few, put=few, prefixes=["a"] * 16, paths=paths, known=known)
    assert store.poll(question).created == few


def test_what_is_too_much_together_is_asked_for_by_itself(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1", "a/2", "b/3"):
        store.put(name, bytes(1000))
    monkeypatch.setattr(changes, "MAX_TOLD_BYTES", 2500)
    sight = look(store, ["a", "b"], create={"b/3": b"other"})
    told = [data for data in (*sight.created.values(), *sight.objects.values()) if data is not None]
    assert told == [bytes(1000)] * 2
    with store.listings.answer_from(sight):
        assert [store.get(name, 2000) for name in ("a/1", "a/2", "b/3")] == [bytes(1000)] * 3
    assert look(store, ["a"]).objects == {"a/1": bytes(1000), "a/2": bytes(1000)}, "an answer counts until it is sent"
    monkeypatch.setattr(changes, "MAX_TOLD_BYTES", 1500)
    assert list(look(store, ["a"]).objects.values()) == [bytes(1000), None]
    assert not store.create("a/1", b"other")
    assert store.decide("a/1", b"other", 2000) == bytes(1000)


def test_what_was_known_is_not_shown_in_place_of_news_that_are_left_out(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/1", b"old")
    before = look(store, ["a"])
    store.put("a/1", b"new, and longer")
    monkeypatch.setattr(changes, "MAX_TOLD_BYTES", 10)
    sight = look(store, ["a"], before)
    assert sight.objects == {"a/1": None}
    with store.listings.answer_from(sight):
        assert store.get("a/1", 100) == b"new, and longer"


def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    is_greeting = True

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal is_greeting
        if is_greeting:
            is_greeting = False
            return web.Response(text='{"created": {}, "objects": {}}', content_type="application/json")
        stream = web.StreamResponse()
        await stream.prepare(request)
        with suppress(ConnectionError):
            while True:
                await stream.write(b" " * 1000)
        return stream

    monkeypatch.setattr(backends, "MAX_ANSWER_BYTES", 1 << 20)
    app = web.Application()
    app.router.add_post("/changes/run", answer)
    with serving_app(app) as address:
        store = ObjectStore(f"{address}/run", timeout=0.5)
        with pytest.raises(StoreError, match=r"an answer of more than 1,048,576 bytes"):
            look(store, ["a"])


def test_a_server_that_is_gone_is_an_error_of_the_store(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        store = ObjectStore(f"{address}/run", timeout=0.5)
        look(store, ["a"])
    with pytest.raises(StoreError, match="does not answer a question"):
        look(store, ["a"])


def test_an_older_server_is_told_apart_from_one_that_is_gone() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<ListBucketResult></ListBucketResult>", content_type="application/xml")

    app = web.Application()
    app.router.add_get("/runs", answer)
    with serving_app(app) as address, pytest.raises(RendezvousError, match="older version of hf_diloco"):
        look(ObjectStore(f"{address}/run"), ["a"])
