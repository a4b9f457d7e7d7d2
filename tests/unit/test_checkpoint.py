"""Outer state on disk: cut in any way, read back in any other; spoilt files and interrupted writes are noticed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer import checkpoint as module
from hf_diloco.outer.checkpoint import (
    OuterIndex,
    OuterPart,
    complete_checkpoints,
    load_outer,
    read_index,
    save_outer,
    whole_checkpoints,
)
from hf_diloco.outer.manifest import write_record
from tests.outer_state import make_index
from tests.programs.shards_pieces import Cut, make_shards

Interval = tuple[int, int]
SIZES = {"embedding": 40, "weight": 33, "bias": 1, "head": 26}
TOTAL = sum(SIZES.values())


class ThreadIsland(IslandGroup):
    """One of several ranks that are threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self.group = None
        self._slots = slots
        self._barrier = barrier

    def gather(self, item: Any) -> list[Any]:
        self._slots[self.rank] = json.dumps(item)
        self._barrier.wait(60)
        items = [json.loads(slot) for slot in self._slots]
        self._barrier.wait(60)
        return items

    def from_leader(self, item: Any) -> Any:
        return self.gather(item)[0]

    def barrier(self) -> None:
        self.gather(None)


def intervals_of(cut: Cut, num_ranks: int) -> list[list[Interval]]:
    if cut == "whole":  # of replicated weights each rank owns a lane
        bounds = [TOTAL * rank // num_ranks for rank in range(num_ranks + 1)]
        return [[(bounds[rank], bounds[rank + 1] - bounds[rank])] for rank in range(num_ranks)]
    return [make_shards(SIZES, num_ranks, rank, cut).intervals() for rank in range(num_ranks)]


def index_at(step: int = 20) -> OuterIndex:
    return make_index(TOTAL, round=step // 10, global_step=step, settings={"sync_every": 10}, data={"steps": step})


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Outer state over the canonical index space."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(TOTAL, generator=generator) for name in ("anchor", "momentum")}


def take(state: dict[str, torch.Tensor], intervals: list[Interval]) -> dict[str, torch.Tensor]:
    empty = torch.empty(0)
    return {
        name: torch.cat([empty, *(whole[start : start + length] for start, length in intervals)])
        for name, whole in state.items()
    }


def save(
    path: Path, state: dict[str, torch.Tensor], cut: list[list[Interval]], step: int = 20, is_last: bool = True
) -> None:
    """Saves with as many ranks as the cut has parts."""
    slots, barrier = [None] * len(cut), threading.Barrier(len(cut))

    def one_rank(rank: int) -> None:
        island = ThreadIsland(rank, slots, barrier)
        try:
            part = OuterPart(take(state, cut[rank]), cut[rank])
            save_outer(path, island, [part], index_at(step), is_last)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(cut)) as pool:
        list(pool.map(one_rank, range(len(cut))))
    (path / "trainer_state.json").write_text("{}")  # the Trainer's own


def load(path: Path, intervals: list[Interval]) -> dict[str, torch.Tensor]:
    return load_outer(path, read_index(path), intervals)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].view(torch.int32), values.view(torch.int32)), name


# Cut in one way, read in another


@pytest.mark.parametrize("read_ranks", [1, 2, 3])
@pytest.mark.parametrize("read_cut", get_args(Cut))
@pytest.mark.parametrize("saved_ranks", [1, 2, 3])
@pytest.mark.parametrize("saved_cut", get_args(Cut))
def test_any_number_of_ranks_reads_what_any_wrote(
    tmp_path: Path, saved_cut: Cut, saved_ranks: int, read_cut: Cut, read_ranks: int
) -> None:
    state = make_state()
    state["anchor"][::7] = torch.tensor([float("nan"), -0.0, float("inf")]).repeat(5)  # bits, not values
    save(tmp_path, state, intervals_of(saved_cut, saved_ranks))
    for intervals in intervals_of(read_cut, read_ranks):
        assert_same(load(tmp_path, intervals), take(state, intervals))


