"""Messages among islands beside the values, and values that leave before they are averaged; islands are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_diloco.codecs import CODECS
from hf_diloco.errors import ExchangeError, IslandLostError
from hf_diloco.store.values import ValueStore
from hf_diloco.transport import mesh, messages
from hf_diloco.transport.base import Exchange, Lane, RateLimit
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from tests.clocks import AT_ONCE, LONG
from tests.islands import count_open, run_islands, try_islands

FP32 = CODECS["fp32"]
Opener = Callable[[int], Exchange]


def in_memory(num_islands: int) -> Opener:
    network = MemoryNetwork(num_islands)
    return lambda island: network.lane("0", island)


def in_mesh(num_islands: int, num_connections: int = 1, rate: float | None = None) -> Callable[[int], MeshExchange]:
    store = ValueStore.in_memory()
    return lambda island: MeshExchange(
        Lane(
            store,
            "0",
            island,
            num_islands,
            "127.0.0.1",
            LONG,
            num_connections=num_connections,
            rate_limit=RateLimit(rate),
        )
    )


def swap(exchange: Exchange, message: bytes, enough: int | None = None, seconds: float = LONG) -> dict[int, bytes]:
    """Sends `message` and waits for those of `enough` others; of all, if nothing is said."""
    news = threading.Event()
    assert exchange.send_message(message, news.set)
    deadline = time.monotonic() + seconds
    wanted = exchange.num_islands - 1 if enough is None else enough
    while len(heard := exchange.messages()) < wanted and time.monotonic() < deadline:
        news.wait(deadline - time.monotonic())
        news.clear()
    return heard


# Messages


@pytest.mark.parametrize("opener", [in_memory, in_mesh, lambda number: in_mesh(number, num_connections=3)])
@pytest.mark.parametrize("num_islands", [2, 4])
def test_messages_come_between_exchanges(opener: Callable[[int], Opener], num_islands: int) -> None:
    opened = opener(num_islands)

    def run(island: int) -> None:
        exchange = opened(island)
        for turn in range(5):
            time.sleep(0.01 * island * (turn % 2))
            heard = swap(exchange, b"x" * turn + b"%d" % island)
            assert heard == {peer: b"x" * turn + b"%d" % peer for peer in range(num_islands) if peer != island}
            values = torch.full((100,), float(island))
            exchange.average(values, [1.0] * num_islands, FP32)
            assert torch.equal(values, torch.full((100,), (num_islands - 1) / 2))

    run_islands(num_islands, run)


class NotingGroup:
    """Stands between a mesh and its Gloo group, and notes what is handed over, in order."""

    def __init__(self, group: Any, spoil: Callable[[torch.Tensor], None] = lambda tensor: None) -> None:
        self._group = group
        self._spoil = spoil
        self.calls: list[tuple[str, int]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("send", tag))
        self._spoil(tensors[0])
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("recv", tag))
        return self._group.recv(tensors, peer, tag)


def test_each_message_is_expected_before_any_peer_can_send_it() -> None:
    """By the call before: Gloo sends at once, instead of asking for a buffer first, which takes a round trip."""
    opened = in_mesh(2)

    def run(island: int) -> list[tuple[str, int]]:
        exchange = opened(island)
        group = NotingGroup(exchange.links.groups[0])
        exchange.links.groups = [group]  # type: ignore[list-item]
        for _ in range(3):
            swap(exchange, b"ready")
        return group.calls

    first = messages.FIRST_TAG
    later = [("send", first), ("recv", first + 1), ("send", first + 1), ("recv", first + 2)]
    for calls in run_islands(2, run):
        assert calls == [("recv", first), *later, ("send", first + 2), ("recv", first + 3)]


def test_a_message_that_comes_damaged_is_not_heard() -> None:
    opened = in_mesh(2)

    def damage(tensor: torch.Tensor) -> None:
        tensor[20] ^= 4

    def run(island: int) -> dict[int, bytes]:
        exchange = opened(island)
        if island == 1:
            group = exchange.links.groups[0]
            exchange.links.groups = [NotingGroup(group, damage)]  # type: ignore[list-item]
            swap(exchange, b'{"a": "record"}')
            exchange.links.groups = [group]
        else:
            assert swap(exchange, b'{"a": "record"}', seconds=0.5) == {}
        return swap(exchange, b"the next")

    assert run_islands(2, run) == [{1: b"the next"}, {0: b"the next"}]


def test_a_message_that_is_too_long_is_heard_as_empty() -> None:
    opened, longest = in_mesh(2), messages.MAX_FRAME_BYTES - 12

    def run(island: int) -> list[dict[int, bytes]]:
        exchange = opened(island)
        return [swap(exchange, b"m" * (longest + more * island)) for more in (0, 1)]

    heard, _ = run_islands(2, run)
    assert heard == [{1: b"m" * longest}, {1: b""}]


def test_a_lost_island_is_told_and_the_others_are_heard() -> None:
    opened = in_mesh(3)
    has_closed = threading.Event()

    def run(island: int) -> dict[int, bytes]:
        exchange = opened(island)
        swap(exchange, b"all")
        if island == 0:
            exchange.close()
            has_closed.set()
            assert not exchange.send_message(b"", lambda: None)
            return {}
        assert has_closed.wait(LONG)
        return swap(exchange, b"two", enough=1)

    assert run_islands(3, run) == [{}, {2: b"two"}, {1: b"two"}]


@pytest.mark.parametrize("opener", [in_memory, in_mesh])
def test_who_closes_while_others_wait_wakes_them(opener: Callable[[int], Opener]) -> None:
    opened = opener(2)

    def run(island: int) -> float:
        exchange, news = opened(island), threading.Event()
        swap(exchange, b"first")
        started = time.monotonic()
        if island == 1:
            time.sleep(0.2)
            exchange.close()
        else:
            exchange.send_message(b"second", news.set)
            assert news.wait(LONG)
        return time.monotonic() - started

    assert max(run_islands(2, run)) < LONG / 2


@pytest.mark.parametrize("awaited", ["message", "values"])
def test_who_closes_while_it_waits_is_gone_for_the_others(awaited: str) -> None:
    """Its connections do not stay open until what nobody will send comes."""
    opened, has_closed = in_mesh(2), threading.Event()

    def run(island: int) -> None:
        exchange = opened(island)
        swap(exchange, b"first")
        if island == 0:
            if awaited == "message":
                assert exchange.send_message(b"second", lambda: None)
            else:
                exchange.prepare(torch.ones(100), FP32)
            exchange.close()
            has_closed.set()
            return
        assert has_closed.wait(LONG)
        for _ in range(2):  # what was prepared may have come before
            exchange.average(torch.ones(100), [1.0, 1.0], FP32)

    started = time.monotonic()
    _, outcome = try_islands(2, run)
    assert isinstance(outcome, IslandLostError)
    assert outcome.islands == (0,)
    assert time.monotonic() - started < AT_ONCE


def test_who_waits_for_a_message_and_closes_leaves_nothing_open() -> None:
    """Also sockets of which a thread waits for what never comes."""

    def meet(num_connections: int) -> None:
        opened = in_mesh(3, num_connections)

        def run(island: int) -> None:
            exchange = opened(island)
            swap(exchange, b"first")
            if island < 2:
                assert swap(exchange, b"second", seconds=0.2).keys() <= {0, 1}
                exchange.prepare(torch.ones(1000), FP32)
                exchange.expect(1000, FP32)
            exchange.close()

        run_islands(3, run)

    meet(1)
    before = count_open()
    for _ in range(5):
        meet(2)
    deadline = time.monotonic() + AT_ONCE
    most = [
        count + 4 for count in before
    ]  # what other tests have left may come and go; five meetings would leave more
    while any(now > then for now, then in zip(count_open(), most, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    files, threads = count_open()
    assert files <= most[0]
    assert threads <= most[1]


# Values that leave early


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("payload", ["fp32", "int8", "topk"])
@pytest.mark.parametrize(("unprepared", "is_expected"), [(None, False), (0, False), (None, True)])
def test_what_leaves_early_comes_to_the_same_average(
    num_islands: int, payload: str, unprepared: int | None, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more chunks than are in flight at a time; if one island leaves it out; if other values come in between."""
    monkeypatch.setattr(mesh, "CHUNK_VALUES", 1 << 12)
    size, codec = 45 * (1 << 12) + 17, CODECS[payload]

    def average(island: int, exchange: Exchange) -> list[torch.Tensor]:
        averages = []
        for turn in range(2):
            values = torch.randn(size, generator=torch.Generator().manual_seed(10 * turn + island))
            if is_expected:
                exchange.expect(size, codec)
                averages.append(between := values[:20_000] + 1)
                exchange.average(between, [1.0] * num_islands, FP32)
            if island != unprepared:
                exchange.prepare(values, codec)
            swap(exchange, b"ready")
            exchange.average(values, [1.0, 2.0, 0.5][:num_islands], codec)
            averages.append(values)
        return averages

    directly, expected = in_mesh(num_islands), in_memory(num_islands)
    found = run_islands(num_islands, lambda island: average(island, directly(island)))
    wanted = run_islands(num_islands, lambda island: average(island, expected(island)))
    for mine, reference in zip(found, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, reference, strict=True))


