"""The object store over the real S3 protocol: through failures, restarts, and several processes at once."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hf_diloco.errors import RendezvousError, StoreError
from hf_diloco.store.backends import PART_BYTES
from hf_diloco.store.objects import ObjectStore
from tests.clocks import AT_ONCE, LONG
from tests.processes import Processes
from tests.s3 import Fault, FaultyProxy, S3Server, Trouble, first_of, share_of

pytestmark = pytest.mark.distributed

TIMEOUT = 4.0
NUM_PROCESSES, NUM_RACES = 4, 25

RACER = """
import sys, time
from hf_diloco.store.objects import ObjectStore
url, name, num_races = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = ObjectStore(url)
store.put(f"ready/{name}", b"")
while store.get("go", 10) is None:
    time.sleep(0.01)
print("won", *[race for race in range(num_races) if store.create(f"races/{race}", name.encode())])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., ObjectStore]:
    """Opens a store of the test's own, at a server or through a proxy."""

    def open_it(where: S3Server | FaultyProxy, timeout: float = TIMEOUT) -> ObjectStore:
        for name, value in where.environment().items():
            monkeypatch.setenv(name, value)
        own = re.sub(r"[^a-z0-9]+", "-", request.node.name)  # an error that names it must not name a remedy
        return ObjectStore(f"{where.url}/{own}/deep", timeout)

    return open_it


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes that must end with a StoreError."""
    begun = time.monotonic()
    with pytest.raises(StoreError):
        call()
    return time.monotonic() - begun


def later(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


# What a store does


def test_objects_come_back(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    store = use(server)
    assert store.get("a", 10) is None
    assert store.create("a", b"one")
    assert store.create("a", b"one")
    assert not store.create("a", b"two")
    assert store.get("a", 10) == b"one"
    store.put("a", b"three")
    assert store.get("a", 10) == b"three"
    with pytest.raises(StoreError, match=r"a has 5 bytes, more than the 4"):
        store.get("a", 4)
    store.put("empty", b"")
    assert store.get("empty", 0) == b""
    store.delete(["a", "empty", "never-there"])
    assert store.list() == []


def test_prefixes_separate_stores(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    store = use(server)
    store.put("x", b"")
    parent = ObjectStore(store.url.removesuffix("/deep"))
    assert parent.list() == [("deep/x", 0)]
    assert ObjectStore(store.url + "/").list() == [("x", 0)]
    assert ObjectStore(store.url + "er").list() == []


def test_large_objects_travel_in_parts(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    store = use(server, timeout=LONG)
    data = os.urandom(3 * PART_BYTES + 5)
    store.put("large", memoryview(data))
    for start, end in ((0, 7), (7, PART_BYTES + 9), (len(data) - 3, len(data)), (100, 200)):
        assert bytes(store.get_range("large", start, end)) == data[start:end]
    for start, end in ((len(data) - 3, len(data) + 1), (len(data) + 5, len(data) + 9)):
        with pytest.raises(StoreError):
            store.get_range("large", start, end)
    with pytest.raises(StoreError, match="absent"):
        store.get_range("small", 0, 1)


def test_more_objects_than_a_page(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    store = use(server, timeout=60)
    paths = [f"many/{number:04d}" for number in range(1203)]
    for path in paths:
        store.put(path, b"x")
    assert store.list("many") == [(path, 1) for path in paths]
    store.delete(paths)
    assert store.list() == []


def test_one_of_several_processes_creates(server: S3Server) -> None:
    url = f"{server.url}/processes"
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        racers = [
            processes.spawn([sys.executable, "-c", RACER, url, name, str(NUM_RACES)], env=server.environment())
            for name in "ABCD"[:NUM_PROCESSES]
        ]
        for name, value in server.environment().items():
            patch.setenv(name, value)
        store = ObjectStore(url)
        deadline = time.monotonic() + 120
        while len(store.list("ready")) < NUM_PROCESSES:
            assert time.monotonic() < deadline, [racer.output for racer in racers]
            time.sleep(0.1)
        store.put("go", b"")
        won = {name: racer.wait().output.split()[1:] for name, racer in zip("ABCD", racers, strict=True)}
    winners = {race: name for name, races in won.items() for race in races}
    assert sum(map(len, won.values())) == len(winners) == NUM_RACES
    assert all(store.get(f"races/{race}", 10) == name.encode() for race, name in winners.items())


# A server that is away


@pytest.mark.parametrize("call", ["create", "put", "get", "list", "delete", "get_range"])
def test_a_server_that_comes_back_in_time_is_waited_for(
    server: S3Server, use: Callable[..., ObjectStore], call: str
) -> None:
    store = use(server, timeout=5.0)
    store.put("there", b"0123")
    server.pause()
    timer = later(2.8, server.resume)  # more than half of that, after which the client itself gives up
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("new", b"x") and store.get("new", 1),
        "put": lambda: [store.put("there", b"4567"), store.get("there", 4)][1],  # type: ignore[func-returns-value]
        "get": lambda: store.get("there", 4),
        "list": lambda: store.list(),
        "delete": lambda: [store.delete(["there"]), store.list()][1],  # type: ignore[func-returns-value]
        "get_range": lambda: bytes(store.get_range("there", 1, 3)),
    }
    expected: dict[str, object] = {
        "create": b"x",
        "put": b"4567",
        "get": b"0123",
        "list": [("there", 4)],
        "delete": [],
        "get_range": b"12",
    }
    try:
        assert calls[call]() == expected[call]
    finally:
        timer.join()


def test_a_server_that_stays_away_is_given_up(use: Callable[..., ObjectStore]) -> None:
    with S3Server() as server:
        store = use(server, timeout=(patience := 2.0))
        server.stop()
        for call in (
            lambda: store.create("a", b""),
            lambda: store.put("a", b""),
            lambda: store.get("a", 1),
            store.list,
        ):
            assert 0.9 * patience < seconds_of(call) < AT_ONCE
        with pytest.raises(StoreError, match=r"s3://.* does not read a \(Connection refused\): no success within 2 s"):
            store.get("a", 1)
        with pytest.raises(RendezvousError, match="Connection refused"):
            ObjectStore(server.url, 1.0)
        server.restart()
        store.put("a", b"again")
        assert store.get("a", 10) == b"again"


def test_a_server_that_never_answers_is_given_up(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    silent = threading.Event()
    with FaultyProxy(server, lambda *_: Fault.SILENCE if silent.is_set() else None) as proxy:
        store = use(proxy, timeout=2.0)
        silent.set()
        for call in (
            lambda: store.create("a", b"x"),
            lambda: store.put("a", b"x"),
            lambda: store.put("a", bytes(4 * PART_BYTES)),
            lambda: store.get("a", 1),
            lambda: store.get_range("a", 0, 1),
            lambda: store.delete(["a"]),
            store.list,
        ):
            assert seconds_of(call) < AT_ONCE
        with pytest.raises(StoreError, match="no answer in time"):
            store.get("a", 1)


# A server with faults


def test_a_fifth_of_the_requests_fail(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    troubles: list[Trouble] = [500, 503, 429, Fault.DROP, Fault.LOSE_ANSWER, Fault.CUT_ANSWER, 0.3]
    with FaultyProxy(server, share_of(0.2, *troubles)) as proxy:
        store = use(proxy, timeout=20)
        data = os.urandom(2 * PART_BYTES)
        for number in range(60):
            assert store.create(f"created/{number}", b"mine")
            assert not store.create(f"created/{number}", b"theirs")
            assert store.get(f"created/{number}", 10) == b"mine"
            store.put("overwritten", str(number).encode())
            assert store.get("overwritten", 10) == str(number).encode()
        store.put("large", data)
        assert bytes(store.get_range("large", 5, len(data))) == data[5:]
        assert len(store.list("created")) == 60
        store.delete([f"created/{number}" for number in range(60)])
        assert [path for path, _ in store.list()] == ["large", "overwritten"]
        assert all(proxy.troubles[trouble] for trouble in troubles)


@pytest.mark.parametrize("times", [1, 3])
def test_a_creation_whose_answer_is_lost_is_our_own(
    server: S3Server, use: Callable[..., ObjectStore], times: int
) -> None:
    with FaultyProxy(server, first_of("PUT", Fault.LOSE_ANSWER, times)) as proxy:
        store = use(proxy)
        assert store.create("a", b"mine")
        assert proxy.troubles[Fault.LOSE_ANSWER] == times
        assert store.get("a", 10) == b"mine"


def test_a_creation_that_is_refused_for_a_moment_is_not_lost(
    server: S3Server, use: Callable[..., ObjectStore]
) -> None:
    with FaultyProxy(server, first_of("PUT", 409, 2)) as proxy:  # S3: a conflicting request is under way
        store = use(proxy)
        assert store.create("a", b"mine")
        assert proxy.troubles[409] == 2


@pytest.mark.parametrize("code", ["RequestTimeout", "BadDigest"])
def test_a_request_that_stalled_or_was_damaged_on_its_way_is_repeated(
    code: str, server: S3Server, use: Callable[..., ObjectStore]
) -> None:
    """For which S3 has the status of a request that makes no sense."""
    with FaultyProxy(server, first_of("PUT", 400, 2), code) as proxy:
        store = use(proxy)
        assert store.create("a", b"mine")
        assert proxy.troubles[400] == 2
        assert store.get("a", 10) == b"mine"


def test_an_upload_that_the_server_has_forgotten_is_begun_again(
    server: S3Server, use: Callable[..., ObjectStore]
) -> None:
    """As one that was restarted does."""
    with FaultyProxy(server, first_of("PUT", 404), "NoSuchUpload") as proxy:
        store, data = use(proxy, timeout=LONG), os.urandom(PART_BYTES + 7)
        store.put("large", memoryview(data))
        assert proxy.troubles[404] == 1
        assert store.get("large", len(data)) == data


def test_another_one_creates_while_our_request_is_lost(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    other = use(server)

    def decide(method: str, path: str) -> Trouble:
        if method == "PUT" and other.get("a", 10) is None:
            other.create("a", b"theirs")
            return Fault.DROP
        return None

    with FaultyProxy(server, decide) as proxy:
        assert not use(proxy).create("a", b"mine")
        assert other.get("a", 10) == b"theirs"


# Refusals


def test_a_server_that_ignores_conditions_is_found_out(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    use(server).check_creation()
    with FaultyProxy(server, lambda *_: Fault.FORGET_CONDITION) as proxy:
        store = use(proxy)
        with pytest.raises(RendezvousError, match="If-None-Match is ignored"):
            store.check_creation()
        assert store.list() == []


def test_a_server_that_does_not_know_conditions_is_found_out_at_once(
    server: S3Server, use: Callable[..., ObjectStore]
) -> None:
    with FaultyProxy(server, lambda method, _: 501 if method in ("PUT", "DELETE") else None) as proxy:
        store = use(proxy, timeout=LONG)
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"does not create checks/.*must offer conditional writes"):
            store.check_creation()
        assert proxy.troubles[501] == 1
        assert time.monotonic() - begun < AT_ONCE


def test_a_refusal_for_good_is_not_repeated(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    with FaultyProxy(server, lambda method, _: 405 if method == "PUT" else None) as proxy:
        store = use(proxy, timeout=LONG)
        with pytest.raises(StoreError, match=r"Injected: by the test.*must offer conditional writes"):
            store.create("a", b"")
        assert proxy.troubles[405] == 1


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "RequestTimeTooSkewed", "set this machine's clock"),
        (400, "AuthorizationHeaderMalformed", "set AWS_REGION to the bucket's region"),
        (301, "PermanentRedirect", "set AWS_REGION to the bucket's region"),
        (400, "ExpiredToken", "credentials.*AWS_SESSION_TOKEN"),
        (407, "", "NO_PROXY"),
        (501, "NotImplemented", "it must offer conditional writes"),
    ],
)
def test_what_stays_wrong_is_told_with_its_remedy(
    status: int, code: str, remedy: str, server: S3Server, use: Callable[..., ObjectStore]
) -> None:
    begun = time.monotonic()
    with (
        FaultyProxy(server, lambda *_: status, code) as proxy,
        pytest.raises(RendezvousError, match=remedy) as caught,
    ):
        use(proxy, timeout=TIMEOUT if status == 501 else LONG)  # of which the client repeats 5xx for half
    assert code in str(caught.value) or status == 301
    assert time.monotonic() - begun < AT_ONCE


@pytest.mark.parametrize("call", ["create", "put", "get", "list"])
def test_denied_access_is_said_at_once(server: S3Server, use: Callable[..., ObjectStore], call: str) -> None:
    denied = threading.Event()
    with FaultyProxy(server, lambda *_: 403 if denied.is_set() else None) as proxy:
        store = use(proxy, timeout=LONG)
        denied.set()
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: store.create("a", b""),
            "put": lambda: store.put("a", b""),
            "get": lambda: store.get("a", 1),
            "list": store.list,
        }
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"Injected: by the test.*credentials.*AWS_ACCESS_KEY_ID") as caught:
            calls[call]()
        assert time.monotonic() - begun < AT_ONCE
        assert "\n" not in str(caught.value)
        with pytest.raises(RendezvousError, match="AWS_ACCESS_KEY_ID"):
            ObjectStore(proxy.url)


def test_a_bucket_that_is_not_there(server: S3Server, use: Callable[..., ObjectStore]) -> None:
    use(server)
    with pytest.raises(RendezvousError, match=r"NoSuchBucket.*make the bucket"):
        ObjectStore("s3://other-bucket/runs")


def test_a_bucket_that_is_removed(use: Callable[..., ObjectStore]) -> None:
    with S3Server() as server:
        store = use(server)
        server.restart(with_bucket=False)
        for call in (
            lambda: store.get("a", 1),
            lambda: store.create("a", b""),
            store.list,
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(StoreError, match=r"NoSuchBucket.*make the bucket"):
                call()


def test_no_tls_must_be_allowed(
    server: S3Server, use: Callable[..., ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(RendezvousError, match="AWS_ALLOW_HTTP=true"):
        ObjectStore(server.url)


def test_missing_credentials(
    server: S3Server, use: Callable[..., ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RendezvousError, match=r"Missing SecretAccessKey.*AWS_SECRET_ACCESS_KEY"):
        ObjectStore(server.url)