def test_index_comes_back(tmp_path: Path) -> None:
    cut = intervals_of("flat", 2)
    save(tmp_path, make_state(), cut)
    index = read_index(tmp_path)
    assert index.model_dump(exclude={"files", "checkpoint"}) == index_at().model_dump(exclude={"files", "checkpoint"})
    assert [file.name for file in index.files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [file.intervals for file in index.files] == cut
    assert sorted(path.name for path in (tmp_path / "diloco").iterdir()) == [
        "outer.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_a_rank_without_values_has_empty_state(tmp_path: Path) -> None:
    save(tmp_path, make_state(), [[(0, TOTAL)], []])
    assert_same(load(tmp_path, []), {"anchor": torch.empty(0), "momentum": torch.empty(0)})
    save(tmp_path / "one", make_state(), [[(0, TOTAL)]])
    assert_same(load(tmp_path / "one", []), {"anchor": torch.empty(0), "momentum": torch.empty(0)})


def test_loaded_state_does_not_hang_on_the_file(tmp_path: Path) -> None:
    """Older checkpoints are deleted while the run goes on, and others may be written in their place."""
    state, cut = make_state(), intervals_of("flat", 1)
    save(tmp_path, state, cut)
    loaded = load(tmp_path, cut[0])
    path = tmp_path / "diloco" / "rank-00000.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert_same(loaded, take(state, cut[0]))


runs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=6).map(
    # Disjoint, in any order: gaps and lengths, laid out one after the other, then shuffled by their gaps.
    lambda pairs: sorted(
        (
            (sum(gap + length for gap, length in pairs[:number]) + gap, length)
            for number, (gap, length) in enumerate(pairs)
        ),
        key=lambda interval: interval[0] % 5,
    )
)


@given(runs, runs)
def test_matches_are_what_counting_finds(stored: list[Interval], wanted: list[Interval]) -> None:
    def positions(intervals: list[Interval]) -> dict[int, int]:
        flat = chain.from_iterable(range(start, start + length) for start, length in intervals)
        return {index: position for position, index in enumerate(flat)}

    source, target = positions(stored), positions(wanted)
    counted = sorted((source[index], target[index]) for index in source.keys() & target.keys())
    matches = module.match_intervals(stored, wanted)
    assert sorted((s + step, t + step) for s, t, length in matches for step in range(length)) == counted


# Spoilt files


def first_file(folder: Path) -> Path:
    return folder / "rank-00000.safetensors"


def flip(offset: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = bytearray(first_file(folder).read_bytes())
        data[offset] ^= 1
        first_file(folder).write_bytes(data)

    return spoil


def cut_short(folder: Path) -> None:
    data = first_file(folder).read_bytes()
    first_file(folder).write_bytes(data[:-1])


def zeroed(folder: Path) -> None:
    first_file(folder).write_bytes(bytes(first_file(folder).stat().st_size))


def of_another_run(folder: Path) -> None:
    """A sound file of equal size, with other values."""
    size = first_file(folder).stat().st_size
    save_file(take(make_state(seed=1), json.loads(index_text(folder))["files"][0]["intervals"]), first_file(folder))
    assert first_file(folder).stat().st_size == size


def swapped(folder: Path) -> None:
    first, second = first_file(folder), folder / "rank-00001.safetensors"
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)


def index_text(folder: Path) -> str:
    return (folder / "outer.json").read_text()


class AnyIndex(BaseModel):
    model_config = ConfigDict(extra="allow")


def change_index(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = {**json.loads(index_text(folder)), **changes}
        del index["own_digest"]
        write_record(folder / "outer.json", AnyIndex(**index))

    return spoil


def remove_digest(folder: Path) -> None:
    index = json.loads(index_text(folder))
    del index["own_digest"]
    (folder / "outer.json").write_text(json.dumps(index))


def half_index(folder: Path) -> None:
    text = index_text(folder)
    (folder / "outer.json").write_text(text[: len(text) // 2])


def no_utf8(folder: Path) -> None:
    (folder / "outer.json").write_bytes(b"\xff" + (folder / "outer.json").read_bytes()[1:])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("same_cut", [True, False], ids=["same cut", "other cut"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            flip(-1), "rank-00000.safetensors does not hold what was written to it: resume from", id="last bit"
        ),
        pytest.param(flip(-300), "rank-00000.safetensors does not hold what was written to it", id="a bit"),
        pytest.param(flip(8), "rank-00000.safetensors cannot be read .*: resume from an earlier", id="file's header"),
        pytest.param(cut_short, "rank-00000.safetensors is missing or cut short: resume from", id="cut short"),
        pytest.param(remove("rank-00001.safetensors"), "rank-00001.safetensors is missing or cut short", id="missing"),
        pytest.param(zeroed, "rank-00000.safetensors cannot be read .*: resume from an earlier", id="zeros"),
        pytest.param(of_another_run, "rank-00000.safetensors does not hold what was written", id="another run's"),
        pytest.param(swapped, "rank-0000[01].safetensors does not hold what was written", id="swapped"),
        pytest.param(remove("outer.json"), "has no outer state .*outer.json is missing.*killed while", id="no index"),
        pytest.param(half_index, "outer.json does not hold what was written to it", id="half an index"),
        pytest.param(remove_digest, "or an earlier version of hf_diloco wrote it: resume from", id="no digest"),
        pytest.param(no_utf8, r"outer.json cannot be read \(UnicodeDecodeError\): resume from", id="no text"),
        pytest.param(change_index(format=4), "has format 4, and this version of hf_diloco reads 5", id="other format"),
        pytest.param(change_index(extra=1), r"outer.json cannot be read \(ValidationError\)", id="unknown key"),
        pytest.param(change_index(files=[]), r"holds 0 of the \d+ outer values that this rank needs", id="no files"),
    ],
)
def test_spoilt_checkpoints_are_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, same_cut: bool
) -> None:
    cut = intervals_of("flat", 2)
    save(tmp_path, make_state(), cut)
    wanted = cut[0] if same_cut and spoil is not swapped else [(0, TOTAL)]
    load(tmp_path, wanted)
    spoil(tmp_path / "diloco")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, wanted)


def test_state_of_a_smaller_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_state(), intervals_of("flat", 2))
    with pytest.raises(CheckpointError, match=r"holds 100 of the 101 outer values .*: it belongs to another model"):
        load(tmp_path, [(0, TOTAL + 1)])


