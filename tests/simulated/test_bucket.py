"""Averages through an object store: the mesh's bits, in any cut, and nothing taken on trust."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import PayloadError, StoreError
from hf_diloco.membership.round_records import OfferRecord
from hf_diloco.sealing.stored import BlockSeal
from hf_diloco.store.backends import PART_BYTES
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.transport import bucket
from hf_diloco.transport.base import RateLimit, Traffic, weighted_mean
from hf_diloco.transport.bucket import BucketExchange
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.objects import BlockReader, ObjectInfo, find_cover, iter_blocks, read_info
from tests.clocks import StillClock
from tests.islands import run_islands

FP32, BF16 = CODECS["fp32"], CODECS["bf16"]
CASTS = ["fp32", "bf16", "fp16"]
CODED = ["int8", "int4", "fp4", "topk", "sign"]
BLOCK = 8
CODEC_BLOCK = 4096  # every codec has whole blocks in it
NUM_LANES = 64
SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 20 * BLOCK, 20 * BLOCK + 1]
WEIGHTS = [3.0, 1.0, 0.25, 1e5]
_names = count()


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "OBJECT_BLOCK_VALUES", BLOCK)
        patch.setattr(bucket, "BLOCK_VALUES", 5)
        yield


@pytest.fixture
def full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "OBJECT_BLOCK_VALUES", 1 << 20)
    monkeypatch.setattr(bucket, "BLOCK_VALUES", 1 << 18)


@pytest.fixture
def codec_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For codecs of blocks: objects' blocks of two of the largest."""
    monkeypatch.setattr(bucket, "OBJECT_BLOCK_VALUES", 2 * CODEC_BLOCK)
    monkeypatch.setattr(bucket, "BLOCK_VALUES", CODEC_BLOCK)


@pytest.fixture
def store() -> ObjectStore:
    return new_store()


def new_store() -> ObjectStore:
    return ObjectStore(f"memory://bucket-test-{next(_names)}")


def make_values(seed: int, island: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + island))