@pytest.mark.parametrize("rate", [None, 1e9])
def test_values_leave_before_the_average_unless_a_rate_is_set(rate: float | None) -> None:
    opened = in_mesh(2, rate=rate)

    def run(island: int) -> list[str]:
        exchange = opened(island)
        group = NotingGroup(exchange.links.groups[0])
        exchange.links.groups = [group]  # type: ignore[list-item]
        values = torch.ones(100)
        exchange.expect(100, FP32)
        assert [kind for kind, _ in group.calls] == both
        exchange.prepare(values, FP32)
        kinds = [kind for kind, _ in group.calls]
        exchange.average(values, [1.0, 1.0], FP32)
        return kinds

    both = ["recv", "recv"]  # the values and their checksum
    assert run_islands(2, run) == [both if rate else [*both, "send", "send"]] * 2


@pytest.mark.parametrize(("size", "num_posted"), [(100, 8), (8 << 12, 32)])
def test_results_are_awaited_early_only_where_round_trips_count(
    size: int, num_posted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two peers, a chunk's piece and result, each with its checksum; of eight chunks, only the pieces."""
    monkeypatch.setattr(mesh, "CHUNK_VALUES", 1 << 12)
    opened = in_mesh(3)

    def run(island: int) -> tuple[int, torch.Tensor]:
        exchange = opened(island)
        group = NotingGroup(exchange.links.groups[0])
        exchange.links.groups = [group]  # type: ignore[list-item]
        exchange.expect(size, FP32)
        num_calls = len(group.calls)
        values = torch.full((size,), float(island))
        exchange.average(values, [1.0] * 3, FP32)
        return num_calls, values

    for num_calls, values in run_islands(3, run):
        assert num_calls == num_posted
        assert torch.equal(values, torch.ones(size))


@pytest.mark.parametrize("expected", ["never", "before", "after"])
def test_a_broken_connection_is_told_by_the_average_and_not_before(expected: str) -> None:
    """Whether the values were expected before it broke, after, or not at all."""
    opened = in_mesh(2)
    may_close, has_closed = threading.Event(), threading.Event()

    def run(island: int) -> None:
        exchange = opened(island)
        if island == 1:
            assert may_close.wait(LONG)
            exchange.close()
            has_closed.set()
            return
        if expected == "before":
            exchange.expect(100, FP32)
        may_close.set()
        assert has_closed.wait(LONG)
        deadline = time.monotonic() + LONG
        while not exchange.find_broken() and time.monotonic() < deadline:
            time.sleep(0.01)
        values = torch.ones(100)
        if expected == "after":
            exchange.expect(100, FP32)
        exchange.prepare(values, FP32)
        with pytest.raises(IslandLostError) as caught:
            exchange.average(values, [1.0, 1.0], FP32)
        assert caught.value.islands == (1,)
        with pytest.raises(ExchangeError):
            exchange.average(values, [1.0, 1.0], FP32)

    assert try_islands(2, run) == [None, None]
