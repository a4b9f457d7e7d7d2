"""Who reaches a port while ends meet, and has no key: none of it ends, fills or stalls anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.distributed import ProcessGroupGloo

from hf_diloco.codecs import CODECS
from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.edges import Edge, Endpoint
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.values import ValueStore
from hf_diloco.transport import meeting
from hf_diloco.transport.base import Lane
from hf_diloco.transport.connections import Connections
from hf_diloco.transport.handshake import GlooAddresses
from hf_diloco.transport.meeting import Meeting
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.transfers import Deadline
from hf_diloco.utils import listening
from hf_diloco.utils.listening import Door, GlooListener
from hf_diloco.utils.public_keys import show_public
from tests.clocks import AT_ONCE, LONG, wait_until
from tests.islands import try_islands
from tests.strangers import Attack, say
from tests.tcp_stores import await_value

KEY, OTHER_KEY = LinkKey(b"0123456789abcdef"), LinkKey(b"fedcba9876543210")
PRIVATE = [Ed25519PrivateKey.generate() for _ in range(4)]
PUBLIC = [show_public(private.public_key().public_bytes_raw()) for private in PRIVATE]
LISTED = {0: [PUBLIC[0]], 1: [PUBLIC[1], f"{PUBLIC[3]} until 3"], 2: [PUBLIC[2]]}
LOCALHOST = "127.0.0.1"
LANE, EDGE = "lane", "gossip/0-1/1.1"
"""What two islands connect, and two nodes of a graph."""
SLOW = pytest.mark.slow


def hello(lane: str, own: int = 1, called: int = 0) -> bytes:
    said = meeting._HELLO.pack(meeting._MAGIC, meeting._digest(lane), own, called)
    return framed(said)


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def place_of(store: ValueStore, lane: str, end: int = 0) -> dict[str, Any]:
    """Where an end listens, once it has shown that."""
    return dict(json.loads(await_value(store, f"mesh/{lane}/at/{end}")))


def garbage(count: int) -> bytes:
    """Of a length that is too much to say, and of one that is not."""
    data = random.Random(count).randbytes(100)
    return framed(data) if count % 2 else data


NO_PROOFS = [framed(bytes(32)), framed(bytes(32))[:20], framed(bytes(16)) * 2]
"""Of one connection: of the right length, cut short, of two connections."""


def recorded(lane: str) -> bytes:
    """All that the calling end said in an earlier meeting of the same name and key."""
    heard, store = bytearray(), ValueStore.in_memory()
    relay = socket.create_server((LOCALHOST, 0))

    def pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept.extend(data)
                sink.sendall(data)

    def forward() -> None:
        client, _ = relay.accept()
        place = place_of(store, lane)
        server = socket.create_connection((place["host"], place["port"]))
        threading.Thread(target=pump, args=(server, client, bytearray()), daemon=True).start()
        pump(client, server, heard)

    class Diverted:
        """The store as end 1 sees it: end 0 is behind the relay."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, keys: list[str], *more: Any) -> dict[str, bytes]:
            shown, port = store.wait(keys, *more), relay.getsockname()[1]
            return {key: json.dumps({**json.loads(value), "port": port}).encode() for key, value in shown.items()}

    threading.Thread(target=forward, daemon=True).start()

    def run(end: int) -> None:
        seen: Any = Diverted() if end else store
        Connections(Lane(seen, lane, end, 2, LOCALHOST, LONG, KEY)).close()

    assert try_islands(2, run) == [None, None]
    relay.close()
    assert len(heard) > 100
    return bytes(heard)


def replay(said: bytes) -> Attack:
    return say(lambda _: said)


