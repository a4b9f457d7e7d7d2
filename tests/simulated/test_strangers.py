"""Who reaches a port while ends meet, and has no key: none of it ends, fills or stalls anything."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.distributed import HashStore, ProcessGroupGloo

from hf_diloco.codecs import CODECS
from hf_diloco.config import DiLoCoConfig
from hf_diloco.sealing import LinkKey, Roster, Signer
from hf_diloco.store import serving
from hf_diloco.store.host import StoreHost, url_of
from hf_diloco.store.objects import open_object_store
from hf_diloco.transport import meeting
from hf_diloco.transport.connections import Connections
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.utils import listening
from hf_diloco.utils.listening import Door, GlooListener
from hf_diloco.utils.public_keys import show_public
from tests.clocks import LONG
from tests.islands import try_islands

KEY, OTHER_KEY = LinkKey(b"0123456789abcdef"), LinkKey(b"fedcba9876543210")
PRIVATE = [Ed25519PrivateKey.generate() for _ in range(4)]
PUBLIC = [show_public(private.public_key().public_bytes_raw()) for private in PRIVATE]
LISTED = {0: [PUBLIC[0]], 1: [PUBLIC[1], f"{PUBLIC[3]} until 3"], 2: [PUBLIC[2]]}
LOCALHOST = "127.0.0.1"
Attack = Callable[[tuple[str, int], int], list[socket.socket]]


def hello(own: int = 1, called: int = 0, lane: str = "lane") -> bytes:
    said = meeting._HELLO.pack(meeting._MAGIC, meeting._digest(lane), own, called)
    return len(said).to_bytes(4, "big") + said


def say(what: Callable[[int], bytes]) -> Attack:
    """Opens so many connections, and says something on each."""

    def attack(address: tuple[str, int], number: int) -> list[socket.socket]:
        strangers = []
        for count in range(number):
            stranger = socket.socket()
            stranger.settimeout(0.2)
            with contextlib.suppress(OSError):
                stranger.connect(address)
                stranger.sendall(what(count))
            strangers.append(stranger)
        return strangers

    return attack


def recorded() -> bytes:
    """All that the calling end said in an earlier meeting of the same name and key."""
    heard, store = bytearray(), HashStore()
    relay = socket.create_server((LOCALHOST, 0))

    def pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept.extend(data)
                sink.sendall(data)

    def forward() -> None:
        client, _ = relay.accept()
        place = json.loads(store.get("mesh/lane/at/0"))
        server = socket.create_connection((place["host"], place["port"]))
        threading.Thread(target=pump, args=(server, client, bytearray()), daemon=True).start()
        pump(client, server, heard)

    class Diverted:
        """The store as end 1 sees it: end 0 is behind the relay."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            shown = store.get(key)
            return json.dumps({**json.loads(shown), "port": relay.getsockname()[1]}).encode()

    threading.Thread(target=forward, daemon=True).start()

    def run(end: int) -> None:
        seen: Any = Diverted() if end else store
        Connections(seen, "lane", end, 2, LOCALHOST, LONG, key=KEY).close()

    assert try_islands(2, run) == [None, None]
    relay.close()
    assert len(heard) > 100
    return bytes(heard)


def replay(said: bytes) -> Attack:
    return say(lambda _: said)


ATTACKS: dict[str, Callable[[], Attack]] = {
    "silent": lambda: say(lambda _: b""),
    "garbage": lambda: say(lambda count: random.Random(count).randbytes(100)),
    "oversized": lambda: say(lambda _: (1 << 31).to_bytes(4, "big") + bytes(5000)),
    "half a greeting": lambda: say(lambda _: hello()[:30]),
    "greeting, then silence": lambda: say(lambda _: hello()),
    "greeting, then rubbish": lambda: say(lambda _: hello() + b"\0\0\0\x24\0\0\0\x20" + bytes(32)),
    "of another lane": lambda: say(lambda _: hello(lane="other")),
    "of no end": lambda: say(lambda _: hello(own=77)),
    "HTTP": lambda: say(lambda _: b"GET / HTTP/1.1\r\n\r\n"),
    "replayed": lambda: replay(recorded()),
}


def exchange_under(attack: Attack, number: int) -> tuple[list[torch.Tensor | BaseException], int]:
    """What two islands average while strangers are at the port of the first, and the most files that these cost."""
    store, most = HashStore(), 0
    lowest = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def run(island: int) -> torch.Tensor:
        nonlocal most
        strangers = []
        if island:
            store.wait(["mesh/lane/at/0"])
            place = json.loads(store.get("mesh/lane/at/0"))
            strangers = attack((place["host"], place["port"]), number)
            if sys.platform == "linux":
                most = len(os.listdir("/proc/self/fd")) - lowest - len(strangers)
        mesh = MeshExchange(store, "lane", island, 2, LOCALHOST, LONG, KEY)
        values = torch.full((1000,), float(island))
        for _ in range(3):
            mesh.average(values, [1.0, 1.0], CODECS["fp32"])
        mesh.close()
        for stranger in strangers:
            stranger.close()
        return values

    return try_islands(2, run, LONG), most


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("number", [100, pytest.param(1500, marks=pytest.mark.slow)])
def test_strangers_stop_no_meeting(name: str, number: int) -> None:
    attack, began = ATTACKS[name](), time.monotonic()
    outcomes, most = exchange_under(attack, number)
    for outcome in outcomes:
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, torch.full((1000,), 0.5))
    assert most < 4 * meeting.MAX_STRANGERS, "files that they cost"
    assert time.monotonic() - began < meeting.STRANGER_SECONDS + number / 100


