"""Several connections between two islands, and a limit to what goes over them; islands are threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable

import pytest
import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import ExchangeError, IslandLostError
from hf_diloco.rounds.direct import Range, SegmentedMesh
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.store.values import LINKS, ValueStore
from hf_diloco.transport import connections
from hf_diloco.transport.base import Exchange, Lane, RateLimit
from hf_diloco.transport.connections import MAX_PART_BYTES, MIN_LONE_PART_BYTES, MIN_PART_BYTES, Connections
from hf_diloco.transport.handshake import Line
from hf_diloco.transport.meeting import Meeting
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.transfers import Deadline, Transfers
from tests.clocks import AT_ONCE, LONG
from tests.islands import count_files, run_islands, try_islands
from tests.tcp_stores import KeptStore

KEY = b"0123456789abcdef"
LOCALHOST = "127.0.0.1"
FP32 = CODECS["fp32"]


def tcp_store() -> Callable[[], ValueStore]:
    host = KeptStore()
    return lambda: host.client()


def shared_store() -> Callable[[], ValueStore]:
    store = ValueStore.in_memory()
    return lambda: store


def links_in_a_log() -> Callable[[], ValueStore]:
    url = f"memory://{uuid.uuid4().hex}"
    return lambda: ValueStore(RunLog(ObjectStore(url), Seal(KEY, "run-1")), LINKS)


def joined(num_ends: int, num_connections: int, talk: Callable[[int, Connections], object]) -> list[object]:
    """What `talk` returns or raises at each end of fresh connections, all of which stay open until all have ended."""
    store = ValueStore.in_memory()
    connected, ended = threading.Barrier(num_ends), threading.Barrier(num_ends)

    def run(end: int) -> object:
        links = Connections(Lane(store, "0", end, num_ends, LOCALHOST, LONG, num_connections=num_connections))
        try:
            connected.wait(LONG)
            return talk(end, links)
        finally:
            ended.wait(LONG)
            links.close()

    return list(try_islands(num_ends, run))


def test_a_forked_process_holds_no_connection() -> None:
    """It may outlive this one, whose kill the other ends are to notice."""
    before = connections_here()

    def talk(end: int, links: Connections) -> tuple[int, int]:
        here = len(connections_here() - before)
        if child := os.fork():
            return here, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = 100
        try:
            left = len(connections_here() - before)
        finally:
            os._exit(left)

    assert joined(2, 2, talk) == [(4, 0), (4, 0)]


def connections_here() -> set[int]:
    """The inodes of this process's connected sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_INET and one.getpeername():
                found.add(os.fstat(one.fileno()).st_ino)
    return found


# What goes over them


def make_values(island: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(island))


@pytest.mark.parametrize("make_store", [tcp_store, shared_store, links_in_a_log])
def test_islands_connect_through_every_store(make_store: Callable[[], Callable[[], ValueStore]]) -> None:
    """Groups are set up at the same time, and wait for each other's keys in one store."""
    get_store = make_store()
    size = 1_500_000
    whole = [Range(0, size)]

    def average(island: int, mesh: Exchange | SegmentedMesh) -> torch.Tensor:
        values = make_values(island, size)
        mesh.average(values, [1.0, 2.0, 3.0], FP32)
        mesh.close()
        return values

    def run(island: int) -> torch.Tensor:
        store = get_store()
        return average(
            island, SegmentedMesh(Lane(store, "a", island, 3, LOCALHOST, LONG, LinkKey(KEY), 4), whole[0], [whole] * 3)
        )

    network = MemoryNetwork(3)
    expected = run_islands(3, lambda island: average(island, network.lane("0", island)))
    for values in run_islands(3, run):
        assert torch.equal(values, expected[0])


def test_an_end_that_met_and_does_not_connect_is_given_up_in_time() -> None:
    store, given_up = ValueStore.in_memory(), threading.Event()

    def run(end: int) -> None:
        if end:
            with Meeting(Lane(store, "0", end, 2, LOCALHOST, LONG), Deadline(LONG)):
                given_up.wait(LONG)
                raise ConnectionError("so that nobody waits for the other end")
        try:
            Connections(Lane(store, "0", end, 2, LOCALHOST, 0.5))
        finally:
            given_up.set()

    here, there = try_islands(2, run)
    assert isinstance(here, IslandLostError)
    assert str(here).startswith("the islands could not connect to each other within 0.5 s")
    assert isinstance(there, ConnectionError)


def test_an_end_that_goes_away_while_they_connect_is_not_waited_for() -> None:
    """Nor does the message speak of the time that was left."""
    store = ValueStore.in_memory()

    def run(end: int) -> None:
        lane = Lane(store, "0", end, 2, LOCALHOST, LONG)
        if end:
            with Meeting(lane, Deadline(LONG)):
                raise ConnectionError("so that nobody waits for the other end")
        Connections(lane)

    here, _ = try_islands(2, run)
    assert isinstance(here, IslandLostError)
    assert str(here).startswith("the islands could not connect to each other (this one listens on 127.0.0.1): see why")
    assert "within" not in str(here)


def test_an_address_that_this_machine_has_not_is_told() -> None:
    """As that of a VPN that is down for a moment: no other island is to blame."""
    with pytest.raises(IslandLostError, match=r"island 1 cannot listen on 192\.0\.2\.1 .*check bind_address") as told:
        Connections(Lane(ValueStore.in_memory(), "0", 1, 2, "192.0.2.1", LONG))
    assert told.value.islands == (1,)