ATTACKS: dict[str, Callable[[str], Attack]] = {
    "silent": lambda _: say(lambda _: b""),
    "garbage": lambda _: say(garbage),
    "oversized": lambda _: say(lambda _: (1 << 31).to_bytes(4, "big") + bytes(5000)),
    "half a greeting": lambda lane: say(lambda _: hello(lane)[:30]),
    "greeting, then silence": lambda lane: say(lambda _: hello(lane)),
    "greeting, then rubbish": lambda lane: say(lambda count: hello(lane) + framed(NO_PROOFS[count % 3])),
    "of another lane": lambda _: say(lambda _: hello("other")),
    "of no end": lambda lane: say(lambda _: hello(lane, own=77)),
    "HTTP": lambda _: say(lambda _: b"GET / HTTP/1.1\r\n\r\n"),
    "replayed": lambda lane: replay(recorded(lane)),
}
"""By the lane at whose ports they are made."""


def average(store: ValueStore, island: int) -> torch.Tensor:
    """What an island has after three rounds with another one, each beginning with its number."""
    mesh = MeshExchange(Lane(store, LANE, island, 2, LOCALHOST, LONG, KEY))
    values = torch.full((1000,), float(island))
    for _ in range(3):
        mesh.average(values, [1.0, 1.0], CODECS["fp32"])
    mesh.close()
    return values


def mix(store: ValueStore, node: int) -> torch.Tensor:
    """As `average`, of two nodes of a graph."""
    edge = Edge(Endpoint(store, node, LOCALHOST, LONG, key=KEY), "gossip", 1 - node, "1.1", LONG)
    values, received = torch.full((1000,), float(node)), torch.empty(1000)
    for _ in range(3):
        transfers = edge.begin()
        edge.receive(received, transfers)
        edge.send(values.clone(), transfers)
        edge.wait(transfers, Deadline(LONG))
        values = (values + received) / 2
    edge.close()
    return values


def exchange_under(
    attack: Attack, number: int, lane: str, exchange: Callable[[ValueStore, int], torch.Tensor]
) -> tuple[list[torch.Tensor | BaseException], int]:
    """What two ends have while strangers are at the port of the first, and the most files that these cost."""
    store, most = ValueStore.in_memory(), 0
    lowest = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def run(island: int) -> torch.Tensor:
        nonlocal most
        strangers = []
        if island:
            place = place_of(store, lane)
            strangers = attack((place["host"], place["port"]), number)
            if sys.platform == "linux":
                most = len(os.listdir("/proc/self/fd")) - lowest - len(strangers)
        values = exchange(store, island)
        for stranger in strangers:
            stranger.close()
        return values

    return try_islands(2, run, LONG), most


@pytest.mark.parametrize(
    ("lane", "exchange", "name", "number"),
    [
        *((LANE, average, name, 100) for name in ATTACKS),
        *((EDGE, mix, name, 100) for name in ("silent", "replayed")),
        *(pytest.param(*of, name, 1500, marks=SLOW) for of in ((LANE, average), (EDGE, mix)) for name in ATTACKS),
    ],
)
def test_strangers_stop_no_meeting(
    lane: str, exchange: Callable[[ValueStore, int], torch.Tensor], name: str, number: int
) -> None:
    """Of islands, and of nodes of a graph."""
    attack, began = ATTACKS[name](lane), time.monotonic()
    outcomes, most = exchange_under(attack, number, lane, exchange)
    for outcome in outcomes:
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, torch.full((1000,), 0.5))
    # A busy event loop accepts as many again in each of the five turns that it takes to close one.
    assert most < 7 * meeting.MAX_STRANGERS, "files that they cost"
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
    store, claim = ValueStore.in_memory(), "which claims to be island 1 of lane"

    def run(island: int) -> torch.Tensor:
        if island == 2:
            shown, impostor = await_value(store, "mesh/lane/at/0"), ValueStore.in_memory()
            for end in (0, 1):
                impostor.set(f"mesh/lane/at/{end}", shown)
            MeshExchange(Lane(impostor, "lane", 1, 2, LOCALHOST, LONG, impostors))
        if island == 1:
            wait_until(lambda: claim in caplog.text, "the call of who has another key")
        mesh = MeshExchange(Lane(store, "lane", island, 2, LOCALHOST, LONG, ends[island]))
        values = torch.full((10,), float(island))
        mesh.average(values, [1.0, 1.0], CODECS["fp32"])
        mesh.close()
        return values

    first, second, impostor = try_islands(3, run)
    assert isinstance(impostor, BaseException)
    for outcome in (first, second):
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, torch.full((10,), 0.5))
    assert told in caplog.text


