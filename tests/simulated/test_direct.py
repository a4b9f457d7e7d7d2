"""Direct connections between islands that come and go: ranges and pieces, a store in the log, proofs of the key."""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_diloco.codecs import CODECS
from hf_diloco.errors import DamagedTransferError, ExchangeError, ForgedError, IslandLostError, PayloadError
from hf_diloco.rounds.direct import Range, SegmentedMesh, check_ranges, cut
from hf_diloco.sealing.channel import Parties
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.store.values import LINKS, BytesRecord, ValueStore
from hf_diloco.transport import meeting
from hf_diloco.transport.base import Lane, Traffic
from hf_diloco.transport.connections import Sealer
from hf_diloco.transport.handshake import End
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.transport.transfers import Transfers
from tests.clocks import AT_ONCE, LONG
from tests.islands import count_files, run_islands, try_islands

FP32 = CODECS["fp32"]
KEY, OTHER_KEY = b"0123456789abcdef", b"another key of 26 bytes..."
LOCALHOST = "127.0.0.1"
Ranges = list[Range]


# Ranges and pieces


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Ranges]]:
    """A size, and for each of 1-4 islands the ranges of its 1-5 ranks; some may be empty."""
    size = draw(st.integers(0, 60))
    islands = st.lists(st.lists(st.integers(0, size), max_size=4).map(sorted), min_size=1, max_size=4)
    return size, [ranges_between([0, *inner, size]) for inner in draw(islands)]


def ranges_between(bounds: Sequence[int]) -> Ranges:
    return [Range(low, high - low) for low, high in itertools.pairwise(bounds)]


@given(layout=layouts())
@settings(max_examples=200)
def test_pieces_tile_the_space_and_have_one_owner_in_every_island(layout: tuple[int, list[Ranges]]) -> None:
    size, islands = layout
    tilings = []
    for ranges in islands:
        check_ranges(ranges, size)
        pieces = [cut(own, islands) for own in ranges]
        for own, of_rank in zip(ranges, pieces, strict=True):
            assert sum(piece.length for piece in of_rank) == own.length
            assert all(own.start <= piece.start < piece.end <= own.end for piece in of_rank)
        tiling = [piece for of_rank in pieces for piece in of_rank]
        check_ranges(tiling, size)
        tilings.append(tiling)
    assert all(tiling == tilings[0] for tiling in tilings), "all islands see the same pieces"
    for piece, ranges in itertools.product(tilings[0], islands):
        assert sum(own.start <= piece.start and piece.end <= own.end for own in ranges) == 1


