"""Averages and copies between islands as threads: in memory, and over real sockets on the loopback device."""

from __future__ import annotations

import gc
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import DamagedTransferError, ExchangeError, IslandLostError
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.store.values import LINKS, ValueStore
from hf_diloco.transport import base, memory, mesh, transfers
from hf_diloco.transport.base import Exchange, Lane, Traffic, weighted_mean
from hf_diloco.transport.connections import PROBE_TAG
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.transfers import LossNotes
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import AT_ONCE, LONG
from tests.islands import count_open, run_islands, try_islands
from tests.tcp_stores import KeptStore

FP32 = CODECS["fp32"]
CHUNK = 12  # divisible by 2, 3 and 4
BLOCK = 4096  # every codec has whole blocks in it
Opener = Callable[[int], Exchange]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "CHUNK_VALUES", CHUNK)
    for module in (base, mesh, memory):
        monkeypatch.setattr(module, "BLOCK_VALUES", 5)


@pytest.fixture
def chunks_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For codecs of blocks: chunks of three of the largest."""
    monkeypatch.setattr(mesh, "CHUNK_VALUES", 3 * BLOCK)
    for module in (base, mesh, memory):
        monkeypatch.setattr(module, "BLOCK_VALUES", BLOCK)


def in_memory(num_islands: int, timeout: float = LONG) -> Opener:
    network = MemoryNetwork(num_islands, timeout)
    return lambda island: network.lane("0", island)


def in_mesh(num_islands: int) -> Opener:
    store = ValueStore.in_memory()
    return lambda island: MeshExchange(Lane(store, "0", island, num_islands, "127.0.0.1", LONG))


def make_values(seed: int, island: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + island))


def average_all(
    opener: Opener, num_islands: int, sizes: Sequence[int], weights: Sequence[float], payload: str
) -> list[list[tuple[torch.Tensor, Traffic]]]:
    """For each island, the averages of vectors of several sizes, one exchange after another, and their traffic."""

    def run(island: int) -> list[tuple[torch.Tensor, Traffic]]:
        exchange = opener(island)
        results = []
        for seed, size in enumerate(sizes):
            values = make_values(seed, island, size)
            traffic = exchange.average(values, weights, CODECS[payload])
            results.append((values, traffic))
        exchange.close()
        return results

    return run_islands(num_islands, run)


# The mean


def mean_of(parts: list[list[float]], weights: list[float], keep: int = 0) -> list[float]:
    return weighted_mean([torch.tensor(part) for part in parts], weights, keep).tolist()


def test_equal_weights_of_two_give_exact_halves() -> None:
    third = 1 / 3
    a, b = torch.tensor([third, 1.0, 3e38]), torch.tensor([third, 2.0, 0.0])
    mean = weighted_mean([a.clone(), b.clone()], [0.3, 0.3], keep=0)
    assert torch.equal(mean, (a + b) / 2)
    assert mean[0] == a[0], "equal values stay as they are, bit for bit"


def test_weights_are_shares() -> None:
    assert mean_of([[8.0, 0.0], [0.0, 4.0]], [3, 1]) == [6.0, 1.0]
    assert mean_of([[1.0], [2.0], [4.0]], [1, 1, 2]) == [2.75]


def test_it_sums_in_the_order_of_the_islands() -> None:
    """In fp32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1."""
    assert mean_of([[1e8], [1.0], [-1e8]], [1, 1, 1]) == [0.0]
    assert mean_of([[1e8], [-1e8], [1.0]], [1, 1, 1]) == pytest.approx([1 / 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weights", [[0, 1, 1], [0, 3, 1], [0, 0, 1]])
def test_what_an_island_of_weight_0_holds_is_not_looked_at(bad: float, weights: list[float]) -> None:
    expected = (weights[1] * 2.0 + weights[2] * 6.0) / sum(weights)
    assert mean_of([[bad], [2.0], [6.0]], weights) == [expected]


def test_an_island_alone_in_having_weight_gives_the_mean() -> None:
    part = make_values(0, 0, 9)
    mean = weighted_mean([torch.full((9,), math.nan), part.clone()], [0, 0.3], keep=0)
    assert torch.equal(mean, part)


@given(
    size=st.integers(0, 40),
    weights=st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, 1e6]), min_size=1, max_size=5).filter(sum),
    keep=st.integers(0, 4),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=200)
def test_mean_is_right_and_leaves_one_part_alone(size: int, weights: list[float], keep: int, seed: int) -> None:
    keep %= len(weights)
    parts = [make_values(seed, island, size) for island in range(len(weights))]
    given_parts = [part.clone() for part in parts]
    mean = weighted_mean(given_parts, weights, keep)
    exact = sum(weight * part.double() for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=2e-6)
    if mean is not given_parts[keep]:
        assert torch.equal(given_parts[keep], parts[keep])
    if [weight > 0 for weight in weights].count(True) > 1:
        assert mean is not given_parts[keep]


@given(cut=st.integers(0, 50), seed=st.integers(0, 1 << 20), weights=st.sampled_from([[1, 1, 1], [3, 1, 7]]))
def test_where_a_block_begins_does_not_change_a_bit(cut: int, seed: int, weights: list[float]) -> None:
    parts = [make_values(seed, island, 50) for island in range(3)]
    whole = weighted_mean([part.clone() for part in parts], weights, keep=1)
    cuts = [
        weighted_mean([part.clone()[where] for part in parts], weights, keep=2)
        for where in (slice(0, cut), slice(cut, 50))
    ]
    assert torch.equal(torch.cat(cuts), whole)


# In memory


@pytest.mark.parametrize("num_islands", [1, 2, 3, 5])
@pytest.mark.parametrize("payload", ["fp32", "bf16", "fp16"])
def test_islands_in_memory_get_the_mean_all_of_them(num_islands: int, payload: str) -> None:
    weights = [1.0 + island for island in range(num_islands)]
    results = average_all(in_memory(num_islands), num_islands, [0, 1, 7, 100], weights, payload)
    for seed, size in enumerate([0, 1, 7, 100]):
        parts = torch.stack([make_values(seed, island, size) for island in range(num_islands)]).double()
        exact = (parts * torch.tensor(weights)[:, None]).sum(0) / sum(weights)
        tolerance = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[payload] if num_islands > 1 else 0
        torch.testing.assert_close(results[0][seed][0].double(), exact, rtol=0, atol=tolerance * 5)
        for island in range(1, num_islands):
            assert torch.equal(results[island][seed][0], results[0][seed][0])


def test_an_island_that_never_comes_is_named_in_memory() -> None:
    opener = in_memory(3, timeout=2.0)

    def run(island: int) -> None:
        if island != 1:
            opener(island).average(torch.ones(4), [1, 1, 1], FP32)

    outcomes = try_islands(3, run)
    for island in (0, 2):
        outcome = outcomes[island]
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (1,)


def test_an_island_that_leaves_wakes_the_others_in_memory() -> None:
    opener = in_memory(3)

    def run(island: int) -> None:
        exchange = opener(island)
        exchange.average(torch.ones(4), [1, 1, 1], FP32)
        if island == 2:
            exchange.close()
        else:
            exchange.average(torch.ones(4), [1, 1, 1], FP32)

    started = time.monotonic()
    outcomes = try_islands(3, run)
    assert time.monotonic() - started < AT_ONCE
    assert [getattr(outcome, "islands", None) for outcome in outcomes] == [(2,), (2,), None]


def test_who_finishes_first_may_leave_at_once_in_memory() -> None:
    expected = sum(make_values(0, island, 4) for island in range(3)) / 3
    for _ in range(100):
        for ((average, _),) in average_all(in_memory(3), 3, [4], [1, 1, 1], "fp32"):
            torch.testing.assert_close(average, expected)


# Over sockets


SIZES = [0, 1, 2, 3, 7, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK - 1, 20 * CHUNK, 20 * CHUNK + 1]


@pytest.mark.parametrize("num_islands", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 3)), 4])
@pytest.mark.parametrize("payload", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("weigh", ["equal", "unequal", "one of 0"])
def test_a_mesh_computes_what_memory_computes_bit_for_bit(
    small_chunks: None, num_islands: int, payload: str, weigh: str
) -> None:
    weights = [1.0] * num_islands
    if weigh == "unequal":
        weights = [3.0, 1.0, 0.25, 1e5][:num_islands]
    if weigh == "one of 0" and num_islands > 1:
        weights[num_islands // 2] = 0.0
    over_sockets = average_all(in_mesh(num_islands), num_islands, SIZES, weights, payload)
    in_threads = average_all(in_memory(num_islands), num_islands, SIZES, weights, payload)
    for island in range(num_islands):
        for number, size in enumerate(SIZES):
            result, traffic = over_sockets[island][number]
            assert torch.equal(result, in_threads[0][number][0]), (island, size)
            assert traffic == expected_traffic(num_islands, island, size, CODECS[payload], CHUNK)


def expected_traffic(num_islands: int, island: int, size: int, codec: Codec, chunk_values: int) -> Traffic:
    """Two islands swap all values. More: every chunk in pieces, each to its owner, whose mean goes to all others.

    A piece is so many blocks; with codecs that need feedback, each island sends all to all others.
    """
    blocks = 0
    for start in range(0, size, chunk_values):
        chunk = -(-min(chunk_values, size - start) // codec.block_values)
        own = chunk * (island + 1) // num_islands - chunk * island // num_islands
        if num_islands == 2 or codec.needs_feedback:
            own = chunk
        blocks += (chunk - own) + (num_islands - 1) * own
    num_bytes = blocks * codec.block_bytes if num_islands > 1 else 0
    return Traffic(num_bytes, num_bytes)


# The same for codecs of blocks


CODED = ["int8", "int4", "fp4", "topk", "sign"]
CODED_SIZES = [0, 1, 257, BLOCK - 1, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 28 * BLOCK + 1003]


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    code = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, code)
    decoded = torch.empty_like(values)
    codec.decode(code, decoded)
    return decoded


def expected_mean(parts: Sequence[torch.Tensor], weights: Sequence[float], codec: Codec) -> torch.Tensor:
    """The mean of what was decoded, encoded again where more than two islands have a piece each."""
    if len(parts) == 1:
        return parts[0]
    mean = weighted_mean([round_trip(codec, part) for part in parts], weights, keep=0)
    return mean if len(parts) == 2 or codec.needs_feedback else round_trip(codec, mean)


@pytest.mark.parametrize("payload", CODED)
@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [3, 1], [1, 0], [1, 1, 1], [3, 1, 0.25], [1, 0, 1], [3, 1, 0.25, 1e5]], ids=str
)
def test_a_mesh_and_memory_compute_the_mean_of_the_codes_bit_for_bit(
    chunks_of_blocks: None, weights: list[float], payload: str
) -> None:
    codec, num_islands = CODECS[payload], len(weights)
    over_sockets = average_all(in_mesh(num_islands), num_islands, CODED_SIZES, weights, payload)
    in_threads = average_all(in_memory(num_islands), num_islands, CODED_SIZES, weights, payload)
    for number, size in enumerate(CODED_SIZES):
        parts = [make_values(number, island, size) for island in range(num_islands)]
        expected = expected_mean(parts, weights, codec)
        for island in range(num_islands):
            result, traffic = over_sockets[island][number]
            assert torch.equal(result, expected), (island, size)
            assert torch.equal(in_threads[island][number][0], expected), (island, size)
            assert traffic == expected_traffic(num_islands, island, size, codec, 3 * BLOCK), (island, size)


@pytest.mark.parametrize(("payload", "times"), [("fp32", 1), ("bf16", 2), ("int8", 3), ("int4", 4), ("topk", 4)])
@pytest.mark.parametrize("num_islands", [2, 3])
def test_chunks_of_small_codes_hold_more_values_and_change_no_bit(
    chunks_of_blocks: None, payload: str, times: int, num_islands: int
) -> None:
    size, codec, weights = 100 * BLOCK + 77, CODECS[payload], [1.0] * num_islands
    assert mesh.chunk_values(size, codec) == 3 * BLOCK * times
    assert mesh.chunk_values(24 * BLOCK, codec) == 3 * BLOCK  # never fewer chunks than are to be in flight
    expected = expected_mean([make_values(0, island, size) for island in range(num_islands)], weights, codec)
    for ((result, _),) in average_all(in_mesh(num_islands), num_islands, [size], weights, payload):
        assert torch.equal(result, expected)


def test_codes_that_cannot_be_coded_again_go_to_all(chunks_of_blocks: None) -> None:
    size, topk, int8 = 6 * BLOCK, CODECS["topk"], CODECS["int8"]
    for opener in (in_memory(3), in_mesh(3)):
        ((_, traffic),) = average_all(opener, 3, [size], [1] * 3, "topk")[1]
        assert traffic == Traffic(2 * topk.num_bytes(size), 2 * topk.num_bytes(size))
    ((_, traffic),) = average_all(in_mesh(3), 3, [size], [1] * 3, "int8")[1]
    assert traffic == Traffic(4 * int8.num_bytes(size) // 3, 4 * int8.num_bytes(size) // 3)


@pytest.mark.parametrize("opener", [in_memory, in_mesh])
@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("payload", ["fp16", *CODED])
def test_codes_of_an_island_of_weight_0_do_no_harm(
    chunks_of_blocks: None, opener: Callable[[int], Opener], num_islands: int, payload: str
) -> None:
    size, codec = 4 * BLOCK + 77, CODECS[payload]
    weights = [1.0, 0.0, 2.0][:num_islands]
    opened = opener(num_islands)
    parts = [make_values(0, island, size) for island in range(num_islands)]
    expected = expected_mean(parts, weights, codec)
    parts[1][::1000] = math.nan
    parts[1][BLOCK + 1 :: 1000] = math.inf

    def run(island: int) -> torch.Tensor:
        values = parts[island].clone()
        opened(island).average(values, weights, codec)
        return values

    for values in run_islands(num_islands, run):
        assert torch.equal(values, expected)


@pytest.mark.parametrize("opener", [in_memory, in_mesh])
@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("payload", ["int8", "topk"])
def test_an_observer_sees_own_values_before_they_were_coded(
    chunks_of_blocks: None, opener: Callable[[int], Opener], num_islands: int, payload: str
) -> None:
    opened, size = opener(num_islands), 7 * BLOCK + 5

    def run(island: int) -> None:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        values = make_values(0, island, size)
        opened(island).average(
            values, [1.0] * num_islands, CODECS[payload], lambda own, mean: seen.append((own.clone(), mean.clone()))
        )
        assert torch.equal(torch.cat([own for own, _ in seen]), make_values(0, island, size))
        assert torch.equal(torch.cat([mean for _, mean in seen]), values)

    run_islands(num_islands, run)


@pytest.mark.parametrize("num_islands", [3, 4])
def test_a_mesh_of_n_sends_twice_n_minus_1_of_n(small_chunks: None, num_islands: int) -> None:
    size = 10 * CHUNK
    results = average_all(in_mesh(num_islands), num_islands, [size], [1] * num_islands, "bf16")
    share = 2 * (num_islands - 1) * 2 * size // num_islands
    assert all(traffic == Traffic(share, share) for ((_, traffic),) in results)


class CountingGroup:
    """Stands between a mesh and its Gloo group, and counts the values that are really handed over."""

    def __init__(self, group: object) -> None:
        self.group = group
        self.sent = self.received = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> object:
        self.sent += sum(tensor.nbytes for tensor in tensors if tensor.dtype != torch.int64)  # no checksums
        return self.group.send(tensors, peer, tag)  # type: ignore[attr-defined]

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> object:
        if tag != PROBE_TAG:  # of an island that is late
            self.received += sum(tensor.nbytes for tensor in tensors if tensor.dtype != torch.int64)
        return self.group.recv(tensors, peer, tag)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("payload", ["fp32", "fp16"])
def test_traffic_is_what_the_sockets_get(small_chunks: None, num_islands: int, payload: str) -> None:
    opener = in_mesh(num_islands)

    def run(island: int) -> tuple[Traffic, Traffic]:
        exchange = opener(island)
        assert isinstance(exchange, MeshExchange)
        links = exchange.links
        group = CountingGroup(links.groups[0])
        links.groups = [group]  # type: ignore[list-item]
        traffic = exchange.average(make_values(0, island, 100), [1] * num_islands, CODECS[payload])
        traffic += exchange.broadcast(make_values(0, island, 30), source=1)
        return traffic, Traffic(group.sent, group.received)

    for told, counted in run_islands(num_islands, run):
        assert told == counted


@pytest.mark.parametrize("payload", sorted(CODECS))
def test_zeros_in_place_of_what_came_damaged_can_be_decoded(payload: str) -> None:
    codec = CODECS[payload]
    values = torch.full((2 * codec.block_values,), torch.nan)
    codec.decode(torch.zeros(codec.num_bytes(values.numel()), dtype=torch.uint8), values)
    assert torch.isfinite(values).all()


class DamagingGroup(CountingGroup):
    """What comes out of one of the first receives is not what went in."""

    def __init__(self, group: object, number: int) -> None:
        super().__init__(group)
        self._left = number

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> object:
        work = super().recv(tensors, peer, tag)
        self._left -= 1
        return _DamagedWork(work, tensors[0]) if self._left == 0 else work


class _DamagedWork:
    def __init__(self, work: object, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout: object) -> None:
        self._work.wait(timeout)  # type: ignore[attr-defined]
        self._tensor.view(torch.uint8)[1] ^= 4


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("payload", ["fp32", "fp16"])
@pytest.mark.parametrize("number", [1, 2])
def test_damage_on_the_way_is_seen_by_who_receives_it_and_can_be_sent_again(
    small_chunks: None, num_islands: int, payload: str, number: int
) -> None:
    """A value or a checksum. The exchange comes to its end, so that the next one finds its connections in order."""
    opener = in_mesh(num_islands)

    def run(island: int) -> torch.Tensor:
        exchange = opener(island)
        assert isinstance(exchange, MeshExchange)
        links = exchange.links
        if island == 1:
            links.groups = [DamagingGroup(links.groups[0], number)]  # type: ignore[list-item]
            with pytest.raises(DamagedTransferError, match=r"island [02] sent arrived damaged"):
                exchange.average(make_values(0, island, 100), [1] * num_islands, CODECS[payload])
        else:
            exchange.average(make_values(0, island, 100), [1] * num_islands, CODECS[payload])
        values = make_values(1, island, 100)
        exchange.average(values, [1] * num_islands, CODECS[payload])
        return values

    results = run_islands(num_islands, run)
    expected = average_all(in_memory(num_islands), num_islands, [100, 100], [1] * num_islands, payload)
    again = expected[0][1][0]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(results[0], again)


@pytest.mark.parametrize("opener", [in_memory, in_mesh])
@pytest.mark.parametrize("num_islands", [2, 3])
def test_a_broadcast_is_exact_and_counted(
    small_chunks: None, opener: Callable[[int], Opener], num_islands: int
) -> None:
    size, source = 3 * CHUNK + 1, 1
    opened = opener(num_islands)

    def run(island: int) -> tuple[torch.Tensor, Traffic]:
        values = make_values(0, island, size)
        exchange = opened(island)
        traffic = exchange.broadcast(values, source)
        exchange.average(torch.ones(3), [1] * num_islands, FP32)  # and the lane goes on to work
        return values, traffic

    for island, (values, traffic) in enumerate(run_islands(num_islands, run)):
        assert torch.equal(values, make_values(0, source, size))
        sent, received = ((num_islands - 1) * 4 * size, 0) if island == source else (0, 4 * size)
        assert traffic == Traffic(sent, received)


@pytest.mark.parametrize("opener", [in_memory, in_mesh])
@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("payload", ["fp32", "fp16"])
def test_an_observer_sees_own_values_and_the_average_in_order(
    small_chunks: None, opener: Callable[[int], Opener], num_islands: int, payload: str
) -> None:
    opened = opener(num_islands)

    def run(island: int) -> None:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        values = make_values(0, island, 5 * CHUNK + 2)
        opened(island).average(
            values, [2.0] * num_islands, CODECS[payload], lambda own, mean: seen.append((own.clone(), mean.clone()))
        )
        assert torch.equal(torch.cat([own for own, _ in seen]), make_values(0, island, 5 * CHUNK + 2))
        assert torch.equal(torch.cat([mean for _, mean in seen]), values)

    run_islands(num_islands, run)


@pytest.mark.parametrize("num_islands", [2, 3, 4])
def test_an_island_that_leaves_a_mesh_wakes_the_others(small_chunks: None, num_islands: int) -> None:
    opener = in_mesh(num_islands)

    def run(island: int) -> None:
        exchange = opener(island)
        exchange.average(torch.ones(100), [1] * num_islands, FP32)
        if island == num_islands - 1:
            exchange.close()
            return
        try:
            exchange.average(torch.ones(100), [1] * num_islands, FP32)
        except IslandLostError:
            with pytest.raises(ExchangeError, match=r"closed.*start the run again"):
                exchange.average(torch.ones(100), [1] * num_islands, FP32)
            raise

    started = time.monotonic()
    *outcomes, _ = try_islands(num_islands, run)
    assert time.monotonic() - started < AT_ONCE
    for outcome in outcomes:
        assert isinstance(outcome, IslandLostError)
        assert outcome.islands == (num_islands - 1,)
        assert f"island {num_islands - 1} was lost" in str(outcome)
        assert "start all islands again" in str(outcome)
        assert "GLHF" not in str(outcome)


def test_an_exchange_as_a_whole_has_a_deadline(small_chunks: None) -> None:
    """A peer that trickles: every piece comes, none of them late, and the whole takes far too long."""
    store, given_up = ValueStore.in_memory(), threading.Event()

    def run(island: int) -> float:
        exchange = MeshExchange(Lane(store, "0", island, 2, "127.0.0.1", LONG))
        exchange._timeout = 1.0  # a busy machine may take longer to connect
        started = time.monotonic()
        if island == 1:
            with suppress(IslandLostError):  # island 0 gave up
                while not given_up.wait(0.3):
                    exchange.average(torch.ones(CHUNK), [1, 1], FP32)
            return 0.0
        with pytest.raises(IslandLostError) as caught:
            exchange.average(torch.ones(20 * CHUNK), [1, 1], FP32)
        given_up.set()
        assert caught.value.islands == (1,)
        return time.monotonic() - started

    took, _ = run_islands(2, run)
    assert 0.9 < took < AT_ONCE


def test_who_gives_up_lets_go_of_all_and_says_for_whose_sake(small_chunks: None) -> None:
    """Island 1 hangs; island 0 gives up on it; island 2, whom nothing ails, learns both as soon as it comes."""
    store = ValueStore.in_memory()
    gave_up, done = threading.Event(), threading.Event()
    held: list[IslandLostError] = []  # as a session holds it while a checkpoint is written

    def run(island: int) -> float:
        exchange = MeshExchange(Lane(store, "0", island, 3, "127.0.0.1", LONG))
        if island == 0:
            exchange._timeout = 1.0
        if island == 1:
            assert done.wait(30)
            return 0
        if island == 2:
            assert gave_up.wait(30)
        started = time.monotonic()
        try:
            exchange.average(torch.ones(20 * CHUNK), [1, 1, 1], FP32)
        except IslandLostError as error:
            held.append(error)
        (gave_up if island == 0 else done).set()
        return time.monotonic() - started

    _, _, seconds = run_islands(3, run)
    assert [error.islands for error in held] == [(1,), (1,)]
    assert "as island 0 found" in str(held[1])
    assert seconds < AT_ONCE


def test_notes_lead_to_the_island_with_which_it_began() -> None:
    store = ValueStore.in_memory()
    notes = [LossNotes(store, "0", island) for island in range(5)]
    assert notes[3].find_first(4, timed_out=False) == 4, "no note: the peer is gone itself"
    assert notes[2].find_first(3, timed_out=False) == 4, "3 left because of 4"
    assert notes[1].find_first(2, timed_out=False) == 4, "2 left because of 3"
    assert LossNotes(store, "1", 1).find_first(2, timed_out=False) == 2, "another lane, another story"


def test_islands_that_blame_each_other_stay_with_it() -> None:
    store = ValueStore.in_memory()
    first, second = LossNotes(store, "0", 0), LossNotes(store, "0", 1)
    assert first.find_first(1, timed_out=False) == 1
    assert second.find_first(0, timed_out=False) == 0


def test_who_timed_out_waits_for_a_note() -> None:
    store = ValueStore.in_memory()

    def run(island: int) -> int:
        if island == 1:
            time.sleep(0.3)
        return LossNotes(store, "0", island).find_first(1 if island == 0 else 2, timed_out=island == 0)

    assert run_islands(2, run) == [2, 2]


def test_without_the_store_its_keeper_is_lost() -> None:
    keeper = KeptStore()
    notes = LossNotes(keeper.client(), "0", 2)
    assert notes.find_first(1, timed_out=False) == 1
    del keeper
    gc.collect()
    assert notes.find_first(1, timed_out=False) == 0


def test_a_log_that_is_out_of_reach_makes_no_island_its_keeper(tmp_path: Path) -> None:
    """Nobody keeps what lies in a folder: the island that is missing here is blamed."""
    folder = tmp_path / "run"
    log = RunLog(ObjectStore(f"file://{folder}"), Seal(b"", "run-1"))
    store = ValueStore(log, LINKS)
    notes = [LossNotes(store, "0", island, keeper=None) for island in range(3)]
    assert notes[1].find_first(2, timed_out=False) == 2
    assert notes[0].find_first(1, timed_out=False) == 2, "1 left because of 2"
    shutil.rmtree(folder)
    folder.touch()
    assert notes[0].find_first(1, timed_out=False) == 1


@pytest.mark.parametrize(("keeper", "timed_out", "expected"), [(0, True, 0), (0, False, 1), (None, True, 1)])
def test_a_slow_store_does_not_stand_for_the_island_that_is_lost(
    keeper: int | None, timed_out: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is silent its keeper may stand still. A connection that broke, broke at the peer."""
    answers = threading.Event()
    store = ValueStore.in_memory()
    monkeypatch.setattr(ValueStore, "set", lambda *_: answers.wait(LONG))
    monkeypatch.setattr(transfers, "NOTE_SECONDS", 0.1)
    assert LossNotes(store, "0", 2, keeper=keeper).find_first(1, timed_out=timed_out) == expected
    answers.set()