def test_the_last_call_of_an_end_counts_until_all_have_met() -> None:
    """An earlier one is closed, and a later one, such as one whose connection was slow, hears nothing."""
    store, all_have = ValueStore.in_memory(), threading.Barrier(2)

    def run(island: int) -> None:
        said = hello(LANE)
        if island:
            place = place_of(store, LANE)
            early, late = (socket.create_connection((place["host"], place["port"]), LONG) for _ in range(2))
            early.sendall(said)
            late.sendall(said[:30])
        with Meeting(Lane(store, LANE, island, 2, LOCALHOST, LONG), Deadline(LONG)) as one:
            all_have.wait(LONG)  # met
            if island:
                late.sendall(said[30:])
                assert late.recv(100) == b""
                while early.recv(100):
                    pass
            one.addresses.set(f"{island}", b"here")
            assert one.addresses.get(f"{1 - island}") == b"here"
        if island:
            early.close()
            late.close()

    assert try_islands(2, run) == [None, None]


def test_ends_are_looked_for_until_they_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """End 1 no more, while end 2, at which both others look, has not called yet."""
    looks, store, connect, all_have = (
        Counter[int](),
        ValueStore.in_memory(),
        asyncio.open_connection,
        threading.Barrier(3),
    )

    async def noted(host: str, port: int, **more: Any) -> Any:
        looks[port] += 1
        return await connect(host, port, **more)

    class Late:
        """The store as end 2 sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def wait(self, keys: list[str], *more: Any) -> dict[str, bytes]:
            first, second = (place_of(store, LANE, end)["port"] for end in (1, 2))
            deadline = time.monotonic() + LONG
            while looks[second] < 3 * looks[first] + 10 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert looks[second] >= 3 * looks[first] + 10
            return store.wait(keys, *more)

    def run(end: int) -> None:
        seen: Any = Late() if end == 2 else store
        with Meeting(Lane(seen, LANE, end, 3, LOCALHOST, 2 * LONG), Deadline(2 * LONG)):
            all_have.wait(LONG)  # met

    monkeypatch.setattr(meeting, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(asyncio, "open_connection", noted)
    assert try_islands(3, run, 3 * LONG) == [None] * 3


def reset_connection() -> socket.socket:
    """What was connected, and then reset by the other end: it no longer has one."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
    return client


def test_an_end_whose_connection_is_reset_at_once_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it was made: before asyncio asks for the address of the other end."""
    connect, store, num_resets = asyncio.open_connection, ValueStore.in_memory(), Counter[int]()

    async def reset_first(host: str, port: int, **more: Any) -> Any:
        num_resets[port] += 1
        if num_resets[port] <= 2:
            return await connect(sock=reset_connection(), **more)
        return await connect(host, port, **more)

    monkeypatch.setattr(asyncio, "open_connection", reset_first)

    def run(end: int) -> None:
        Connections(Lane(store, LANE, end, 2, LOCALHOST, AT_ONCE)).close()

    assert try_islands(2, run) == [None, None]


def test_an_unexpected_error_while_an_end_is_called_ends_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(asyncio, "open_connection", break_down)
    store = ValueStore.in_memory()
    shown = {"version": meeting.VERSION, "way": "without a key", "host": LOCALHOST, "port": 9}
    store.set(f"mesh/{LANE}/at/0", json.dumps(shown))
    with pytest.raises(RuntimeError, match="unexpected"):
        Meeting(Lane(store, LANE, 1, 2, LOCALHOST, AT_ONCE), Deadline(AT_ONCE))


def test_an_end_that_cannot_be_reached_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the deadline: it may yet call."""
    monkeypatch.setattr(meeting, "_WATCH_SECONDS", 0.02)
    store = ValueStore.in_memory()
    shown = {"version": meeting.VERSION, "way": "without a key", "host": "255.255.255.255", "port": 9}
    store.set(f"mesh/{LANE}/at/1", json.dumps(shown))
    with pytest.raises(IslandLostError, match="island 1 did not connect") as caught:
        Meeting(Lane(store, LANE, 0, 2, LOCALHOST, LONG), Deadline(0.3))
    assert caught.value.islands == (1,)
    for thread in threading.enumerate():
        if thread.name == "hf-diloco-meeting":
            thread.join(LONG)
    del caught  # which holds the meeting: tasks that have failed say so when they go
    gc.collect()
    assert "Meeting._watch" not in caplog.text