@given(layout=layouts(), data=st.data())
@settings(max_examples=200)
def test_ranges_with_one_number_changed_are_refused(layout: tuple[int, list[Ranges]], data: st.DataObject) -> None:
    size, islands = layout
    ranges = islands[0]
    rank, by = data.draw(st.integers(0, len(ranges) - 1)), data.draw(st.integers(-70, 70).filter(bool))
    start, length = ranges[rank]
    wrong = data.draw(st.sampled_from([Range(start + by, length), Range(start, length + by)]))
    with pytest.raises(PayloadError):
        check_ranges([*ranges[:rank], wrong, *ranges[rank + 1 :]], size)
    with pytest.raises(PayloadError):
        check_ranges(ranges, size + by)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 4), (5, 5)], "follow each other"),
        ([(0, 6), (5, 5)], "follow each other"),
        ([(1, 9)], "follow each other"),
        ([(0, 12), (12, -2)], "follow each other"),
        ([(-2, 2), (0, 10)], "follow each other"),
        ([(5, 5), (0, 5)], "follow each other"),
        ([(0, 10), (0, 0)], "follow each other"),
        ([(0, 5), (5, 4)], "hold 9 values, not 10"),
        ([(0, 5), (5, 6)], "hold 11 values, not 10"),
        ([], "hold 0 values, not 10"),
    ],
    ids=["gap", "overlap", "late", "negative", "early", "order", "empty elsewhere", "too few", "too many", "none"],
)
def test_ranges_that_are_not_all_values_once(ranges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        check_ranges([Range(*part) for part in ranges], 10)


def test_pieces_end_where_any_range_ends() -> None:
    islands = [ranges_between(bounds) for bounds in ([0, 10], [0, 4, 10], [0, 4, 4, 7, 10])]
    assert cut(Range(0, 10), islands) == [(0, 4), (4, 3), (7, 3)]
    assert cut(Range(4, 6), islands) == [(4, 3), (7, 3)]
    assert cut(Range(4, 3), islands) == [(4, 3)]
    assert cut(Range(4, 0), islands) == []


# The store in the log


class Folder:
    """An object store of this test alone; what is opened in it shares nothing else."""

    def __init__(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"

    def log(self, key: bytes = KEY, run_id: str = "run-1") -> RunLog:
        return RunLog(ObjectStore(self.url), Seal(key, run_id))

    def store(self, key: bytes = KEY) -> ValueStore:
        return ValueStore(self.log(key), LINKS)


@pytest.fixture
def folder() -> Folder:
    return Folder()


@pytest.mark.parametrize("key", [KEY, b""], ids=["key", "no key"])
def test_what_one_puts_another_gets(folder: Folder, key: bytes) -> None:
    writer, reader = folder.store(key=key), folder.store(key=key)
    values: list[str | bytes] = [b"", b"\0\xff\n", b"bytes", "text", "Grüße", bytes(range(256))]
    for number, value in enumerate(values):
        writer.set(f"mesh/a/{number}", value)
    for number, value in enumerate(values):
        assert reader.find(f"mesh/a/{number}") == (value.encode() if isinstance(value, str) else value)
    writer.set("mesh/a/0", "newer")
    assert reader.find("mesh/a/0") == b"newer"


def test_keys_are_there_or_not(folder: Folder) -> None:
    store = folder.store()
    store.set("a", "1")
    store.set("b", "2")
    assert store.find_all(["a", "b", "absent"]) == {"a": b"1", "b": b"2"}
    assert store.find_all([]) == {}


def test_a_large_value_comes_back_whole(folder: Folder) -> None:
    value = os.urandom(48_000)
    folder.store().set("large", value)
    assert folder.store().find("large") == value


def test_waiting_ends_when_the_keys_have_come(folder: Folder) -> None:
    asked = threading.Event()

    def run(island: int) -> dict[str, bytes]:
        if island == 0:
            asked.set()
            return folder.store().wait(["first", "second"], LONG)
        assert asked.wait(LONG)
        for key in ("first", "second"):
            time.sleep(0.1)
            folder.store().set(key, key)
        return {}

    assert run_islands(2, run)[0] == {"first": b"first", "second": b"second"}


def test_patience_ends(folder: Folder) -> None:
    store = folder.store()
    store.set("here", "")
    started = time.monotonic()
    assert store.wait(["here", "absent"], 0.3) == {"here": b""}
    assert 0.3 <= time.monotonic() - started < AT_ONCE


def test_giving_up_ends_the_wait_at_once(folder: Folder) -> None:
    over = threading.Event()

    def run(island: int) -> float:
        if island == 1:
            time.sleep(0.2)
            over.set()
            return time.monotonic()
        assert folder.store().wait(["absent"], LONG, over.is_set) == {}
        assert over.is_set()
        return time.monotonic()

    ended, told = run_islands(2, run)
    assert ended - told < AT_ONCE


def test_who_gives_up_still_gets_what_is_there(folder: Folder) -> None:
    folder.store().set("here", "value")
    assert folder.store().wait(["here"], 0, lambda: True) == {"here": b"value"}


@pytest.mark.parametrize(("key", "run_id"), [(OTHER_KEY, "run-1"), (b"", "run-1"), (KEY, "run-2")])
def test_a_value_sealed_by_others_counts_as_absent(folder: Folder, key: bytes, run_id: str) -> None:
    ValueStore(folder.log(key, run_id), LINKS).set("a", "value")
    assert folder.store().find("a") is None
    folder.store().set("a", "ours")
    assert folder.store().find("a") == b"ours"


def test_a_value_moved_to_another_key_counts_as_absent(folder: Folder) -> None:
    folder.store().set("a", "value")
    objects = folder.log().store
    data = objects.get("links/a.json", 1 << 16)
    assert data is not None
    objects.put("links/b.json", data)
    assert folder.store().find("b") is None


@pytest.mark.parametrize("value", ["!!!!", "YQ", "YWJj\n", "é"])
def test_a_value_that_is_not_base64_counts_as_absent(folder: Folder, value: str) -> None:
    folder.log().put("links/a.json", BytesRecord(value=value))
    assert folder.store().find("a") is None


def test_who_gives_up_on_others_that_do_not_come_blames_nobody(folder: Folder) -> None:
    lane = Lane(folder.store(), "a", 0, 2, LOCALHOST, LONG, should_give_up=lambda waited: waited >= 0.1)
    started = time.monotonic()
    with pytest.raises(IslandLostError, match="not all have published their addresses") as caught:
        MeshExchange(lane)
    assert caught.value.islands == ()
    assert time.monotonic() - started < AT_ONCE


# Averages of pieces


class Rank(NamedTuple):
    """A process: its island, and what it owns."""

    island: int
    own: Range


def ranks_of(islands: Sequence[Ranges]) -> list[Rank]:
    return [Rank(island, own) for island, ranges in enumerate(islands) for own in ranges]


def connect(
    store: ValueStore, rank: Rank, islands: Sequence[Ranges], key: bytes = b"", patience: float = LONG
) -> SegmentedMesh:
    lane = Lane(
        *(store, "00000001-00", rank.island, len(islands), LOCALHOST, LONG, LinkKey(key) if key else None),
        should_give_up=lambda waited: waited >= patience,
    )
    return SegmentedMesh(lane, rank.own, islands)


def make_values(number: int, island: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * number + island))


def average_seen(mesh: SegmentedMesh, values: torch.Tensor, weights: Sequence[float], payload: str) -> Traffic:
    """As `average`; makes sure that an observer sees all values and their average in order."""
    before = values.clone()
    seen = [(torch.empty(0), torch.empty(0))]
    traffic = mesh.average(
        values, weights, CODECS[payload], lambda own, mean: seen.append((own.clone(), mean.clone()))
    )
    assert torch.equal(torch.cat([own for own, _ in seen]), before)
    assert torch.equal(torch.cat([mean for _, mean in seen]), values)
    return traffic


def in_memory(size: int, rounds: Sequence[Sequence[float]], payload: str) -> list[torch.Tensor]:
    """What islands of one rank compute, round by round."""
    num_islands = len(rounds[0])
    network = MemoryNetwork(num_islands, LONG)

    def run(island: int) -> list[torch.Tensor]:
        results = []
        for number, weights in enumerate(rounds):
            values = make_values(number, island, size)
            network.lane(str(number), island).average(values, weights, CODECS[payload])
            results.append(values)
        return results

    return run_islands(num_islands, run)[0]


LAYOUTS = {
    "one alone": [[0, 40, 100]],
    "as many ranks": [[0, 50, 100], [0, 50, 100]],
    "1 and 2": [[0, 100], [0, 37, 100]],
    "1, 2 and 3": [[0, 100], [0, 37, 100], [0, 30, 38, 100]],
    "crossed, some empty": [[0, 0, 60, 100], [0, 40, 40, 100], [0, 99, 100], [0, 100]],
}


@pytest.mark.parametrize("payload", ["fp32", "bf16"])
@pytest.mark.parametrize("key", [KEY, b""], ids=["key", "no key"])
@pytest.mark.parametrize("bounds", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_islands_cut_differently_average_as_islands_of_one_rank_bit_for_bit(
    folder: Folder, bounds: list[list[int]], key: bytes, payload: str
) -> None:
    islands = [ranges_between(of_island) for of_island in bounds]
    size, ranks = bounds[0][-1], ranks_of(islands)
    chances = torch.rand(2, len(islands), generator=torch.Generator().manual_seed(7)).tolist()
    rounds = [[1.0] * len(islands), *chances, [0.0] * (len(islands) - 1) + [3.0]]

    def run(number: int) -> tuple[list[torch.Tensor], Traffic]:
        rank = ranks[number]
        where = slice(rank.own.start, rank.own.end)
        mesh = connect(folder.store(key=key), rank, islands, key)
        results, traffic = [], Traffic()
        for turn, weights in enumerate(rounds):
            values = make_values(turn, rank.island, size)[where]
            traffic += average_seen(mesh, values, weights, payload)
            results.append(values)
        mesh.close()
        return results, traffic

    outcomes = run_islands(len(ranks), run)
    expected = in_memory(size, rounds, payload)
    for island in range(len(islands)):
        own = [outcome for rank, outcome in zip(ranks, outcomes, strict=True) if rank.island == island]
        for turn in range(len(rounds)):
            assert torch.equal(torch.cat([results[turn] for results, _ in own]), expected[turn])
        if len(islands) < 3:
            one_way = (len(islands) - 1) * len(rounds) * size * CODECS[payload].num_bytes(1)
            assert sum((traffic for _, traffic in own), Traffic()) == Traffic(one_way, one_way)


def test_a_closed_one_averages_nothing(folder: Folder) -> None:
    islands = [ranges_between([0, 10]), ranges_between([0, 4, 10])]
    ranks = ranks_of(islands)

    def run(number: int) -> None:
        mesh = connect(folder.store(), ranks[number], islands, KEY)
        mesh.average(torch.ones(ranks[number].own.length), [1, 1], FP32)
        mesh.close()
        mesh.close()
        values = torch.full((ranks[number].own.length,), 5.0)
        with pytest.raises(ExchangeError, match="closed"):
            mesh.average(values, [1, 1], FP32)
        assert torch.equal(values, torch.full_like(values, 5.0))

    run_islands(len(ranks), run)


def test_a_rank_that_leaves_wakes_those_it_shares_pieces_with(folder: Folder) -> None:
    """Island 0, of one rank, loses the second rank of island 1; their first piece is averaged before that."""
    islands = [ranges_between([0, 10]), ranges_between([0, 4, 10])]
    ranks = ranks_of(islands)
    connected = threading.Barrier(len(ranks), timeout=LONG)

    def run(number: int) -> list[float]:
        mesh = connect(folder.store(), ranks[number], islands)
        connected.wait()
        values = torch.full((ranks[number].own.length,), float(number))
        if number == 0:
            for _ in range(2):
                with pytest.raises(IslandLostError):
                    mesh.average(values, [1, 1], FP32)
        elif number == 1:
            mesh.average(values, [1, 1], FP32)
        mesh.close()
        return values.tolist()

    started = time.monotonic()
    outcomes = run_islands(len(ranks), run)
    assert outcomes == [[0.5] * 4 + [0.0] * 6, [0.5] * 4, [2.0] * 6]
    assert time.monotonic() - started < AT_ONCE


def test_a_damaged_piece_is_told_once_all_pieces_are_averaged(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Island 0, of one rank, and the first rank of island 1 get it damaged; the second one waits for its own."""
    islands = [ranges_between([0, 10]), ranges_between([0, 4, 10])]
    ranks, seal = ranks_of(islands), Sealer.seal

    def damage(self: Sealer, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        wires = seal(self, part, end, tag, transfers)
        return [wire.bitwise_not() for wire in wires] if (part.nbytes, tag) == (4 * 4, 1) else wires

    monkeypatch.setattr(Sealer, "seal", damage)

    def run(number: int) -> list[object]:
        rank, outcomes = ranks[number], list[object]()
        mesh = connect(folder.store(), rank, islands, KEY)
        for _ in range(2):
            values = torch.full((rank.own.length,), float(rank.island))
            try:
                mesh.average(values, [1, 1], FP32)
                outcomes.append(values.tolist())
            except DamagedTransferError as error:
                outcomes.append((error.islands, "it was altered in transit" in str(error)))
        mesh.close()
        return outcomes

    first, second, third = run_islands(len(ranks), run)
    assert first == [((1,), True), [0.5] * 10]
    assert second == [((0,), True), [0.5] * 4]
    assert third == [[0.5] * 6] * 2


@pytest.mark.parametrize(
    "is_kept",
    [
        True,
        False,
    ],
    ids=["store kept", "store let go"],
)
def test_an_island_that_leaves_is_named(folder: Folder, is_kept: bool) -> None:
    islands = [ranges_between([0, 10])] * 3
    kept = []

    def opened(rank: Rank) -> SegmentedMesh:
        store = folder.store()
        if is_kept:
            kept.append(store)
        return connect(store, rank, islands, KEY)

    def run(island: int) -> None:
        mesh = opened(Rank(island, islands[island][0]))
        connected.wait(LONG)  # island 2 leaves when all have come
        if island != 2:
            mesh.average(torch.ones(10), [1, 1, 1], FP32)
        mesh.close()

    connected = threading.Barrier(3)
    started = time.monotonic()
    outcomes = try_islands(3, run)
    assert [getattr(outcome, "islands", None) for outcome in outcomes] == [(2,), (2,), None]
    assert time.monotonic() - started < AT_ONCE


def test_where_a_piece_has_no_owner_the_others_are_let_go(folder: Folder) -> None:
    islands = [ranges_between([0, 10]), ranges_between([0, 4, 10])]
    ranks = ranks_of(islands)

    def run(number: int) -> None:
        if number == 2:
            return
        patience = 4.0 if number == 0 else LONG  # also to connect to those that are there
        mesh = connect(folder.store(), ranks[number], islands, patience=patience)
        mesh.average(torch.ones(4), [1, 1], FP32)

    started = time.monotonic()
    outcomes = try_islands(len(ranks), run)
    assert [type(outcome) for outcome in outcomes] == [IslandLostError, IslandLostError, type(None)]
    assert "(00000001-00/4)" in str(outcomes[0])
    assert time.monotonic() - started < AT_ONCE


def test_records_of_another_key_are_as_good_as_none(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """Others' ports are not even tried."""
    islands = [ranges_between([0, 10])] * 2

    def run(island: int) -> None:
        key = [KEY, OTHER_KEY][island]
        connect(folder.store(key), Rank(island, islands[island][0]), islands, key, patience=1.0)

    assert [type(outcome) for outcome in try_islands(2, run)] == [IslandLostError, IslandLostError]
    assert "was not sealed with this run's key" in caplog.text


def test_a_run_key_keeps_others_out() -> None:
    """Where the records are not sealed: who connects proves that it holds the key."""
    islands = [ranges_between([0, 10])] * 2
    shared = ValueStore.in_memory()

    def run(island: int) -> None:
        connect(shared, Rank(island, islands[island][0]), islands, [KEY, OTHER_KEY][island])

    started = time.monotonic()
    outcomes = try_islands(2, run)
    assert isinstance(outcomes[0], ForgedError)
    assert "does not hold the run's key" in str(outcomes[0])
    assert isinstance(outcomes[1], ForgedError | IslandLostError)
    assert time.monotonic() - started < AT_ONCE


def test_a_forged_note_of_loss_does_not_hide_the_loss(folder: Folder) -> None:
    def run(island: int) -> None:
        store = folder.store()
        exchange = MeshExchange(Lane(store, "a", island, 2, LOCALHOST, LONG, LinkKey(KEY)))
        if island == 1:
            folder.store(key=OTHER_KEY).set("lost/a/1", "0")
            exchange.close()
            return
        try:
            exchange.average(torch.ones(4), [1, 1], FP32)
        finally:
            with pytest.raises(ExchangeError, match="closed"):
                exchange.average(torch.ones(4), [1, 1], FP32)

    outcome, _ = try_islands(2, run)
    assert isinstance(outcome, BaseException)
    with pytest.raises(IslandLostError):
        raise outcome


@pytest.mark.parametrize("note", ["7", "-1"])
def test_a_note_of_loss_that_names_no_island_names_its_author(folder: Folder, note: str) -> None:
    has_ended = threading.Event()

    def run(island: int) -> None:
        store = folder.store()
        exchange = MeshExchange(Lane(store, "a", island, 3, LOCALHOST, LONG, parties=Parties((4, 8, 9))))
        if island == 0:
            try:
                exchange.average(torch.ones(4), [1, 1, 1], FP32)
            finally:
                has_ended.set()
        if island == 1:
            store.set("lost/a/1", note)
        else:
            assert has_ended.wait(LONG)
        exchange.close()

    outcome, _, _ = try_islands(3, run)
    assert isinstance(outcome, IslandLostError)
    assert outcome.islands == (1,)
    assert "island 8" in str(outcome)


# Proofs of the key


def in_mesh(keys: Sequence[bytes]) -> list[torch.Tensor | BaseException]:
    """Averages of islands with these keys, or why there are none."""
    store = ValueStore.in_memory()

    def run(island: int) -> torch.Tensor:
        exchange = MeshExchange(Lane(store, "0", island, len(keys), LOCALHOST, LONG, LinkKey(keys[island])))
        values = torch.full((20,), float(island))
        exchange.average(values, [1] * len(keys), FP32)
        exchange.close()
        return values

    return try_islands(len(keys), run)


@pytest.mark.parametrize("num_islands", [1, 2, 3])
def test_islands_with_one_key_connect(num_islands: int) -> None:
    for outcome in in_mesh([KEY] * num_islands):
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, torch.full((20,), (num_islands - 1) / 2))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FORGED_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("num_islands", "stranger"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_an_island_with_another_key_is_refused_by_the_others(num_islands: int, stranger: int) -> None:
    started = time.monotonic()
    outcomes = in_mesh([OTHER_KEY if island == stranger else KEY for island in range(num_islands)])
    assert time.monotonic() - started < AT_ONCE
    for island, outcome in enumerate(outcomes):
        if island == stranger:
            assert isinstance(outcome, ForgedError | IslandLostError)
        else:
            assert isinstance(outcome, ForgedError), outcome
            assert f"island {stranger} does not hold the run's key" in str(outcome)
            assert KEY.decode() not in str(outcome)


@pytest.mark.usefixtures("impatient")
def test_a_refusal_leaves_no_connection_open() -> None:
    in_mesh([KEY, OTHER_KEY])
    before = count_files()
    for _ in range(5):
        in_mesh([KEY, OTHER_KEY, KEY])
    deadline = time.monotonic() + AT_ONCE
    while count_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count_files() <= before