def lane_bounds(size: int, num_ranks: int, num_lanes: int = NUM_LANES, block_values: int = 1) -> list[int]:
    """Where the ranks' ranges begin and end, cut as `LanePartition` does."""
    lanes = [
        next(lane for lane in range(num_lanes + 1) if lane * num_ranks // num_lanes >= rank)
        for rank in range(num_ranks)
    ]
    num_blocks = -(-size // block_values)
    return [num_blocks * lane // num_lanes * block_values for lane in lanes] + [size]


def publish(
    store: ObjectStore, name: str, values: torch.Tensor, bounds: Sequence[int], codec: Codec
) -> list[ObjectInfo]:
    """Writes an island's values, one object a rank; what is announced goes through JSON."""
    infos = []
    for rank, (low, high) in enumerate(pairwise(bounds)):
        info, traffic = BucketExchange(store, low, high - low).publish(
            values[low:high], f"{name}/rank-{rank}.bin", codec
        )
        assert traffic == Traffic(bytes_sent=codec.num_bytes(high - low))
        infos.append(read_info(json.loads(json.dumps(info.model_dump()))))
    return infos


def average(
    store: ObjectStore,
    parts: Sequence[Sequence[ObjectInfo]],
    weights: Sequence[float],
    codec: Codec,
    bounds: Sequence[int],
) -> torch.Tensor:
    """What an island of one rank a range gets."""
    out = torch.full((bounds[-1],), torch.nan)
    for low, high in pairwise(bounds):
        BucketExchange(store, low, high - low).average(parts, weights, codec, out[low:high])
    return out


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    decoded = torch.empty_like(values)
    codec.round_trip(values, decoded)
    return decoded


def average_in_memory(values: Sequence[torch.Tensor], weights: Sequence[float], codec: Codec) -> torch.Tensor:
    network = MemoryNetwork(len(values))

    def run(island: int) -> torch.Tensor:
        mine = values[island].clone()
        network.lane("0", island).average(mine, weights, codec)
        return mine

    return run_islands(len(values), run)[0]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


class WatchedStore:
    """Stands before a store and counts what is asked of it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.reads: list[tuple[str, int]] = []
        self.num_at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def put(self, path: str, data: bytes | memoryview) -> None:
        self.store.put(path, data)

    def get_range(self, path: str, start: int, end: int) -> memoryview:
        with self._lock:
            self.reads.append((path, end - start))
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            return self.store.get_range(path, start, end)
        finally:
            with self._lock:
                self.num_at_once -= 1


# The bits


@pytest.mark.parametrize(("num_islands", "payload"), [(2, "fp32"), (2, "bf16"), (2, "fp16"), (3, "fp32"), (4, "fp32")])
@pytest.mark.parametrize("weigh", ["equal", "unequal"])
def test_a_bucket_computes_what_memory_computes_bit_for_bit(
    store: ObjectStore, num_islands: int, payload: str, weigh: str
) -> None:
    codec = CODECS[payload]
    weights = [2.0] * num_islands if weigh == "equal" else WEIGHTS[:num_islands]
    for seed, size in enumerate(SIZES):
        values = [make_values(seed, island, size) for island in range(num_islands)]
        parts = [publish(store, f"{seed}/{i}", value, [0, size], codec) for i, value in enumerate(values)]
        result = average(store, parts, weights, codec, [0, size])
        assert same_bits(result, average_in_memory(values, weights, codec)), size


@pytest.mark.parametrize("payload", ["bf16", "fp16"])
def test_the_mean_of_more_than_two_is_not_encoded_again(store: ObjectStore, payload: str) -> None:
    codec, size = CODECS[payload], 50
    values = [make_values(0, island, size) for island in range(3)]
    parts = [publish(store, str(i), value, [0, size], codec) for i, value in enumerate(values)]
    expected = weighted_mean([round_trip(codec, value) for value in values], [1, 1, 1], keep=0)
    result = average(store, parts, [1, 1, 1], codec, [0, size])
    assert same_bits(result, expected)
    assert not same_bits(result, average_in_memory(values, [1, 1, 1], codec))


@pytest.mark.parametrize("payload", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [0, 3, 64, 1001])
def test_any_number_of_ranks_writes_and_reads_the_same_bits(store: ObjectStore, payload: str, size: int) -> None:
    codec, weights = CODECS[payload], [1.0, 2.0, 5.0]
    values = [make_values(0, island, size) for island in range(3)]
    parts = [
        publish(store, str(island), values[island], lane_bounds(size, num_ranks), codec)
        for island, num_ranks in enumerate([3, 1, 64])
    ]
    whole = average(store, parts, weights, codec, [0, size])
    for num_ranks in [1, 2, 5, 64]:
        assert same_bits(average(store, parts, weights, codec, lane_bounds(size, num_ranks)), whole)
    assert same_bits(average(store, parts, weights, codec, lane_bounds(size, 5, num_lanes=3 * 5)), whole)


def test_what_is_published_is_paced(tmp_path: Path) -> None:
    """By a clock that only waiting moves on."""
    clock = StillClock()
    limit = RateLimit(1e3, clock)
    begun = clock.now()
    store = ObjectStore(f"file://{tmp_path}")
    values = make_values(0, 0, 3_000)
    bucket = BucketExchange(store, 0, len(values), rate_limit=limit)
    info, traffic = bucket.publish(values, "paced", CODECS["fp32"])
    assert traffic.bytes_sent == 12_000
    assert clock.now() - begun == pytest.approx(limit.seconds(12_000))
    back = torch.empty_like(values)
    bucket.fetch([info], back)
    assert same_bits(back, values)


def test_ranks_may_own_nothing(store: ObjectStore) -> None:
    info, traffic = BucketExchange(store, 5, 0).publish(torch.empty(0), "empty", FP32)
    assert (info.num_bytes, info.digests, traffic) == (0, [], Traffic())
    assert store.list("") == [], "nothing to write"
    seen: list[object] = []
    exchange = BucketExchange(store, 5, 0)
    assert exchange.average([[info]], [1], FP32, torch.empty(0), lambda own, mean: seen.append(own)) == Traffic()
    assert exchange.fetch([], torch.empty(0)) == Traffic()
    assert not seen


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[int]:
    return [0, *sorted(draw(st.lists(st.integers(0, size), max_size=6))), size]


@given(data=st.data(), size=st.integers(0, 120), payload=st.sampled_from(CASTS), seed=st.integers(0, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_random_cuts_do_not_change_a_bit(data: st.DataObject, size: int, payload: str, seed: int) -> None:
    codec, store = CODECS[payload], new_store()
    num_islands = data.draw(st.integers(1, 4))
    weights = data.draw(st.sampled_from([[1.0] * num_islands, WEIGHTS[:num_islands]]))
    values = [make_values(seed, island, size) for island in range(num_islands)]
    parts = []
    for island, value in enumerate(values):
        infos = publish(store, str(island), value, data.draw(cuts(size)), codec)
        parts.append(data.draw(st.permutations(infos)))
    expected = weighted_mean([round_trip(codec, value) for value in values], weights, keep=0)
    assert same_bits(average(store, parts, weights, codec, data.draw(cuts(size))), expected)


@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.parametrize("payload", ["fp32", "bf16"])
def test_three_islands_as_threads_get_the_same_bits_over_rounds(tmp_path: Path, scheme: str, payload: str) -> None:
    codec, size, num_islands = CODECS[payload], 301, 3
    url = f"memory://threads-{payload}" if scheme == "memory" else f"file://{tmp_path}"
    barrier = threading.Barrier(num_islands)
    announced: dict[tuple[int, int], str] = {}

    def run(island: int) -> list[torch.Tensor]:
        store, bounds = ObjectStore(url), lane_bounds(size, num_ranks=island + 1)
        results, values = [], make_values(0, island, size)
        for number in range(4):
            infos = publish(store, f"payloads/{number}/{island}", values, bounds, codec)
            announced[number, island] = json.dumps([info.model_dump() for info in infos])
            barrier.wait(30)
            parts = [[read_info(info) for info in json.loads(announced[number, i])] for i in range(num_islands)]
            for low, high in pairwise(bounds):
                own_values = values[low:high]
                BucketExchange(store, low, high - low).average(
                    parts, WEIGHTS[:num_islands], codec, own_values, own=island, own_values=own_values
                )
            results.append(values.clone())
            values.add_(make_values(number, island, size))
        return results

    first, *others = run_islands(num_islands, run)
    for other in others:
        assert all(same_bits(left, right) for left, right in zip(first, other, strict=True))


# The bits of codecs that code in blocks


CODED_SIZES = [0, 1, 257, CODEC_BLOCK, CODEC_BLOCK + 1, 7 * CODEC_BLOCK + 1234]


@pytest.mark.usefixtures("codec_blocks")
@pytest.mark.parametrize("payload", ["fp32", *CODED])
@pytest.mark.parametrize(
    "weights", [pytest.param([2.0, 2.0], id="equal", marks=pytest.mark.slow), pytest.param([3.0, 1.0], id="unequal")]
)
def test_a_bucket_of_codes_computes_what_memory_computes_bit_for_bit(
    store: ObjectStore, payload: str, weights: list[float]
) -> None:
    codec = CODECS[payload]
    for seed, size in enumerate(CODED_SIZES):
        values = [make_values(seed, island, size) for island in range(2)]
        parts = [publish(store, f"{seed}/{i}", value, [0, size], codec) for i, value in enumerate(values)]
        result = average(store, parts, weights, codec, [0, size])
        assert same_bits(result, average_in_memory(values, weights, codec)), size


@pytest.mark.usefixtures("codec_blocks")
@pytest.mark.parametrize("payload", CODED)
def test_the_mean_of_more_than_two_codes_is_that_of_memory_where_all_average_by_themselves(
    store: ObjectStore, payload: str
) -> None:
    codec, size = CODECS[payload], 3 * CODEC_BLOCK + 99
    values = [make_values(0, island, size) for island in range(3)]
    parts = [publish(store, str(i), value, [0, size], codec) for i, value in enumerate(values)]
    result = average(store, parts, WEIGHTS[:3], codec, [0, size])
    assert same_bits(result, weighted_mean([round_trip(codec, value) for value in values], WEIGHTS[:3], keep=0))
    assert same_bits(result, average_in_memory(values, WEIGHTS[:3], codec)) == codec.needs_feedback


@pytest.mark.usefixtures("codec_blocks")
@pytest.mark.parametrize("payload", CODED)
@pytest.mark.parametrize("size", [100, 9 * CODEC_BLOCK + 257])
def test_any_number_of_ranks_writes_and_reads_the_same_bits_of_codes(
    store: ObjectStore, payload: str, size: int
) -> None:
    codec, weights = CODECS[payload], [1.0, 2.0, 5.0]
    values = [make_values(0, island, size) for island in range(3)]
    parts = [
        publish(store, str(island), values[island], lane_bounds(size, num_ranks, 64, codec.block_values), codec)
        for island, num_ranks in enumerate([3, 1, 64])
    ]
    expected = weighted_mean([round_trip(codec, value) for value in values], weights, keep=0)
    for num_ranks, num_lanes in [(1, 64), (2, 64), (5, 64), (64, 64), (5, 15)]:
        bounds = lane_bounds(size, num_ranks, num_lanes, codec.block_values)
        assert same_bits(average(store, parts, weights, codec, bounds), expected)


@given(data=st.data(), payload=st.sampled_from(CODED), seed=st.integers(0, 1 << 20))
@settings(max_examples=30)
def test_random_cuts_between_blocks_do_not_change_a_bit(data: st.DataObject, payload: str, seed: int) -> None:
    codec, store = CODECS[payload], new_store()
    num_blocks = data.draw(st.integers(0, 9))
    size = max(0, num_blocks * codec.block_values - data.draw(st.integers(0, codec.block_values - 1)))

    def draw_bounds() -> list[int]:
        return [block * codec.block_values for block in data.draw(cuts(max(0, num_blocks - 1)))[:-1]] + [size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "OBJECT_BLOCK_VALUES", codec.block_values * data.draw(st.integers(1, 4)))
        patch.setattr(bucket, "BLOCK_VALUES", codec.block_values * data.draw(st.integers(1, 3)))
        num_islands = data.draw(st.integers(1, 3))
        values = [make_values(seed, island, size) for island in range(num_islands)]
        parts = [publish(store, str(island), value, draw_bounds(), codec) for island, value in enumerate(values)]
        expected = weighted_mean([round_trip(codec, value) for value in values], WEIGHTS[:num_islands], keep=0)
        assert same_bits(average(store, parts, WEIGHTS[:num_islands], codec, draw_bounds()), expected)


@pytest.mark.usefixtures("codec_blocks")
@pytest.mark.parametrize("payload", CODED)
@pytest.mark.parametrize("num_islands", [1, 2, 3])
def test_own_values_are_what_own_objects_hold(store: ObjectStore, payload: str, num_islands: int) -> None:
    codec, own = CODECS[payload], num_islands - 1
    size, low = 5 * CODEC_BLOCK + 77, 2 * CODEC_BLOCK
    values = [make_values(0, island, size) for island in range(num_islands)]
    bounds = [0, 3 * CODEC_BLOCK, size]
    parts = [publish(store, str(i), value, bounds, codec) for i, value in enumerate(values)]
    weights = WEIGHTS[:num_islands]
    expected = average(store, parts, weights, codec, [0, size])
    for start in (0, low):
        watched = WatchedStore(store)
        mine = values[own][start:].clone()
        exchange = BucketExchange(watched, start, size - start)  # type: ignore[arg-type]
        exchange.average(parts, weights, codec, mine, own=own, own_values=mine)
        assert same_bits(mine, expected[start:])
        assert not any(path.startswith(f"{own}/") for path, _ in watched.reads)


@pytest.mark.usefixtures("codec_blocks")
@pytest.mark.parametrize("payload", CODED)
def test_codes_cut_within_a_block_are_refused(store: ObjectStore, payload: str) -> None:
    codec = CODECS[payload]
    size, within = 2 * CODEC_BLOCK, codec.block_values // 2
    records = announce(store, size, codec, [0, codec.block_values, size])
    assert same_bits(read_all(store, records, size, codec), round_trip(codec, make_values(0, 1, size)))
    for start in (within, codec.block_values + 1, codec.block_values - 1):
        with pytest.raises(PayloadError, match=rf"start {start} .*must be multiples of {payload}'s blocks"):
            read_info(records[1] | {"start": start})
    digests = records[1]["digests"] * 2
    with pytest.raises(PayloadError, match=rf"block_values {within} must be multiples of {payload}'s blocks"):
        read_info(records[1] | {"block_values": within, "digests": digests})
    exchange = BucketExchange(store, within, 10)
    with pytest.raises(ValueError, match=rf"no block of {payload} begins at value {within}"):
        exchange.publish(torch.zeros(10), "within", codec)
    with pytest.raises(ValueError, match=rf"no block of {payload} begins at value {within}"):
        exchange.average([[read_info(record) for record in records]], [1.0], codec, torch.zeros(10))
    assert not store.list("within")


def test_blocks_grow_with_the_model(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Islands of other numbers of ranks, and those whose blocks are smaller, read the same values."""
    size, bounds, num_islands = 13 * BLOCK, [0, 5 * BLOCK, 9 * BLOCK + 3, 13 * BLOCK], 2
    values = [make_values(0, island, size) for island in range(num_islands)]
    parts = [publish(store, "0", values[0], [0, size], FP32), []]
    monkeypatch.setattr(bucket, "MAX_DIGESTS", 4)
    for low, high in pairwise(bounds):
        exchange = BucketExchange(store, low, high - low, total=size)
        parts[1].append(exchange.publish(values[1][low:high], f"1/{low}", FP32)[0])
    assert [info.block_values for info in parts[1]] == [4 * BLOCK] * 3
    assert same_bits(average(store, parts, [1.0, 1.0], FP32, [0, 3, size]), weighted_mean(values, [1.0, 1.0], keep=0))


@pytest.mark.usefixtures("full_blocks")
@pytest.mark.parametrize("billions", [17, 70, 274])
def test_the_offer_of_a_large_model_fits_in_a_record(store: ObjectStore, billions: int) -> None:
    total, num_ranks = billions * 10**9, NUM_LANES
    length = total // num_ranks // CODEC_BLOCK * CODEC_BLOCK
    exchange = BucketExchange(store, 0, length, total=total)
    digests = ["0" * 64] * -(-length // exchange.block_values)
    path = f"payloads/00000001/00000-000001-{'0' * 16}/rank-00063.bin"
    sizes: dict[str, Any] = {
        "start": length,
        "length": length,
        "num_bytes": 4 * length,
        "block_values": exchange.block_values,
    }
    info = ObjectInfo(path=path, codec="fp32", digests=digests, **sizes)
    offer = OfferRecord(
        island=0, incarnation=1, serial=0, steps=1, weight=1.0, norm=1.0, state="0", objects=[info.model_dump()] * 64
    )
    Seal(bytes(16), "run", encrypt=True).wrap("rounds/00000001/00/offers/00000-000001-000000.json", offer.model_dump())


# Own values, observers, traffic


@pytest.mark.parametrize("payload", ["fp32", "bf16"])
@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("weigh", ["equal", "unequal"])
def test_own_values_need_not_be_read_and_may_be_overwritten(
    store: ObjectStore, payload: str, num_islands: int, weigh: str
) -> None:
    codec, size, own = CODECS[payload], 5 * BLOCK + 3, num_islands - 1
    weights = [1.0] * num_islands if weigh == "equal" else WEIGHTS[:num_islands]
    values = [make_values(0, island, size) for island in range(num_islands)]
    parts = [publish(store, str(i), value, [0, 11, size], codec) for i, value in enumerate(values)]
    expected = average(store, parts, weights, codec, [0, size])
    for low, high in [(0, size), (3, 29)]:
        watched = WatchedStore(store)
        mine = values[own][low:high].clone()
        exchange = BucketExchange(watched, low, high - low)  # type: ignore[arg-type]
        traffic = exchange.average(parts, weights, codec, mine, own=own, own_values=mine)
        assert same_bits(mine, expected[low:high])
        assert traffic == Traffic(0, sum(num_bytes for _, num_bytes in watched.reads))
        assert not any(path.startswith(f"{own}/") for path, _ in watched.reads)


@pytest.mark.parametrize("payload", ["fp32", "fp16"])
@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("given_values", ["own values", "own objects", "no part"])
def test_an_observer_sees_own_values_and_the_average_in_order(
    store: ObjectStore, payload: str, num_islands: int, given_values: str
) -> None:
    codec, size = CODECS[payload], 5 * BLOCK + 2
    values = [make_values(0, island, size) for island in range(num_islands)]
    parts = [publish(store, str(i), value, lane_bounds(size, i + 1), codec) for i, value in enumerate(values)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    out = values[0].clone()
    BucketExchange(store, 0, size).average(
        parts,
        WEIGHTS[:num_islands],
        codec,
        out,
        lambda own, mean: seen.append((own.clone(), mean.clone())),
        own=None if given_values == "no part" else 0,
        own_values=out if given_values == "own values" else None,
    )
    shown = {
        "own values": values[0],
        "own objects": round_trip(codec, values[0]),
        "no part": torch.zeros(size),
    }
    assert torch.equal(torch.cat([own for own, _ in seen]), shown[given_values])
    assert torch.equal(torch.cat([mean for _, mean in seen]), out)
    assert max(len(own) for own, _ in seen) <= 5


def test_no_block_is_read_twice_and_only_blocks_that_are_needed(store: ObjectStore) -> None:
    size = 100
    parts = [
        publish(store, str(i), make_values(0, i, size), bounds, BF16)
        for i, bounds in enumerate([[0, 100], [0, 37, 100]])
    ]
    watched = WatchedStore(store)
    out = torch.empty(30)
    traffic = BucketExchange(watched, 20, 30).average(parts, [1, 1], BF16, out)  # type: ignore[arg-type]
    # Of one object: blocks 2 to 6. Of two: blocks 2, 3 and the 5 values left of the first, 0 and 1 of the second.
    assert sorted(watched.reads) == sorted(
        [("0/rank-0.bin", 16)] * 5 + [("1/rank-0.bin", 16)] * 2 + [("1/rank-0.bin", 10)] + [("1/rank-1.bin", 16)] * 2
    )
    assert traffic == Traffic(bytes_received=sum(num_bytes for _, num_bytes in watched.reads))


@pytest.mark.parametrize("num_transfers", [1, 3])
def test_reading_ahead_is_bounded(store: ObjectStore, num_transfers: int) -> None:
    size, num_islands = 100 * BLOCK, 3
    parts = [
        publish(store, str(i), make_values(0, i, size), lane_bounds(size, i + 1), FP32) for i in range(num_islands)
    ]
    watched = WatchedStore(store)
    done = 0
    ahead = []

    def observe(own: torch.Tensor, mean: torch.Tensor) -> None:
        nonlocal done
        done += len(mean)
        ahead.append(sum(num_bytes // 4 for _, num_bytes in watched.reads) - num_islands * done)

    exchange = BucketExchange(watched, 0, size, num_transfers)  # type: ignore[arg-type]
    exchange.average(parts, [1] * num_islands, FP32, torch.empty(size), observe)
    assert max(ahead) <= (num_islands + num_transfers) * BLOCK
    assert watched.most_at_once <= num_transfers


@pytest.mark.usefixtures("full_blocks")
def test_what_was_published_stays_whatever_becomes_of_the_values(store: ObjectStore) -> None:
    """A store in memory keeps a small buffer that it is given, instead of a copy."""
    for size in [10, PART_BYTES // 4, PART_BYTES // 4 + 1, 3_000_000]:
        values = make_values(0, 0, size)
        infos = publish(store, str(size), values, [0, size], FP32)
        values.zero_()
        out = torch.empty(size)
        BucketExchange(store, 0, size).fetch(infos, out)
        assert torch.equal(out, make_values(0, 0, size))


def test_averaging_leaves_the_objects_as_they_are(store: ObjectStore) -> None:
    parts = [publish(store, str(i), make_values(0, i, 50), [0, 50], FP32) for i in range(3)]
    first, second = (average(store, parts, WEIGHTS[:3], FP32, [0, 50]) for _ in range(2))
    assert same_bits(first, second)


def test_a_snapshot_comes_back_exactly_in_another_cut(store: ObjectStore) -> None:
    state = torch.randint(-(1 << 31), (1 << 31) - 1, (333,), dtype=torch.int32).view(torch.float32)  # NaNs too
    infos = publish(store, "snapshots/7", state, lane_bounds(333, 4), FP32)
    out = torch.empty(333)
    for low, high in pairwise(lane_bounds(333, 3)):
        BucketExchange(store, low, high - low).fetch(infos, out[low:high])
    assert same_bits(out, state)


@pytest.mark.usefixtures("full_blocks")
def test_blocks_of_full_size(store: ObjectStore) -> None:
    size = (5 << 20) + 12345
    values = [make_values(0, island, size) for island in range(2)]
    parts = [publish(store, str(i), value, lane_bounds(size, 2 * i + 1), BF16) for i, value in enumerate(values)]
    assert parts[0][0].block_values == 1 << 20
    result = average(store, parts, [1, 3], BF16, lane_bounds(size, 2))
    assert same_bits(result, average_in_memory(values, [1, 3], BF16))


# What is refused


def announce(
    store: ObjectStore, size: int = 50, codec: Codec = FP32, bounds: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Announcements of one island, as parsed JSON."""
    infos = publish(store, "payloads/3/1-0", make_values(0, 1, size), bounds or [0, 20, size], codec)
    return [json.loads(info.model_dump_json()) for info in infos]


def read_all(store: Any, records: Sequence[Any], size: int = 50, codec: Codec = FP32) -> torch.Tensor:
    out = torch.empty(size)
    BucketExchange(store, 0, size).average([[read_info(record) for record in records]], [1.0], codec, out)
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 19}, "take 76 bytes, not 80"),
        ({"length": -1}, "greater than or equal to 0"),
        ({"length": 1 << 60, "num_bytes": 1 << 62}, "less than or equal"),
        ({"start": -1}, "'start'.*greater than or equal to 0"),
        ({"start": 1.0}, "'start'.*valid integer"),
        ({"start": True}, "'start'.*valid integer"),
        ({"num_bytes": 81}, "take 80 bytes, not 81"),
        ({"block_values": 0}, "'block_values'.*greater than or equal to 1"),
        ({"block_values": 1 << 25}, "'block_values'.*less than or equal"),
        ({"block_values": 1}, "have 20 digests, not 3"),
        ({"digests": []}, "have 3 digests, not 0"),
        ({"digests": ["0" * 63] * 3}, "'digests.0'"),
        ({"digests": ["A" * 64] * 3}, "'digests.0'"),
        ({"digests": ["0" * 64 + "\n"] * 3}, "'digests.0'"),
        ({"codec": "int3"}, "'codec'.*'int3' is none of fp32, bf16, fp16, fp4"),
        ({"codec": ""}, "'codec'"),
        ({"codec": "INT8"}, "'codec'"),
        ({"codec": "int8"}, "multiples of int8's blocks of 256 values"),
        ({"path": "../../etc/passwd"}, "'path'"),
        ({"path": "/etc/passwd"}, "'path'"),
        ({"path": "a//b"}, "'path'"),
        ({"path": "a/../b"}, "'path'"),
        ({"path": "a/b\n"}, "'path'"),
        ({"path": "a" * 513}, "'path'"),
        ({"path": 7}, "'path'"),
        ({"note": "hello"}, "'note'"),
    ],
)
def test_an_announcement_that_does_not_add_up_is_refused(
    store: ObjectStore, change: dict[str, Any], message: str
) -> None:
    record = announce(store)[0]
    with pytest.raises(PayloadError, match=message) as caught:
        read_info(record | change)
    assert "leave its island out" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("record", [None, 3, "text", [], {}, {"path": "a"}, {3: 4}, "\ud800", {"path": "\ud800"}])
def test_what_is_no_announcement_is_refused(record: object) -> None:
    with pytest.raises(PayloadError, match=r"the announcement of the object .* is invalid"):
        read_info(record)


@pytest.mark.parametrize(
    ("bounds", "shift", "message"),
    [
        ([0, 20, 50], -1, "overlap: the one ends at value 20, the other begins at 19"),
        ([0, 20, 50], 1, "leave a gap: the one ends at value 20, the other begins at 21"),
        ([0, 20, 49], 0, "do not hold the values 0 to 50.*0 to 49"),
        ([0, 50], 1, "do not hold the values 0 to 50.*1 to 51"),
    ],
)
def test_ranges_must_fit_before_anything_is_read(
    store: ObjectStore, bounds: list[int], shift: int, message: str
) -> None:
    records = announce(store, bounds[-1], bounds=bounds)
    records[-1]["start"] += shift
    watched = WatchedStore(store)
    with pytest.raises(PayloadError, match=message) as caught:
        read_all(watched, records)
    assert "payloads/3/1-0/rank-" in str(caught.value)
    assert not watched.reads


def test_the_same_range_twice_or_none_at_all_is_refused(store: ObjectStore) -> None:
    records = announce(store)
    with pytest.raises(PayloadError, match="overlap"):
        read_all(store, records + records[1:])
    with pytest.raises(PayloadError, match="do not hold the values 0 to 50"):
        read_all(store, [])


def test_another_codec_is_refused_before_anything_is_read(store: ObjectStore) -> None:
    watched = WatchedStore(store)
    with pytest.raises(PayloadError, match=r"rank-0\.bin' is in bf16, not fp32"):
        read_all(watched, announce(store, codec=BF16))
    assert not watched.reads


def test_a_huge_announcement_allocates_nothing(store: ObjectStore) -> None:
    """An object of 64 TiB in blocks of 64 MiB, of which the reader needs 50 values."""
    blocks, size = 1 << 20, 1 << 24
    record = announce(store, bounds=[0, 50])[0] | {
        "length": blocks * size,
        "num_bytes": 4 * blocks * size,
        "block_values": size,
        "digests": ["0" * 64] * blocks,
    }
    with pytest.raises((PayloadError, StoreError), match="rank-0"):
        read_all(store, [record])
    infos = [read_info(record)]
    with BlockReader(store, [infos], 0, 50, num_threads=4) as reader:
        assert reader.buffer_bytes == 4 * 50


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("offset", [0, 31, 79])
def test_a_flipped_bit_is_found(store: ObjectStore, rank: int, offset: int) -> None:
    records = announce(store)
    data = bytearray(store.get(records[rank]["path"], 1000) or b"")
    data[offset] ^= 1
    store.put(records[rank]["path"], bytes(data))
    with pytest.raises(PayloadError, match=rf"rank-{rank}\.bin' is not what its island announced.*leave its island"):
        read_all(store, records)


@pytest.mark.parametrize("left", [0, 1, 32, 79])
def test_an_object_cut_short_is_found(store: ObjectStore, left: int) -> None:
    records = announce(store)
    store.put(records[0]["path"], (store.get(records[0]["path"], 1000) or b"")[:left])
    with pytest.raises((PayloadError, StoreError), match=r"rank-0\.bin"):
        read_all(store, records)


def test_a_store_that_answers_too_little_is_found_out(store: ObjectStore) -> None:
    class Stingy(WatchedStore):
        def get_range(self, path: str, start: int, end: int) -> memoryview:
            return super().get_range(path, start, end)[:-1]

    with pytest.raises(
        PayloadError, match=r"rank-0\.bin' is not what its island announced: the digest of bytes 0 to 32 differs"
    ):
        read_all(Stingy(store), announce(store))


def test_an_absent_object_is_named(store: ObjectStore) -> None:
    records = announce(store)
    store.delete([records[1]["path"]])
    with pytest.raises(PayloadError, match=r"rank-1\.bin is absent") as caught:
        read_all(store, records)
    assert caught.value.path == records[1]["path"]


def test_after_a_failure_no_thread_is_left_and_the_exchange_works_on(store: ObjectStore) -> None:
    records = announce(store, size=5000, bounds=[0, 5000])
    data = store.get(records[0]["path"], 1 << 20) or b""
    store.put(records[0]["path"], data[:-1] + b"\0")
    before = threading.active_count()
    exchange, out = BucketExchange(store, 0, 5000), torch.empty(5000)
    with pytest.raises(PayloadError):
        exchange.fetch([read_info(records[0])], out)
    assert threading.active_count() == before
    store.put(records[0]["path"], data)
    exchange.fetch([read_info(records[0])], out)
    assert torch.equal(out, make_values(0, 1, 5000))


@pytest.mark.parametrize(
    "reader", [None, BlockSeal(bytes(16), "run 2"), BlockSeal(bytes(range(16)), "run 1")], ids=["no key", "run", "key"]
)
def test_what_is_encrypted_opens_with_the_key_of_its_run_alone(store: ObjectStore, reader: BlockSeal | None) -> None:
    values, out = make_values(0, 1, 50), torch.empty(50)
    seal = BlockSeal(bytes(16), "run 1")
    info, _ = BucketExchange(store, 0, 50, seal=seal).publish(values, "sealed", FP32)
    BucketExchange(store, 0, 50, seal=seal).fetch([info], out)
    assert same_bits(out, values)
    with pytest.raises(PayloadError, match=r"'sealed' cannot be decrypted: .*Give all islands one key"):
        BucketExchange(store, 0, 50, seal=reader).fetch([info], out)


@pytest.mark.parametrize(("start", "length", "num_transfers"), [(-1, 50, 4), (0, -1, 4), (0, 50, 0)])
def test_a_range_that_cannot_be_is_told(store: ObjectStore, start: int, length: int, num_transfers: int) -> None:
    with pytest.raises(ValueError, match=f"start {start} and length {length} must be >= 0, .* {num_transfers} >= 1"):
        BucketExchange(store, start, length, num_transfers)


@pytest.mark.parametrize(
    ("weights", "numel", "more"),
    [
        ([1.0], 50, {}),
        ([1.0, 0.0], 50, {}),
        ([1.0, 1.0], 49, {}),
        ([1.0, 1.0], 50, {"own": 2}),
        ([1.0, 1.0], 50, {"own_values": torch.zeros(50)}),
        ([1.0, 1.0], 50, {"own": 0, "own_values": torch.zeros(49)}),
        ([1.0, 1.0], 50, {"own": 0, "own_values": torch.zeros(100)[::2]}),
    ],
)
def test_a_callers_mistakes_are_told(
    store: ObjectStore, weights: list[float], numel: int, more: dict[str, Any]
) -> None:
    infos = [read_info(record) for record in announce(store)]
    with pytest.raises(ValueError):
        BucketExchange(store, 0, 50).average([infos, infos], weights, FP32, torch.empty(numel), **more)


# Random damage


NASTY: list[Any] = [
    *(-1, 0, 1, 2, 7, 8, 9, 16, 19, 20, 21, 30, 50, 64, 1 << 20, 1 << 24, 1 << 48, 1 << 63, 1 << 100, -(1 << 70)),
    *(
        1.0,
        8.0,
        1e300,
        float("nan"),
        True,
        False,
        None,
        "",
        "0",
        "8",
        "fp32",
        "bf16",
        "fp16",
        "fp64",
        [],
        [0],
        {},
        {"a": []},
    ),
    *("payloads/3/1-0/rank-0.bin", "payloads/3/1-0/rank-1.bin", "payloads", "..", "\0", "é", "a" * 10_000, "\ud800"),
]


def damage_record(rng: random.Random, record: dict[str, Any]) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice([*record, "extra"])
        value = record.get(key)
        kind = rng.randrange(4)
        if kind == 0:
            record[key] = rng.choice(NASTY)
        elif kind == 1:
            record.pop(key, None)
        elif isinstance(value, int) and not isinstance(value, bool):
            record[key] = value + rng.choice([-8, -4, -1, 1, 4, 8, value])
        elif isinstance(value, list) and value:
            shuffle, repeat = partial(rng.shuffle, value), partial(value.append, value[0])
            changes: list[Callable[[], object]] = [value.reverse, value.pop, repeat, shuffle]
            rng.choice(changes)()
        elif isinstance(value, str) and value:
            at = rng.randrange(len(value))
            record[key] = value[:at] + rng.choice("0aZ/.\n ") + value[at + rng.randrange(2) :]


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data[at:],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data + data[at:],
            data[at:] + data[:at],
            rng.randbytes(len(data)),
        ]
    )


def test_thousands_of_damaged_announcements_and_objects_never_pass_for_others(store: ObjectStore) -> None:
    """Whatever is done to them: an error of the package's own, or the very values that were published."""
    rng = random.Random(3)
    records = announce(store)
    expected = make_values(0, 1, 50)
    objects = {record["path"]: store.get(record["path"], 1000) or b"" for record in records}
    refused = 0
    for number in range(3000):
        damaged: list[dict[str, Any]] = json.loads(json.dumps(records))
        victim = rng.choice(damaged)
        path = victim["path"]
        if number % 3 == 0:
            store.put(path, damage_bytes(rng, objects[path]))
        else:
            damage_record(rng, victim)
        try:
            assert same_bits(read_all(store, damaged), expected), damaged
        except (PayloadError, StoreError):
            refused += 1
        if number % 3 == 0:
            store.put(path, objects[path])
    assert refused > 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=12), children, max_size=8),
    max_leaves=20,
)
FIELDS = sorted(ObjectInfo.model_fields)


@given(
    record=JSON | st.dictionaries(st.sampled_from(FIELDS), JSON) | st.fixed_dictionaries(dict.fromkeys(FIELDS, JSON))
)
@settings(max_examples=150)
def test_any_json_is_an_announcement_or_a_payload_error(record: object) -> None:
    try:
        info = read_info(record)
    except PayloadError:
        return
    assert info.num_bytes == CODECS[info.codec].num_bytes(info.length)


# Blocks


@given(data=st.data(), size=st.integers(1, 100), block=st.integers(1, 30))
def test_blocks_cover_a_range_once_each_inside_its_object(data: st.DataObject, size: int, block: int) -> None:
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low, size))
    cut = data.draw(cuts(size))
    infos = [
        ObjectInfo(
            path=f"rank-{rank}",
            codec="fp16",
            start=first,
            length=last - first,
            num_bytes=2 * (last - first),
            block_values=block,
            digests=["0" * 64] * -(-(last - first) // block),
        )
        for rank, (first, last) in enumerate(pairwise(cut))
    ]
    cover = find_cover(infos, low, high - low, CODECS["fp16"])
    position, seen = low, set()
    for found in iter_blocks(cover, low, high - low, participant=3):
        assert found.low == position < found.high
        position = found.high
        first, last = found.locate()
        assert 0 <= first < last <= found.info.num_bytes
        assert last - first <= 2 * block
        assert found.info.start + (first + found.num_skipped_bytes) // 2 == found.low
        assert found.num_skipped_bytes + found.num_needed_bytes <= last - first
        assert (found.info.path, found.number) not in seen
        seen.add((found.info.path, found.number))
    assert position == high or low == high