# Interrupted writes


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """The process ends at the `call`-th time that `function` is reached in the module."""
    real = getattr(os, function)
    reached = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal reached
        reached += 1
        if reached == call:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, wrapped)


# In the order in which they are reached: the temporary file is on disk; it gets its name; so does the index.
MOMENTS = [("fsync", 1), ("replace", 1), ("fsync", 2), ("replace", 2)]


@pytest.mark.parametrize(("function", "call"), MOMENTS)
def test_a_new_checkpoint_that_was_interrupted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    older, newer = tmp_path / "checkpoint-10", tmp_path / "checkpoint-20"
    cut = intervals_of("flat", 1)
    save(older, make_state(), cut, step=10)
    newer.mkdir()
    (newer / "trainer_state.json").write_text("{}")  # the Trainer had finished its part
    killed_at(call, monkeypatch, function)
    with pytest.raises(Killed):
        save(newer, make_state(1), cut)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"outer\.json is missing"):
        read_index(newer)
    assert [path for path, _ in complete_checkpoints(tmp_path)] == [older]
    save(newer, make_state(1), cut)  # and writing it again mends it
    assert [path for path, _ in complete_checkpoints(tmp_path)] == [older, newer]
    assert_same(load(newer, cut[0]), take(make_state(1), cut[0]))


@pytest.mark.parametrize(("function", "call"), MOMENTS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_interrupted_overwriting_leaves_the_old_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int, num_ranks: int
) -> None:
    path = tmp_path / "checkpoint-20"
    cut = intervals_of("each", num_ranks)
    save(path, make_state(), cut)
    killed_at(call, monkeypatch, function)
    with pytest.raises((Killed, threading.BrokenBarrierError)):
        save(path, make_state(1), cut)
    monkeypatch.undo()
    for whole, _ in complete_checkpoints(tmp_path):
        for intervals in cut:
            assert_same(load(whole, intervals), take(make_state(), intervals))
    if num_ranks == 1:
        assert bool(complete_checkpoints(tmp_path)) == ((function, call) == ("fsync", 1))


def test_complete_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    for step in (100, 20, 9):
        save(tmp_path / f"checkpoint-{step}", make_state(), intervals_of("flat", 1), step, is_last=step != 20)
    (tmp_path / "checkpoint-20" / "trainer_state.json").unlink()  # the Trainer's part is missing
    (tmp_path / "checkpoint-x").mkdir()
    assert [index.global_step for _, index in complete_checkpoints(tmp_path)] == [9, 100]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_a_link_without_a_step_in_its_name_does_not_end_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named, newest = tmp_path / "checkpoint-20", tmp_path / "checkpoint-latest"
    save(named, make_state(), intervals_of("flat", 1), 20)
    save(tmp_path / "best", make_state(), intervals_of("flat", 1), 30)
    newest.symlink_to(tmp_path / "best", target_is_directory=True)
    (tmp_path / "checkpoint-40").mkdir()
    assert [path for path, _ in whole_checkpoints(tmp_path, IslandGroup())] == [named, newest]
    assert "checkpoint-40 is skipped" in caplog.text
