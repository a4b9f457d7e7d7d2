"""Objects in folders and in memory: every promise that the protocol between islands rests on."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_diloco.errors import ConfigError, ExchangeError, RendezvousError, StoreError
from hf_diloco.store.backends import client_options
from hf_diloco.store.failures import reason_of
from hf_diloco.store.objects import ObjectStore
from hf_diloco.utils.urls import check_store_url
from tests.processes import Processes
from tests.store_servers import serving

GOOD_PATHS = ["a", "a/b.json", "rounds/12/0/plan.json", "payloads/3/0-1/rank-0.bin", "a.b/..c/_-+=", ".hidden"]
BAD_PATHS = [
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/..",
    "a/../b",
    ".",
    "a/.",
    "a b",
    "a#1",
    "a\\b",
    "a\nb",
    "a\0",
    "ä",
    "x" * 600,
]

WRITER = """
import sys
from hf_diloco.store.objects import ObjectStore
store = ObjectStore(sys.argv[1])
count = 0
while True:
    store.put("state.bin", bytes([count % 256]) * (1 << 20))
    store.put("small.json", bytes([count % 256]) * 1000)
    store.create(f"created/{count}", bytes([count % 256]) * 1000)
    if count == 0:
        print("has begun", flush=True)
    count += 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served") / "new") as address:
        yield address


