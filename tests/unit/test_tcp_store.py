"""The rendezvous at tcp:// of fixed membership: what strangers who reach its port can do, and who is let in."""

from __future__ import annotations

import base64
import gc
import itertools
import logging
import socket
import threading
import time
import tracemalloc
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, IslandLostError, RendezvousError, StoreError, StoreFullError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.membership.all_gather import AllGather
from hf_diloco.store import backends, memory, tcp_store
from hf_diloco.store.credentials import Credentials, find_key
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import StoreHost, url_of
from hf_diloco.store.signing import MEETING
from hf_diloco.store.tcp_store import who_did_not_fit
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.transfers import LossNotes
from hf_diloco.utils.urls import split_tcp_url
from tests.clocks import AT_ONCE, LONG
from tests.islands import run_islands
from tests.tcp_stores import Port

KEY = b"0123456789abcdef"
OTHER_KEY = b"0123456789abcdeg"
LIMIT = 1 << 20


@pytest.fixture
def port() -> Port:
    return Port()


def held(key: bytes, **settings: Any) -> Credentials:
    return Credentials(key, **settings)


def enter(port: Port, island: int, key: bytes = KEY, **settings: Any) -> ValueStore:
    met = port.enter(island, held(key, **settings))
    assert (met.key is not None) == bool(key)
    assert met.address == "127.0.0.1"
    return met.store


def bytes_at(bare: ObjectStore, key: str) -> bytes:
    """What a stranger sees."""
    found = bare.get(f"values/{key}.json", LIMIT)
    assert found is not None
    return found


SEALED = pytest.mark.parametrize(
    ("key", "encrypt"),
    [(KEY, True), (KEY, False), (b"", True)],
    ids=["encrypted", "authenticated", "without a key"],
)


@SEALED
def test_values_are_there_for_those_who_hold_the_key(port: Port, key: bytes, encrypt: bool) -> None:
    here, there = enter(port, 0, key, encrypt=encrypt), enter(port, 1, key, encrypt=encrypt)
    here.set("a", "one")
    there.set("b", b"\x00\xff")
    assert (there.find("a"), here.find("b")) == (b"one", b"\x00\xff")
    assert here.create("first", "mine") == there.create("first", "theirs") == b"mine"
    assert [here.add("n", 1), there.add("n", 2), here.add("n", 0), here.add("none", 0)] == [1, 3, 3, 0]
    assert here.find_all(["a", "b", "c"]) == {"a": b"one", "b": b"\x00\xff"}
    assert (base64.b64encode(b"one") in bytes_at(port.bare, "a")) == (not key or not encrypt)
    there.remove("a")
    assert here.find("a") is None
    assert here.create("a", "again") == b"again"