def link_key(island: int, private: Ed25519PrivateKey) -> LinkKey:
    """Of an island with an identity, or who claims to be it."""
    own = show_public(private.public_key().public_bytes_raw())
    listed = LISTED if own in LISTED[island] else LISTED | {island: [own]}
    return LinkKey(KEY.secret, signer=Signer(private, island, Roster(listed)))


@pytest.mark.parametrize(
    ("ends", "impostors", "told"),
    [
        ([KEY, KEY], OTHER_KEY, "does not hold the run's key"),
        (
            [link_key(0, PRIVATE[0]), link_key(1, PRIVATE[1])],
            link_key(1, PRIVATE[2]),
            f"island 1 shows the identity {PUBLIC[2]}, which is not listed for it here",
        ),
        (
            [link_key(0, PRIVATE[0]), link_key(1, PRIVATE[1])],
            link_key(1, PRIVATE[3]),
            f"island 1 shows the identity {PUBLIC[3]}, which counts until round 3 only",
        ),
    ],
    ids=["another key", "identity of another island", "revoked identity"],
)
def test_who_has_another_key_cannot_take_an_ends_place(
    ends: list[LinkKey], impostors: LinkKey, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It calls first, under the number of an end that comes later."""
    store = HashStore()

    def run(island: int) -> torch.Tensor:
        if island == 2:
            store.wait(["mesh/lane/at/0"])
            impostor = HashStore()
            for end in (0, 1):
                impostor.set(f"mesh/lane/at/{end}", store.get("mesh/lane/at/0").decode())
            MeshExchange(impostor, "lane", 1, 2, LOCALHOST, 2.0, impostors)
        if island == 1:
            store.wait(["mesh/lane/at/0"])
            time.sleep(1)
        mesh = MeshExchange(store, "lane", island, 2, LOCALHOST, LONG, ends[island])
        values = torch.full((10,), float(island))
        mesh.average(values, [1.0, 1.0], CODECS["fp32"])
        mesh.close()
        return values

    first, second, impostor = try_islands(3, run)
    assert isinstance(impostor, BaseException)
    for outcome in (first, second):
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, torch.full((10,), 0.5))
    assert "which claims to be island 1 of lane" in caplog.text
    assert told in caplog.text


# The store that island 0 keeps

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
        store = open_object_store(url_of(rendezvous))
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
        store = open_object_store(url_of(rendezvous))
        store.put("x", bytes(100_000))
        assert store.get("x", 100_000) == bytes(100_000)
        for stranger in strangers:
            stranger.close()
    finally:
        host.close()


def num_connected(port: int) -> int:
    """Connections that are open on the side of who listens at a port of this process."""
    connections = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in connections)


# Gloo's own port


def answers(address: tuple[str, int], source: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, 0.3, (source, 0)):
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux'")
def test_gloo_answers_the_hosts_of_the_ends_only() -> None:
    with GlooListener(LOCALHOST, {"127.0.0.2", "127.0.0.3"}) as listener:
        assert listener.door is not None
        address = listener.door.address
        found = {source: answers(address, source) for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")}
    assert found == {"127.0.0.1": False, "127.0.0.2": True, "127.0.0.3": True, "127.0.0.4": False}
    assert not answers(address, "127.0.0.2")


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux'")
def test_gloo_answers_ends_over_ipv6() -> None:
    with GlooListener("::1", {"::1", "fe80::1"}) as listener:
        assert listener.door is not None
        assert answers(listener.door.address, "::1")
    with GlooListener("::1", {"::2"}) as listener:
        assert listener.door is not None
        assert not answers(listener.door.address, "::1")


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux'")
def test_a_device_that_somebody_has_reached_before_its_filter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    create, strangers = ProcessGroupGloo.create_device, list[socket.socket]()
    reached: list[object] = []

    def create_reached(**arguments: str) -> object:
        before = listening._listening()
        device = create(**arguments)
        if len(reached) < 2:
            (address,) = [name for name in listening._listening() if name not in before]
            strangers.append(socket.create_connection(address))
            reached.append(address)
        return device

    monkeypatch.setattr(ProcessGroupGloo, "create_device", create_reached)
    with GlooListener(LOCALHOST, {LOCALHOST}) as listener:
        assert isinstance(listener.door, Door)
        assert len(reached) == 2
        assert listener.door.address not in reached
    for stranger in strangers:
        stranger.close()