def test_a_mesh_whose_islands_do_not_all_come_says_so() -> None:
    with pytest.raises(IslandLostError, match=r"could not connect.*within 0.5 s.*127\.0\.0\.1.*bind_address"):
        MeshExchange(Lane(ValueStore.in_memory(), "0", 0, 2, "127.0.0.1", 0.5))


def assert_nothing_left_open(before: tuple[int, int]) -> None:
    """No more files and threads than before, once those that are ending have ended; what earlier tests left may go."""
    deadline = time.monotonic() + AT_ONCE
    while (left := count_open()) and any(now > then for now, then in zip(left, before, strict=True)):
        assert time.monotonic() < deadline, f"files and threads: {left}, before: {before}"
        time.sleep(0.05)


def test_a_failure_that_somebody_holds_holds_no_connection(small_chunks: None) -> None:
    average_all(in_mesh(3), 3, [10], [1, 1, 1], "fp32")
    before = count_open()
    opener = in_mesh(3)

    def run(island: int) -> None:
        exchange = opener(island)
        exchange.average(torch.ones(CHUNK), [1, 1, 1], FP32)
        if island == 2:
            exchange.close()
        else:
            exchange.average(torch.ones(20 * CHUNK), [1, 1, 1], FP32)

    outcomes = try_islands(3, run)
    assert isinstance(outcomes[0], IslandLostError)
    assert isinstance(outcomes[1], IslandLostError)
    assert_nothing_left_open(before)


