"""Who reaches the store that island 0 or node 0 keeps, and has no key: none of it ends, fills or stalls anything."""

from __future__ import annotations

import gzip
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.open import open_node
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.store import server, serving
from hf_diloco.store.credentials import make_key
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import StoreHost, url_of
from tests.clocks import LONG
from tests.islands import run_islands
from tests.meetings import Meeting
from tests.small_model import batches, make_model, take_step
from tests.strangers import Attack, say

LOCALHOST = "127.0.0.1"

REQUEST = b"PUT /runs/run/x HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"

REQUESTS: dict[str, Attack] = {
    "silent": say(lambda _: b""),
    "garbage": say(lambda count: random.Random(count).randbytes(100)),
    "half a request": say(lambda _: REQUEST[:40]),
    "oversized header": say(lambda _: b"GET /" + bytes(20_000).replace(b"\0", b"x")),
    "oversized request": say(lambda _: REQUEST % (1 << 40)),
    "request that never ends": say(lambda _: REQUEST % 1000),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("number", [100, pytest.param(1500, marks=pytest.mark.slow)])
def test_strangers_stop_no_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_port: int,
    name: str,
    number: int,
) -> None:
    for limit in ("STRANGER_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(serving, limit, 1.0)
    monkeypatch.setattr(serving, "MAX_STRANGERS", 20)
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    host = StoreHost(DiLoCoConfig(num_islands=2, max_islands=3, rendezvous=rendezvous), tmp_path)
    try:
        strangers = REQUESTS[name]((LOCALHOST, free_port), number)
        store = ObjectStore(url_of(rendezvous))
        for count in range(10):
            store.put(f"{count}", b"value")
            assert store.get(f"{count}", 100) == b"value"
        deadline = time.monotonic() + LONG
        while num_connected(free_port) > 2:  # those of the store's own
            assert time.monotonic() < deadline, "some are kept"
            time.sleep(0.1)
        for stranger in strangers:
            stranger.close()
    finally:
        host.close()
    assert not [record for record in caplog.records if record.name == "hf_diloco.serving"]
    socket.create_server((LOCALHOST, free_port)).close()


Turn = Callable[[], None]
"""Takes a round, or a step of nodes."""


@contextmanager
def coming_and_going(folder: Path, port: int, island: int) -> Iterator[Turn]:
    meeting = Meeting(folder, 2, max_islands=3, key_file=folder / "run.key", bind_address=LOCALHOST)
    meeting.url = f"tcp://{LOCALHOST}:{port}"
    member = meeting.island(island)

    def take() -> None:
        member.train(2)

    yield take
    assert [report.participants for report in member.reports] == [[0, 1]] * 30
    member.leave()


@contextmanager
def fixed(folder: Path, port: int, island: int) -> Iterator[Turn]:
    url = f"tcp://{LOCALHOST}:{port}"
    config = DiLoCoConfig(num_islands=2, island=island, rendezvous=url, key_file=folder / "run.key", sync_every=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = FixedSession(config, IslandGroup())
    session.join(open_shards(model, optimizer, 1), folder / f"island-{island}")
    turns = itertools.cycle(batches(island, 64))

    def take() -> None:
        for _ in range(2):
            take_step(model, optimizer, next(turns))
            session.outer.count_step(weight=4.0)
        session.sync()

    yield take
    assert session.outer.round == 30
    session.leave(finished=True)


@contextmanager
def nodes(folder: Path, port: int, node: int) -> Iterator[Turn]:
    url = f"tcp://{LOCALHOST}:{port}"
    config = GossipConfig(num_nodes=2, node=node, rendezvous=url, topology="ring", key_file=folder / "run.key")
    neighbours = open_node(config, make_topology("ring", 2), IslandGroup())
    vector, steps = torch.full((1000,), float(node)), itertools.count()

    def take() -> None:
        neighbours.mix([vector], [vector], next(steps))

    yield take
    assert torch.equal(vector, torch.full((1000,), 0.5))
    neighbours.close()


def seconds_without_a_core() -> float:
    """For which threads of this process, all together, could have computed, while others had the cores."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            total += int(file.read_text().split()[1])
    return 1e-9 * total


@pytest.mark.slow
@pytest.mark.parametrize("training", [coming_and_going, fixed, nodes])
def test_ten_rounds_after_an_attack_training_is_at_full_speed(
    training: Callable[[Path, int, int], AbstractContextManager[Turn]],
    tmp_path: Path,
    free_port: int,
    record_property: Callable[[str, object], None],
) -> None:
    """1,500 strangers come after the tenth round, in all ways by turns, and go after the twentieth."""
    make_key(tmp_path / "run.key")
    together = threading.Barrier(2)

    def run(number: int) -> dict[str, list[float]]:
        took: dict[str, list[float]] = {"before": [], "during": [], "after": []}
        with training(tmp_path, free_port, number) as take:
            for phase, seconds in took.items():
                strangers = []
                if number and phase == "during":
                    each = 1500 // len(REQUESTS)
                    strangers = [one for attack in REQUESTS.values() for one in attack((LOCALHOST, free_port), each)]
                together.wait(LONG)
                for _ in range(10):
                    began, before = time.monotonic(), seconds_without_a_core()
                    take()
                    lost = seconds_without_a_core() - before  # to other programs
                    seconds.append(max(1e-4, time.monotonic() - began - lost))
                for stranger in strangers:
                    stranger.close()
                together.wait(LONG)
        return took

    took = run_islands(2, run, LONG)[0]
    typical = {phase: sorted(seconds)[3] for phase, seconds in took.items()}  # not those that this machine disturbed
    ratio = typical["after"] / typical["before"]
    record_property("ratio", ratio)
    print(*(f"{phase}: {seconds:.4f} s a round;" for phase, seconds in typical.items()), f"after/before: {ratio:.2f}")
    assert typical["after"] < 3 * typical["before"] + 0.05


def test_of_requests_that_never_end_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(serving, "MAX_COMING_BYTES", 250_000)
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    host = StoreHost(DiLoCoConfig(num_islands=2, max_islands=3, rendezvous=rendezvous), tmp_path)
    try:
        strangers = say(lambda _: REQUEST % 1_000_000 + bytes(100_000))((LOCALHOST, free_port), 6)
        deadline = time.monotonic() + LONG
        while num_connected(free_port) > 2:
            assert time.monotonic() < deadline, "all are kept"
            time.sleep(0.05)
        store = ObjectStore(url_of(rendezvous))
        store.put("x", bytes(100_000))
        assert store.get("x", 100_000) == bytes(100_000)
        for stranger in strangers:
            stranger.close()
    finally:
        host.close()


@pytest.mark.parametrize(("limit", "value"), [("MAX_UNREAD_BYTES", 1), ("UNREAD_SECONDS", 0.5)])
@pytest.mark.parametrize("path", ["/runs/run/large", "/runs?prefix="])
def test_readers_that_take_nothing_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int, limit: str, value: float, path: str
) -> None:
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    host = StoreHost(DiLoCoConfig(num_islands=2, max_islands=3, rendezvous=rendezvous), tmp_path)
    try:
        store = ObjectStore(url_of(rendezvous))
        store.put("large", bytes(16 << 20))
        kept = num_connected(free_port)
        with monkeypatch.context() as changed:
            changed.setattr(serving, limit, value)
            changed.setattr(server, "_listed", lambda entry: "x" * (16 << 20))
            strangers = say(lambda _: request("GET", path))((LOCALHOST, free_port), 5)
            deadline = time.monotonic() + LONG
            while num_connected(free_port) > kept:
                assert time.monotonic() < deadline, "some are kept"
                time.sleep(0.05)
        assert store.get_range("large", 0, 16 << 20) == bytes(16 << 20)
        for stranger in strangers:
            stranger.close()
    finally:
        host.close()


@pytest.mark.parametrize(("limit", "value"), [("MAX_CONNECTIONS", 10), ("IDLE_SECONDS", 0.5)])
def test_those_that_ask_nothing_more_make_room(
    monkeypatch: pytest.MonkeyPatch, free_port: int, limit: str, value: float
) -> None:
    monkeypatch.setattr(serving, limit, value)
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    host = StoreHost(DiLoCoConfig(num_islands=2, rendezvous=rendezvous))
    try:
        strangers = say(lambda _: request("GET", "/"))((LOCALHOST, free_port), 50)
        deadline = time.monotonic() + LONG
        while num_connected(free_port) > 10:
            assert time.monotonic() < deadline, "all are kept"
            time.sleep(0.05)
        store = ObjectStore(url_of(rendezvous))
        store.put("x", b"value")
        assert store.get("x", 100) == b"value"
        for stranger in strangers:
            stranger.close()
    finally:
        host.close()


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = {"Host": "here", "Content-Length": f"{len(body)}", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


MALFORMED = {
    "path that is too long": request("PUT", f"/runs/{'a/' * 600}a", b"data"),
    "path of no text": request("PUT", "/runs/%ff%fe", b"data"),
    "part of no number": request("PUT", f"/runs/x?uploadId=x&partNumber={'9' * 5000}"),
    "parts of no number": request("POST", "/runs/x?uploadId=x", b"<PartNumber>%s</PartNumber>" % (b"9" * 5000)),
    "parts in no text": request("POST", "/runs/x?uploadId=x", b"\xff"),
    "unknown encoding": request("POST", "/runs/x?uploadId=x", b"x", Content_Type="text/xml; charset=zip"),
    "other encoding": request("POST", "/runs?delete", b"<Key>/</Key>", Content_Type="text/xml; charset=undefined"),
    "keys of no text": request("POST", "/runs?delete", b"<Key>\xff</Key>"),
    "range of no number": request("GET", "/runs/there", Range=f"bytes={'9' * 5000}-"),
    "list of no path": request("GET", "/runs?prefix=%00/x"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_makes_no_sense_is_refused_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, free_port: int, name: str, is_on_disk: bool
) -> None:
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    config = DiLoCoConfig(num_islands=2, max_islands=3, rendezvous=rendezvous)
    host = StoreHost(config, tmp_path if is_on_disk else None)
    try:
        with socket.create_connection((LOCALHOST, free_port), LONG) as stranger:
            stranger.sendall(request("PUT", "/runs/there", b"data"))
            assert b" 200 OK" in stranger.recv(1 << 16)
            stranger.sendall(MALFORMED[name])
            assert stranger.recv(1 << 16).startswith((b"HTTP/1.1 40", b"HTTP/1.1 416"))
    finally:
        host.close()
    assert not [record for record in caplog.records if record.name == "hf_diloco.serving"]


def test_what_is_compressed_stays_so(caplog: pytest.LogCaptureFixture, free_port: int) -> None:
    rendezvous = f"tcp://{LOCALHOST}:{free_port}"
    host = StoreHost(DiLoCoConfig(num_islands=2, max_islands=3, rendezvous=rendezvous))
    try:
        for body in (gzip.compress(bytes(10_000)), b"not compressed"):
            with socket.create_connection((LOCALHOST, free_port), LONG) as stranger:
                stranger.sendall(request("PUT", "/runs/run/x", body, Content_Encoding="gzip"))
                assert b" 200 OK" in stranger.recv(1 << 16)
            assert ObjectStore(url_of(rendezvous)).get("x", 1000) == body
    finally:
        host.close()
    assert not [record for record in caplog.records if record.name == "hf_diloco.serving"]


def num_connected(port: int) -> int:
    """Connections that are open on the side of who listens at a port of this process."""
    connections = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in connections)
