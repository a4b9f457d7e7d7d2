"""The arithmetic of partitions, against counting element by element."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st

from hf_diloco.errors import (
    DamagedTransferError,
    DiLoCoError,
    DivergedError,
    ForgedError,
    IslandLostError,
    PayloadError,
    StopRequested,
    UnsupportedError,
)
from hf_diloco.inner import partition
from hf_diloco.inner.island import IslandGroup, _dump_error, _load_error
from hf_diloco.inner.partition import (
    AlignedPartition,
    LanePartition,
    check_cover,
    choose_partition,
    to_model_intervals,
)
from tests.programs.shards_pieces import Cut, ListShards, cut_pieces, make_shards

SIZES = {"embedding": 7, "empty": 0, "weight": 12, "bias": 1, "head": 5}


class OneOfSeveral(IslandGroup):
    """A rank of an island whose other ranks' answers are known beforehand."""

    def __init__(self, rank: int, answers: list[Any]) -> None:
        self.rank = rank
        self.size = len(answers)
        self.group = None
        self._answers = answers

    def gather(self, item: Any) -> list[Any]:
        return self._answers


@st.composite
def windows_and_partitions(draw: st.DrawFn, block_values: int = 1) -> tuple[int, list[LanePartition]]:
    """Values that may be under way at a time, and the partitions of all ranks of one island."""
    sizes = {f"p{number}": size for number, size in enumerate(draw(st.lists(st.integers(0, 9), min_size=1)))}
    num_ranks = draw(st.integers(1, 4))
    cut: Cut = draw(st.sampled_from(get_args(Cut)))
    shards = [make_shards(sizes, num_ranks, rank, cut) for rank in range(num_ranks)]
    held = [one.intervals() for one in shards]
    num_lanes = draw(st.integers(1, 6))
    window = draw(st.integers(num_ranks, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "WINDOW_VALUES", window)
        return window, [
            LanePartition(one, OneOfSeveral(rank, held), num_lanes, block_values) for rank, one in enumerate(shards)
        ]


def partitions_of_all_ranks(
    sizes: dict[str, int], num_ranks: int, cut: Cut, num_lanes: int, block_values: int
) -> list[LanePartition]:
    shards = [make_shards(sizes, num_ranks, rank, cut) for rank in range(num_ranks)]
    held = [one.intervals() for one in shards]
    return [LanePartition(one, OneOfSeveral(rank, held), num_lanes, block_values) for rank, one in enumerate(shards)]


parameter_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(
    lambda sizes: {f"p{number}": size for number, size in enumerate(sizes)}
)
in_blocks = st.sampled_from([1, 2, 5]).flatmap(windows_and_partitions)


def positions(intervals: list[tuple[int, int]]) -> list[int]:
    """The canonical index of each element of a vector made of these intervals."""
    return [index for start, length in intervals for index in range(start, start + length)]


@given(windows_and_partitions().map(lambda drawn: drawn[1]))
def test_lanes_cut_the_index_space_once(cuts: list[LanePartition]) -> None:
    everything = list(chain.from_iterable(positions(cut.intervals) for cut in cuts))
    assert everything == list(range(cuts[0].shards.num_parameters))
    lanes = list(chain.from_iterable(cut.lanes for cut in cuts))
    assert lanes == list(range(len(lanes)))
    lengths = [length for cut in cuts for length in cut.lane_sizes]
    assert max(lengths) - min(lengths) <= 1
    for cut in cuts:
        assert cut.numel == sum(cut.lane_sizes) == len(positions(cut.intervals))


@given(in_blocks.map(lambda drawn: drawn[1]))
def test_overlaps_are_what_counting_finds(cuts: list[LanePartition]) -> None:
    cut = cuts[0]
    for holder, one in enumerate(cuts):
        segments = one.shards.intervals()
        where = {
            (number, index - start): index
            for number, (start, length) in enumerate(segments)
            for index in range(start, start + length)
        }
        for owner, owning in enumerate(cuts):
            owned = positions(owning.intervals)
            counted = sorted(
                (number, offset, owned.index(index)) for (number, offset), index in where.items() if index in owned
            )
            found = sorted(
                (overlap.segment, overlap.segment_start + step, overlap.vector_start + step)
                for window in cut.windows
                for overlap in cut.overlaps(holder, owner, window)
                for step in range(overlap.length)
            )
            assert found == counted


@given(in_blocks)
def test_a_window_bounds_what_is_under_way(drawn: tuple[int, list[LanePartition]]) -> None:
    bound, cuts = drawn
    cut = cuts[0]
    ranks = range(len(cuts))
    for window in cut.windows:
        lengths = [[sum(one.length for one in cut.overlaps(h, o, window)) for o in ranks] for h in ranks]
        for rank in ranks:
            sent, received = sum(lengths[rank]), sum(line[rank] for line in lengths)
            assert max(sent, received) <= bound
    assert all(end == start for (_, end), (start, _) in pairwise(cut.windows))


@given(
    sizes=parameter_sizes,
    ranks=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(get_args(Cut))), min_size=2, max_size=3),
    more_lanes=st.integers(0, 9),
    block_values=st.sampled_from([1, 2, 4, 16, 64]),
)
def test_lanes_begin_at_blocks_and_are_the_same_on_all_islands(
    sizes: dict[str, int], ranks: list[tuple[int, Cut]], more_lanes: int, block_values: int
) -> None:
    num_lanes = max(num_ranks for num_ranks, _ in ranks) + more_lanes
    islands = [partitions_of_all_ranks(sizes, num_ranks, cut, num_lanes, block_values) for num_ranks, cut in ranks]
    total = sum(sizes.values())
    found: list[dict[int, tuple[int, int]]] = []
    for cuts in islands:
        everything = list(chain.from_iterable(positions(cut.intervals) for cut in cuts))
        assert everything == list(range(total))
        found.append({})
        for cut in cuts:
            assert cut.numel == sum(length for _, length in cut.intervals)
            assert [length for _, length in cut.intervals] == cut.lane_sizes
            found[-1].update(zip(cut.lanes, cut.intervals, strict=True))
        assert list(found[-1]) == list(range(num_lanes))
    lanes = found[0]
    assert all(other == lanes for other in found)
    assert all(start % block_values == 0 for start, _ in lanes.values())
    num_blocks = [-(-length // block_values) for _, length in lanes.values()]
    assert max(num_blocks) - min(num_blocks) <= 1, "as equal as whole blocks can be"


@given(
    sizes=parameter_sizes,
    num_ranks=st.integers(1, 3),
    cut=st.sampled_from(get_args(Cut)),
    num_lanes=st.integers(3, 9),
    block_values=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_a_part_of_a_fragment_is_known_in_the_whole_model(
    sizes: dict[str, int], num_ranks: int, cut: Cut, num_lanes: int, block_values: int, data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, unique=True).map(sorted))
    model = make_shards(sizes, 1, 0, "whole")
    offsets = model.offsets()
    in_model = [offsets[name] + index for name in names for index in range(sizes[name])]
    part = {name: sizes[name] for name in names}
    lanes = partitions_of_all_ranks(part, num_ranks, cut, num_lanes, block_values)
    held = [make_shards(part, num_ranks, rank, cut) for rank in range(num_ranks)]
    answers = [one.intervals() for one in held]
    aligned = [AlignedPartition(one, OneOfSeveral(rank, answers)) for rank, one in enumerate(held)]
    for partitions in (lanes, aligned):
        for one, fragment in zip(partitions, held, strict=True):
            intervals = to_model_intervals(one, fragment, model)
            assert positions(intervals) == [in_model[index] for index in positions(one.intervals)]
            assert all(length > 0 for _, length in intervals)
            ends = [offsets[name] + sizes[name] for name in names]
            assert not any(start < end < start + length for start, length in intervals for end in ends)
    if cut != "whole":
        everything = [to_model_intervals(one, fragment, model) for one, fragment in zip(aligned, held, strict=True)]
        assert sorted(chain.from_iterable(map(positions, everything))) == in_model
    in_lanes = [to_model_intervals(one, fragment, model) for one, fragment in zip(lanes, held, strict=True)]
    assert list(chain.from_iterable(map(positions, in_lanes))) == in_model


@pytest.mark.parametrize("block_values", [1, 8])
@pytest.mark.parametrize("num_lanes", [1, 2, 5])
@pytest.mark.parametrize("cut", get_args(Cut))
def test_one_rank_gathers_and_scatters(
    cut: Cut, num_lanes: int, block_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "WINDOW_VALUES", 4)
    shards = make_shards(SIZES, 1, 0, cut)
    values = torch.randn(shards.num_parameters)
    shards.write(values)
    for way in (
        LanePartition(shards, IslandGroup(), num_lanes, block_values),
        AlignedPartition(shards, IslandGroup()),
    ):
        out = torch.full((way.numel,), torch.nan)
        way.gather(out)
        assert torch.equal(out, values[positions(way.intervals)])
        way.scatter(-out)
        values = -values
        assert torch.equal(shards.read(), values)
    assert shards.num_commits == 2


def layout(ranks: list[str], replicated: bool) -> dict[str, object]:
    return {"ranks": ranks, "replicated": replicated}


@pytest.mark.parametrize(
    ("layouts", "replicated", "lanes"),
    [
        pytest.param([layout(["a"], True)], True, None, id="one rank, one island"),
        pytest.param([layout(["a"], True)] * 2, True, None, id="one rank each"),
        pytest.param([layout(["a", "b"], False)] * 3, False, None, id="equal shards"),
        pytest.param([layout(["a", "a"], True)] * 2, True, 2, id="DDP: nobody keeps the state twice"),
        pytest.param([layout(["a", "b"], False), layout(["a", "c"], False)], False, 2, id="other segments"),
        pytest.param([layout(["a", "b"], False), layout(["c"], True)], False, 2, id="fewer ranks"),
        pytest.param([layout(["a"], False), layout(["b", "c", "d"], False)], False, 3, id="more ranks"),
    ],
)
def test_choice_of_the_partition(layouts: list[dict[str, object]], replicated: bool, lanes: int | None) -> None:
    shards = ListShards(SIZES, cut_pieces(SIZES, 1, "whole")[0], replicated)
    ranks = layouts[0]["ranks"]
    assert isinstance(ranks, list)
    chosen = choose_partition(shards, OneOfSeveral(0, [shards.intervals()] * len(ranks)), layouts)
    if lanes is None:
        assert isinstance(chosen, AlignedPartition)
    else:
        assert isinstance(chosen, LanePartition)
        assert chosen.lanes == list(range(-(-lanes // len(ranks))))
        # The lanes are those of the island with the most ranks, wherever they are counted.
        assert chosen.numel == sum(SIZES.values()) * len(chosen.lanes) // lanes


def cover(
    held: list[list[tuple[int, int]]], replicated: bool = False, sizes: list[dict[str, int]] | None = None
) -> None:
    shards = ListShards(SIZES, [], replicated)
    every = sizes or [SIZES] * len(held)
    answers = [{"sizes": mine, "intervals": intervals} for mine, intervals in zip(every, held, strict=True)]
    check_cover(shards, OneOfSeveral(0, answers))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 30])
@pytest.mark.parametrize("cut", get_args(Cut))
def test_every_way_to_cut_covers_the_model(cut: Cut, num_ranks: int) -> None:
    shards = [make_shards(SIZES, num_ranks, rank, cut) for rank in range(num_ranks)]
    cover([one.intervals() for one in shards], replicated=cut == "whole")


@pytest.mark.parametrize(
    ("held", "replicated", "message"),
    [
        pytest.param([[(0, 7)], [(7, 12)]], False, "no optimizer on this island trains bias: hand it", id="end"),
        pytest.param([[(0, 6)], [(7, 18)]], False, "no optimizer on this island trains embedding", id="gap"),
        pytest.param([[(1, 24)]], False, "no optimizer on this island trains embedding", id="start"),
        pytest.param([[], []], False, "no optimizer on this island trains embedding", id="nothing"),
        pytest.param(
            [[(0, 20)], [(19, 6)]], False, r"several ranks hold the same part of bias.*\(pieces\)", id="twice"
        ),
        pytest.param([[(0, 25)], [(0, 25)]], False, "several ranks hold the same part of embedding", id="replicated"),
        pytest.param([[(0, 25)], [(0, 24)]], True, "no optimizer on this island trains head", id="not replicated"),
    ],
)
def test_gaps_and_overlaps_are_refused(held: list[list[tuple[int, int]]], replicated: bool, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        cover(held, replicated)


def test_ranks_with_other_parameters_are_refused() -> None:
    whole = [(0, 25)]
    others = dict(reversed(SIZES.items()))
    with pytest.raises(UnsupportedError, match="the ranks of this island hold different parameters"):
        cover([whole, whole], replicated=True, sizes=[SIZES, others])


# What ranks tell each other


@pytest.mark.parametrize(
    "error",
    [
        DamagedTransferError([2, 1], is_sealed=True),
        DivergedError("averages differ", is_state_sound=True),
        ForgedError("not signed", 3),
        IslandLostError("gone", [1, 0]),
        PayloadError("cut short", "payloads/1"),
        StopRequested(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_one_rank_is_the_same_on_all(error: DiLoCoError) -> None:
    loaded = _load_error(json.loads(json.dumps(_dump_error(error))))
    assert (type(loaded), str(loaded), vars(loaded)) == (type(error), str(error), vars(error))