def test_fifty_meshes_leave_nothing_open() -> None:
    average_all(in_mesh(3), 3, [10], [1, 1, 1], "fp32")
    before = count_open()
    for _ in range(50):
        average_all(in_mesh(3), 3, [10], [1, 1, 1], "fp32")
    assert_nothing_left_open(before)


def test_who_waits_for_one_that_hangs_in_an_exchange_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store, has_said = ValueStore.in_memory(), threading.Event()
    notes = WaitNotes(0, first=0.1)

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "exchange: waiting" in record.getMessage():  # and not what another test has left behind
                has_said.set()

    def run(island: int) -> torch.Tensor:
        watch = None if island else lambda: notes.watch(30, "exchange", [1])
        exchange = MeshExchange(Lane(store, "0", island, 2, "127.0.0.1", 30), watch=watch)
        values = torch.full((1000,), float(island))
        if island == 1:
            assert has_said.wait(30), "nothing is said while it hangs"
        exchange.average(values, [1.0, 1.0], CODECS["fp32"])
        exchange.close()
        return values

    logger, handler = logging.getLogger("hf_diloco"), Said()
    logger.addHandler(handler)
    try:
        found = run_islands(2, run)
    finally:
        logger.removeHandler(handler)
    assert all(torch.equal(values, torch.full((1000,), 0.5)) for values in found)
    assert any(re.fullmatch(r"island 0: exchange: waiting for island 1 \(\d+ s of 30 s\)", m) for m in caplog.messages)