def test_an_end_that_is_gone_when_nothing_more_is_said_ends_nothing() -> None:
    """This end has yet to hear of it; else its thread would end, and whoever waits for that wait for ever."""

    async def meet() -> None:
        with socket.create_server((LOCALHOST, 0)) as listener:
            line = Line(*await asyncio.open_connection(*listener.getsockname()))
            other, _ = listener.accept()
        line.send(b"what the other end does not read")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()  # as a process that is killed closes it
        line.end()
        line.close()

    asyncio.run(meet())


@pytest.mark.parametrize("num_connections", [1, 3, 4])
@pytest.mark.parametrize("min_part", [MIN_LONE_PART_BYTES, MIN_PART_BYTES])
@pytest.mark.parametrize("size", [0, 1, MIN_LONE_PART_BYTES + 1, MIN_PART_BYTES, 5 * MAX_PART_BYTES + 3])
def test_what_is_sent_is_cut_into_parts_for_all_connections(num_connections: int, min_part: int, size: int) -> None:
    def talk(end: int, links: Connections) -> list[tuple[int, int]]:
        parts = links.spread(torch.empty(size, dtype=torch.int8), 7, min_part)
        return [(connection, part.nbytes) for connection, part in parts]

    here, there = joined(2, num_connections, talk)
    assert here == there
    assert isinstance(here, list)
    assert sum(num_bytes for _, num_bytes in here) == size
    assert all(0 < num_bytes <= MAX_PART_BYTES for _, num_bytes in here)
    used = {connection for connection, _ in here}
    assert len(used) == min(num_connections, -(-size // min_part))


def test_parts_with_one_tag_come_in_order() -> None:
    size = 20 * MAX_PART_BYTES + 17
    sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)

    def talk(end: int, links: Connections) -> torch.Tensor:
        received = torch.zeros_like(sent)
        transfers = Transfers()
        act, tensor = (links.receive, received) if end else (links.send, sent)
        act(tensor, 1 - end, 5, transfers)
        traffic = links.wait(transfers, Deadline(LONG))
        assert traffic.bytes_sent + traffic.bytes_received == size
        return received

    _, received = joined(2, 3, talk)
    assert isinstance(received, torch.Tensor), received
    assert torch.equal(received, sent)


# What ends them


def test_one_broken_connection_of_several_is_found() -> None:
    has_looked = threading.Event()

    def talk(end: int, links: Connections) -> list[int]:
        if end == 1:
            has_looked.wait(LONG)
            del links.groups[2]
            return []
        assert links.find_broken() == []
        has_looked.set()
        deadline = time.monotonic() + AT_ONCE
        while not (broken := links.find_broken()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return broken

    assert joined(2, 4, talk)[0] == [1]


def test_a_transfer_is_not_given_up_for_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves has sent all that it must, and what it sent last may yet be on its way."""
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.1)

    def talk(end: int, links: Connections) -> torch.Tensor:
        tensor = torch.full((10,), float(end))
        transfers = Transfers()
        if end == 1:
            del links.groups[1]
            time.sleep(1)
            links.send(tensor, 0, 2, transfers)
        else:
            links.receive(tensor, 1, 2, transfers)
        links.wait(transfers, Deadline(LONG))
        return tensor

    received, _ = joined(2, 2, talk)
    assert isinstance(received, torch.Tensor), received
    assert torch.equal(received, torch.ones(10))


def test_all_are_closed() -> None:
    num_meetings = 5
    joined(2, 1, lambda end, links: None)
    before = count_files()
    for _ in range(num_meetings):
        joined(3, 4, lambda end, links: None)
    deadline = time.monotonic() + AT_ONCE
    while count_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    # A library may open a file of its own meanwhile; whatever stays open in each meeting would be as many as those.
    assert count_files() < before + num_meetings


# The limit


@pytest.mark.parametrize("what", ["average", "broadcast"])
def test_a_limit_that_cannot_be_kept_in_time_is_refused_before_anything_is_sent(what: str) -> None:
    store = ValueStore.in_memory()
    size = 1_000_000

    def run(island: int) -> None:
        limit = RateLimit(5e4 if island == 0 else None)
        exchange = MeshExchange(Lane(store, "0", island, 2, LOCALHOST, LONG, rate_limit=limit))
        values = torch.ones(size)
        if what == "average":
            exchange.average(values, [1, 1], FP32)
        else:
            exchange.broadcast(values, source=0)

    started = time.monotonic()
    refused, other = try_islands(2, run)
    assert time.monotonic() - started < AT_ONCE
    assert type(refused) is ExchangeError
    message = str(refused)
    for part in (
        "rate_limit (50,000 bytes/s)",
        "4,000,000 bytes",
        "take 80 s",
        "exchange_timeout is 60 s",
        "payload",
    ):
        assert part in message, message
    assert isinstance(other, ExchangeError), "it is let go at once"


def test_lanes_share_a_limit() -> None:
    """What is taken for one lane is not there for the other."""
    stores = [ValueStore.in_memory() for _ in range(2)]
    rate, size = 2e6, 100_000

    def run(island: int) -> float:
        limit = RateLimit(rate)
        lanes = [MeshExchange(Lane(store, "0", island, 2, LOCALHOST, LONG, rate_limit=limit)) for store in stores]
        begin = time.monotonic()
        threads = [
            threading.Thread(target=lane.average, args=(torch.ones(size), [1, 1], FP32), daemon=True) for lane in lanes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        seconds = time.monotonic() - begin
        for lane in lanes:
            lane.close()
        return seconds

    least = RateLimit(rate).seconds(2 * 4 * size)
    assert all(seconds >= least for seconds in run_islands(2, run))