@pytest.mark.parametrize(("own", "other"), [(0, 1), (1, 0)])
def test_a_place_that_leads_nowhere_is_told_long_before_the_deadline(
    own: int, other: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "UNREACHABLE_SECONDS", 0.2)
    monkeypatch.setattr(meeting, "_WATCH_SECONDS", 0.02)
    store = ValueStore.in_memory()
    shown = {"version": meeting.VERSION, "way": "without a key", "host": "255.255.255.255", "port": 9}
    store.set(f"mesh/{LANE}/at/{other}", json.dumps(shown))
    with pytest.raises(IslandLostError, match=f"island {other} did not connect"):
        Meeting(Lane(store, LANE, own, 2, LOCALHOST, LONG), Deadline(1.0))
    told = [record.getMessage() for record in caplog.records if "cannot be reached" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"island {other} cannot be reached where it listens (255.255.255.255, port 9: ")
    assert "bind_address" in told[0]


def test_an_end_that_breaks_off_while_gloo_connects_is_lost() -> None:
    store, all_have = ValueStore.in_memory(), threading.Barrier(2)

    def run(island: int) -> None:
        with Meeting(Lane(store, LANE, island, 2, LOCALHOST, LONG), Deadline(LONG)) as one:
            all_have.wait(LONG)  # met
            if island:
                raise RuntimeError("Gloo cannot listen")
            one.addresses.get("1")

    lost, broken = try_islands(2, run)
    assert isinstance(broken, RuntimeError)
    assert isinstance(lost, IslandLostError)
    assert lost.islands == (1,)
    assert "island 1 broke off while they connected" in str(lost)


@pytest.mark.parametrize(
    "said", [b"5", b"[7]", b'["key", 7]', b'["key", "zz"]', b"{", b"\xff", b"[" * 100_000], ids=lambda said: said[:9]
)
def test_what_is_no_address_of_gloo_is_not_taken(said: bytes) -> None:
    addresses = GlooAddresses(lambda key, value: None, Deadline(0.0))
    with pytest.raises(ValueError):
        addresses.hear(1, said)
    assert addresses.num_heard[1] == 0
    addresses.hear(1, b'["key", "00ff"]')
    assert addresses.get("key") == b"\x00\xff"
    with pytest.raises(IslandLostError, match="the others did not all say where Gloo listens"):
        addresses.get("other")


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


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux'")
def test_a_device_is_told_apart_from_what_else_begins_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another edge's meeting, in a thread of its own: without a door, Gloo would answer everybody to the end."""
    create, others = ProcessGroupGloo.create_device, list[socket.socket]()

    def create_among_others(**arguments: str) -> object:
        if len(others) < 2:
            others.append(socket.create_server((LOCALHOST, 0)))
        return create(**arguments)

    monkeypatch.setattr(ProcessGroupGloo, "create_device", create_among_others)
    with GlooListener(LOCALHOST, {"127.0.0.2"}) as listener:
        assert isinstance(listener.door, Door)
        assert listener.door.address not in [other.getsockname() for other in others]
        assert answers(listener.door.address, "127.0.0.2")
        assert not answers(listener.door.address, "127.0.0.3")
    for other in others:
        other.close()