@pytest.fixture(params=["file", "memory", "http"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: str) -> ObjectStore:
    name = uuid.uuid4().hex
    url = {"file": f"file://{tmp_path}/new", "memory": f"memory://{name}", "http": f"{server}/{name}"}[request.param]
    return ObjectStore(url)


# Creation, writing, reading


def test_what_is_created_stays(store: ObjectStore) -> None:
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert not store.create("a/b", b"other")
    assert not store.create("a/b", b"")
    assert store.create("a/b", b"first")  # as if the first answer had been lost
    assert store.get("a/b", 100) == b"first"


def test_creation_is_checked(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check_creation()
    assert store.list() == []
    monkeypatch.setattr(ObjectStore, "create", lambda self, path, data: self.put(path, data) is None)
    with pytest.raises(RendezvousError, match="If-None-Match is ignored"):
        store.check_creation()
    assert store.list() == []


def test_put_overwrites(store: ObjectStore) -> None:
    for data in (b"one", b"", b"three", bytes(12 << 20), bytearray(b"x"), memoryview(b"abcdef")[1:4]):
        store.put("a", data)
        assert store.get("a", 20 << 20) == bytes(data)
    store.put("a", memoryview(bytes(24)).cast("f"))
    assert store.get("a", 24) == bytes(24)


def test_absent_is_none(store: ObjectStore) -> None:
    assert store.get("a", 100) is None
    store.put("a/b", b"")
    assert store.get("a/c", 100) is None


def test_a_folder_is_no_object(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    try:
        assert store.get("a", 100) is None
    except StoreError:
        assert store.url.startswith("file:")


def test_too_large_is_not_downloaded(store: ObjectStore) -> None:
    store.put("a", bytes(101))
    assert store.get("a", 101) == bytes(101)
    with pytest.raises(StoreError, match=r"a has 101 bytes, more than the 100"):
        store.get("a", 100)


def test_ranges(store: ObjectStore) -> None:
    data = os.urandom(3 << 20)
    store.put("a", data)
    cuts = [(0, 1), (5, 2 << 20), (2 << 20, 3 << 20), (1, 2), (0, 3 << 20)]
    for start, end in cuts:
        assert bytes(store.get_range("a", start, end)) == data[start:end]


@pytest.mark.parametrize(("start", "end"), [(0, 11), (9, 11), (10, 11), (10, 20), (20, 30), (5 << 20, 6 << 20)])
def test_short_objects_are_noticed(store: ObjectStore, start: int, end: int) -> None:
    store.put("a", bytes(10))
    with pytest.raises(StoreError, match="a ends"):
        store.get_range("a", start, end)


def test_a_range_of_nothing(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="gone is absent, but should be there"):
        store.get_range("gone", 0, 1)


# Lists and deletion


def test_list_is_recursive_and_sorted(store: ObjectStore) -> None:
    for path in ("rounds/10/a", "rounds/1/a", "rounds/1/b/c", "round/x", "z"):
        store.put(path, path.encode())
    assert store.list() == sorted((path, len(path)) for path, _ in store.list())
    assert [path for path, _ in store.list("rounds")] == ["rounds/1/a", "rounds/1/b/c", "rounds/10/a"]
    assert store.list("rounds/1/") == [("rounds/1/a", 10), ("rounds/1/b/c", 12)]
    assert store.list("nothing") == []


def test_delete(store: ObjectStore) -> None:
    paths = [f"a/{number}" for number in range(30)]
    for path in paths[::2]:
        store.put(path, b"x")
    store.put("b", b"x")
    store.delete(paths)  # every other one is absent
    assert store.list() == [("b", 1)]
    store.delete([])
    store.delete(["b", "b"])
    assert store.list() == []


def test_list_while_others_delete_and_write(store: ObjectStore) -> None:
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for number in range(20):
                store.put(f"a/{number}", b"x")
            store.delete([f"a/{number}" for number in range(20)])

    store.put("a/stays", b"y")
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(churn) for _ in range(2)]
        try:
            for _ in range(200):
                assert ("a/stays", 1) in store.list("a")
        finally:
            ended.set()
        for one in done:
            one.result()


# Races


def test_exactly_one_creates(store: ObjectStore) -> None:
    num_threads, num_races = 8, 100
    start = threading.Barrier(num_threads)

    def race(thread: int) -> list[bool]:
        wins = []
        for number in range(num_races):
            start.wait()
            wins.append(store.create(f"races/{number}", f"thread {thread}".encode()))
        return wins

    with ThreadPoolExecutor(num_threads) as pool:
        wins = list(pool.map(race, range(num_threads)))
    for number in range(num_races):
        (winner,) = [thread for thread in range(num_threads) if wins[thread][number]]
        assert store.get(f"races/{number}", 100) == f"thread {winner}".encode()


def test_readers_see_objects_whole(store: ObjectStore) -> None:
    ended = threading.Event()

    def write(value: int) -> None:
        while not ended.is_set():
            store.put("small", bytes([value]) * (value * 100))
            store.put("large", bytes([value]) * (6 << 20))  # in parts

    for name in ("small", "large"):
        store.put(name, bytes([1]) * (6 << 20))
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(write, value) for value in (1, 2)]
        try:
            for _ in range(40):
                for name in ("small", "large"):
                    data = store.get(name, 6 << 20)
                    assert data
                    assert data.count(data[0]) == len(data)
                    assert len(data) in (100, 200, 6 << 20)
        finally:
            ended.set()
        for one in done:
            one.result()


def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/{number}" for number in range(4)]
    with Processes() as processes:
        writers = [processes.spawn([sys.executable, "-c", WRITER, url]) for url in urls]
        for writer in writers:
            writer.wait_for("has begun")
            time.sleep(random.uniform(0.05, 0.2))
            writer.kill()
            writer.wait(expect=-9)
    num_seen = 0
    for store in map(ObjectStore, urls):
        for path, size in store.list():
            assert "#" not in path
            assert size == (1 << 20 if path == "state.bin" else 1000)
            data = store.get(path, size) or b""
            assert data.count(data[0]) == size
            num_seen += 1
        store.put("state.bin", b"goes on")
        assert store.get("state.bin", 10) == b"goes on"
    assert num_seen > 0


def test_what_a_dead_writer_left_is_neither_listed_nor_in_the_way(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    for name in ("a#1", "a#2", "b c", "ä"):
        (tmp_path / name).write_bytes(b"half")
    assert store.list() == []
    assert store.create("a", b"whole")
    store.put("a", b"again")
    assert store.list() == [("a", 5)]


# Paths and URLs


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_good_paths(store: ObjectStore, path: str) -> None:
    assert store.create(path, b"x")
    assert store.get(path, 1) == b"x"
    assert store.list() == [(path, 1)]
    store.move(path, "moved")
    assert store.list() == [("moved", 1)]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_bad_paths(store: ObjectStore, path: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.create(path, b"x"),
        lambda: store.put(path, b"x"),
        lambda: store.get(path, 1),
        lambda: store.get_range(path, 0, 1),
        lambda: store.delete(["good", path]),
    ]
    if path.strip("/") and path != "a/":  # a prefix may be empty, and end with a slash
        calls.append(lambda: store.list(path))
    store.put("good", b"x")
    for call in calls:
        with pytest.raises(StoreError, match="is no path in an object store"):
            call()
    assert store.list() == [("good", 1)]
    assert len([entry for entry in tmp_path.rglob("*") if entry.is_file()]) <= 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "runs",
        "/runs",
        "tcp://10.0.0.1:29400",
        "http://",
        "http://host:1",
        "http://host:65536/x",
        "http://host:1/a b",
        "http://me:secret@host/x",
        "ftp://host/x",
        "s3://",
        "s3:///prefix",
        "s3:bucket",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a b",
        "s3://bucket/x?versionId=1",
        "s3://user:secret@bucket/x",
        "gs://",
        "az://",
        "memory://",
        "memory://a//b",
        "S3://bucket",
        "s3://bucket\n",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected file:///DIR, s3://BUCKET/PREFIX"):
        check_store_url(url)
    with pytest.raises(ConfigError, match="is no object store"):
        ObjectStore(url)


@pytest.mark.parametrize(
    "url", ["file:runs", "file://runs/x", "file://./runs", "file:///", "file://", "file:/abs", "file:///a?b"]
)
def test_folders_need_their_full_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="three slashes"):
        ObjectStore(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://a.b-c/x/y",
        "gs://bucket/x",
        "az://container/x",
        "memory://a-b",
        "file:///x",
        "http://h:1/a",
        "https://h.x/a",
    ],
)
def test_good_urls(url: str) -> None:
    assert check_store_url(url) == url
    assert check_store_url(url + "/") == url