def test_what_strangers_write_is_as_good_as_absent(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    store, bare = enter(port, 0), port.bare
    store.set("good", "good")
    for key, forged in (("a", b"made up"), ("b", bytes_at(bare, "good")), ("n", b"7"), ("large", b"x" * (5 << 20))):
        bare.put(f"values/{key}.json", forged)
        assert store.find(key) is None
    assert store.add("n", 1) == 1
    assert store.create("a", "mine") == b"mine"
    assert store.find("a") == b"mine"
    assert store.create("large", "small") == store.find("large") == b"small"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("values/b.json was not sealed with this run's key for this place" in text for text in warnings) == 1


def test_islands_that_replace_the_same_forged_value_agree(port: Port) -> None:
    stores, bare = [enter(port, island) for island in range(3)], port.bare
    for number in range(20):
        bare.put(f"values/{number}.json", b"made up")
        key = str(number)
        found = run_islands(3, lambda island: stores[island].create(key, f"of {island}"))  # noqa: B023
        assert len(set(found)) == 1


def test_no_proxy_is_asked(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a cluster may name for the way out, and which does not reach its own machines."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    stores = [enter(port, island) for island in range(2)]
    stores[0].set("a", "1")
    assert stores[1].find("a") == b"1"
    assert [path for path, _ in port.bare.list("values")] == ["values/a.json"]
    assert len(port.bare.get_range("values/a.json", 0, 10)) == 10


@pytest.mark.parametrize("value", [b"", b" ", b"abc", b"\xff", b"-5 x", b"1x", b"9" * 5000])
def test_what_is_no_number_is_not_counted_on(port: Port, value: bytes) -> None:
    store = enter(port, 0)
    store.set("n", value)
    assert [store.add("n", 0), store.add("n", 2), store.add("n", 1)] == [0, 2, 3]


def test_several_count_at_once(port: Port) -> None:
    stores = [enter(port, island) for island in range(3)]
    sums = run_islands(3, lambda island: [stores[island].add("n", 1) for _ in range(20)])
    assert sorted(itertools.chain(*sums)) == list(range(1, 61))


def test_records_of_an_earlier_run_do_not_open_in_this_one(port: Port) -> None:
    first = enter(port, 0)
    first.set("claim/1", "1")
    earlier = bytes_at(port.bare, "claim/1")
    del first
    gc.collect()
    second = enter(port, 0)
    port.bare.put("values/claim/1.json", earlier)
    assert second.find("claim/1") is None, "another run begins in the same place"


def test_who_comes_back_to_the_store_of_another_run_is_told(port: Port) -> None:
    host, guest = enter(port, 0), enter(port, 1)
    guest.set("a", "1")
    port.bare.put(MEETING, b"made up")
    assert guest.find("a") == b"1", "strangers end no run so"
    del host
    gc.collect()
    host = enter(port, 0)
    for read in (lambda: guest.find("a"), lambda: guest.wait(["a"], LONG)):
        with pytest.raises(StoreError, match="another run has begun at its port"):
            read()
    assert host.find("a") is None


def test_a_wait_ends_when_the_value_is_there_or_the_time_over(port: Port) -> None:
    stores = [enter(port, island) for island in range(2)]

    def run(island: int) -> dict[str, bytes]:
        if not island:
            stores[0].set("a", "1")
            stores[0].set("b", "2")
        return stores[island].wait(["a", "b"], LONG)

    assert run_islands(2, run) == [{"a": b"1", "b": b"2"}] * 2
    assert stores[0].wait(["a", "none"], 0.2) == {"a": b"1"}


def test_who_keeps_it_takes_it_along(port: Port) -> None:
    stores = [enter(port, island) for island in range(2)]
    stores[1].set("a", "1")
    del stores[0]
    gc.collect()
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"\(nobody listens there\): the process that hosts it has ended"):
        stores[0].find("a")
    assert time.monotonic() - started < AT_ONCE


def test_islands_share_records(port: Port) -> None:
    stores = [enter(port, island) for island in range(2)]

    def share(island: int) -> list[dict[str, Any]]:
        return AllGather(stores[island], island, 2).share("topic", {"island": island}, timeout=20)

    assert run_islands(2, share) == [[{"island": 0}, {"island": 1}]] * 2
    notes = [LossNotes(stores[island], "lane0", island) for island in range(2)]
    assert notes[1].find_first(0, timed_out=False) == 0


def test_nodes_leave_each_other_records(port: Port) -> None:
    board = Board(enter(port, 0), "gossip")
    board.put("a", {"x": 1})
    board.put_first("a", {"x": 2})
    assert board.read("a") == {"x": 1}
    assert (board.count("starts/0"), board.count("starts/0", 1), board.count("starts/0")) == (0, 1, 1)
    board.remove("a")
    assert (board.has("a"), board.read("a")) == (False, None)


@pytest.mark.parametrize(
    ("host", "guest", "message"),
    [
        ((KEY, {}), (OTHER_KEY, {}), r"island 1 has another key than the run at tcp://.*give all one key \(key_file"),
        ((KEY, {}), (b"", {}), r"island 1 has no key, and the run at tcp://.* has one: give it the key of the others"),
        ((b"", {}), (KEY, {}), r"island 1 has a key, and the run at tcp://.* has none.*give all one key \(key_file"),
        (
            (KEY, {}),
            (KEY, {"encrypt": False}),
            r"island 1 has encrypt=False, and .* encrypt=True: set the same on all",
        ),
    ],
    ids=["another key", "no key", "a key where there is none", "encrypt"],
)
def test_who_does_not_fit_is_told_at_the_start(
    port: Port,
    caplog: pytest.LogCaptureFixture,
    host: tuple[bytes, dict[str, Any]],
    guest: tuple[bytes, dict[str, Any]],
    message: str,
) -> None:
    keeps = port.enter(0, held(host[0], **host[1]))
    with pytest.raises(RendezvousError, match=message):
        port.enter(1, held(guest[0], **guest[1]))
    assert keeps.store.add("claim/0", 1) == 1
    meeting = AllGather(keeps.store, 0, 2, where=port.url)
    meeting.notes.first = 0.0
    with pytest.raises(IslandLostError):
        meeting.share("join", {}, timeout=0.2)
    assert "waiting for island 1 at tcp://" in caplog.text
    assert "; island 1 came from 127.0.0.1 and ended, as it has another key or other settings" in caplog.text


@pytest.mark.parametrize(
    "word", [b"", b"junk", b'{"who": "island 1\\n", "address": "10.0.0.1"}', b'{"who": "island 1"}', bytes(5000)]
)
def test_what_strangers_write_of_others_is_not_told(port: Port, word: bytes) -> None:
    keeps = port.enter(0, held(KEY))
    assert not who_did_not_fit(keeps.store.log.store)
    port.bare.put("hf-diloco/unfit", word)
    assert not who_did_not_fit(keeps.store.log.store)


def test_a_mark_that_strangers_write_lets_nobody_in(port: Port) -> None:
    keeps = port.enter(0, held(KEY))
    for forged in (b"made up", b"{}"):
        port.bare.put(MEETING, forged)
        with pytest.raises(RendezvousError, match="island 1 has another key"):
            port.enter(1, held(KEY))
    assert keeps.key


def test_a_run_that_begins_between_two_questions_is_met(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(ObjectStore):
        """Whose host begins the run while the answer that there is none is on its way."""

        def get(self, path: str, limit: int) -> bytes | None:
            found = super().get(path, limit)
            if path == MEETING and found is None:
                tcp_store._begin_run(port.bare, held(KEY), {"num_islands": 2})
                port.bare.put("run.json", b"{}")
            return found

    host = StoreHost(port.config())
    monkeypatch.setattr(tcp_store, "ObjectStore", Slow)
    try:
        assert port.enter(1, held(KEY)).key
    finally:
        host.close()


def test_a_host_that_is_interrupted_while_it_opens_keeps_no_port(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_then_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "hf-diloco-store":
            raise KeyboardInterrupt

    with monkeypatch.context() as replaced:
        replaced.setattr(threading.Thread, "start", start_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            StoreHost(port.config())
    StoreHost(port.config()).close()


def test_a_run_that_does_not_begin_is_told(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "MARK_SECONDS", 0.2)
    host = StoreHost(port.config())
    try:
        with pytest.raises(RendezvousError, match=r"the run at tcp://.* has not begun 0.2 s after"):
            port.enter(1, held(b""))
        port.bare.put("run.json", b"{}")
        with pytest.raises(RendezvousError, match=r"island 1 waits for all islands, and those of .* may come and go"):
            port.enter(1, held(b""))
    finally:
        host.close()


def test_what_it_keeps_is_limited(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_BYTES", 10_000)
    store, bare = enter(port, 0), ObjectStore(url_of(port.url), timeout=1.0)
    bare.put("junk", bytes(8_000))
    with pytest.raises(StoreFullError, match="QuotaExceeded"):
        bare.put("more", bytes(8_000))
    with pytest.raises(StoreError, match="objects are small here"):
        bare.put("large", bytes(6 << 20))
    store.set("a", "1")
    bare.delete(["junk"])
    bare.put("more", bytes(8_000))
    assert bytes(bare.get_range("more", 7_998, 8_000)) == bytes(2)
    assert bare.list() == [
        ("hf-diloco/run", len(bare.get(MEETING, LIMIT) or b"")),
        ("more", 8_000),
        *bare.list("values"),
    ]
    assert store.find("a") == b"1"
    bare.delete(["more"])
    for count in range(10):
        bare.put(f"empty/{count}", b"")
    with pytest.raises(StoreFullError):  # an object takes memory, however small it is
        bare.put("more", bytes(5_000))
    bare.delete([path for path, _ in bare.list("empty")])
    bare.put("more", bytes(5_000))


def test_who_asks_for_an_object_and_does_not_take_it_costs_no_copy_of_it(port: Port) -> None:
    keeper, bare = enter(port, 0), ObjectStore(url_of(port.url))
    bare.put("large", bytes(4 << 20))
    before = psutil.Process().num_fds()
    with ExitStack() as strangers:
        for _ in range(10):
            stranger = strangers.enter_context(socket.create_connection(split_tcp_url(port.url), LONG))
            stranger.sendall(b"GET /runs/run/large HTTP/1.1\r\nHost: here\r\n\r\n")
            assert stranger.recv(8) == b"HTTP/1.1"
        assert psutil.Process().num_fds() < before + 25, "sockets alone"
    assert bare.get_range("large", 4_000_000, 4_000_010) == bytes(10)
    assert keeper.find("none") is None, "it goes on"


@pytest.mark.parametrize("kind", [DiLoCoConfig, GossipConfig])
def test_a_key_can_be_required(
    monkeypatch: pytest.MonkeyPatch, kind: type[DiLoCoConfig] | type[GossipConfig], tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_DILOCO_KEY", raising=False)
    assert find_key(kind()) == b""
    with pytest.raises(
        ConfigError, match=r"require_key=true, and there is no key: make one by `hf-diloco keys.*as key_file or"
    ):
        find_key(kind(require_key=True))
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    assert find_key(kind(require_key=True, key_file=file)) == KEY


def test_a_store_that_is_closed_as_it_opens_leaves_its_port(port: Port) -> None:
    host = StoreHost(port.config())
    closing = threading.Thread(target=host.close, daemon=True)
    closing.start()
    closing.join(AT_ONCE)
    assert not closing.is_alive()
    StoreHost(port.config()).close()


class _NotFound(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_store_that_is_not_found_for_a_while_may_come_back(port: Port) -> None:
    """As behind a proxy, which says so while nobody serves."""
    host = StoreHost(port.config())
    store = ObjectStore(url_of(port.url), 5.0)
    store.put("here", b"it is")
    host.close()
    with ThreadingHTTPServer(("127.0.0.1", port.port), _NotFound) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, daemon=True)
        serving.start()
        with pytest.raises(StoreError, match="404"):
            store.get("here", 100)
        with pytest.raises(RendezvousError, match="of an older version of hf_diloco, or none"):
            ObjectStore(url_of(port.url), 5.0)
        proxy.shutdown()
        serving.join()
    host = StoreHost(port.config())
    try:
        assert store.get("here", 100) is None  # it was in memory
    finally:
        host.close()


def test_nothing_is_left_of_a_store_that_has_ended(port: Port) -> None:
    """A process may keep one after the other."""
    enter(port, 0)
    gc.collect()
    tracemalloc.start()
    try:
        store = enter(port, 0)
        store.set("mesh/large", "x" * LIMIT)
        store.news("mesh")()
        store = None  # type: ignore[assignment]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < LIMIT
    finally:
        tracemalloc.stop()


def test_a_store_of_one_process_alone_lasts_as_long_as_it_is_used() -> None:
    before = set(backends._memory)
    store = ValueStore.in_memory()
    store.set("key", "value")
    assert store.find("key") == b"value"
    assert set(backends._memory) == before