def test_a_folder_is_made(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/b%20c/")
    assert store.url == f"file://{tmp_path}/b%20c"
    store.put("x/y", b"z")
    assert (tmp_path / "b c" / "x" / "y").read_bytes() == b"z"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RendezvousError, match=r"file:///.*/file.* cannot be opened .*folder must be writable"):
        ObjectStore(f"file://{tmp_path}/file/below")
    with pytest.raises(RendezvousError, match="folder must be writable"):
        ObjectStore(f"file://{tmp_path}/file")


def test_a_folder_that_goes_wrong_later(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/runs")
    (tmp_path / "other").mkdir()  # beside the first, as a number that is free again may be given to the next folder
    (tmp_path / "runs").rmdir()
    for look in (lambda: store.get("a", 1), lambda: store.list(), lambda: store.put("a", b"")):
        with pytest.raises(StoreError, match="the folder is gone: is it still mounted"):
            look()
    (tmp_path / "other").rename(tmp_path / "runs")
    with pytest.raises(StoreError, match="another folder is there now: is it still mounted"):
        store.get("a", 1)
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").write_text("")  # a file: nothing can be written below it
    for call in (lambda: store.create("a/b", b""), lambda: store.put("a/b", b"")):
        with pytest.raises(StoreError, match=r"file:///.*runs does not (create|write) a/b \(.*\): the folder must be"):
            call()
    assert issubclass(StoreError, ExchangeError)


def test_memory_is_shared_by_name() -> None:
    one, same, other = (ObjectStore(f"memory://shared-{name}") for name in "aab")
    one.put("x", b"1")
    assert same.get("x", 1) == b"1"
    assert other.get("x", 1) is None


def test_azure_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(RendezvousError, match=r"az://container/x cannot be opened.*AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectStore("az://container/x")


def test_what_the_environment_says_about_the_connection() -> None:
    environment = {"AWS_ALLOW_HTTP": "True", "AWS_PROXY_URL": "http://proxy:3128", "AZURE_ALLOW_HTTP": "false"}
    assert client_options("AWS", environment) == {"allow_http": True, "proxy_url": "http://proxy:3128"}
    assert client_options("AZURE", environment) == {"allow_http": False}
    assert client_options("GOOGLE", environment) == {}


def test_reasons_are_one_line_without_addresses() -> None:
    error = RuntimeError(
        "Generic MicrosoftAzure error: Error performing GET https://a.blob.core.windows.net/c/x?sig=SECRET in 1s - "
        "HTTP error: error sending request\n\nDebug source:\nGeneric {\n uri: https://a/c/x?sig=SECRET\n}"
    )
    assert reason_of(error) == "HTTP error: error sending request"
    assert reason_of(RuntimeError("... status code: 403 Forbidden: <html>?sig=SECRET")) == "403 Forbidden"
    assert reason_of(RuntimeError("")) == "RuntimeError"
