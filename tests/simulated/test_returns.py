"""Islands that come back to a store of another age: it was put back from a copy, or is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_diloco.errors import CheckpointError, ExchangeError
from hf_diloco.store.objects import ObjectStore
from tests.clocks import wait_until
from tests.islands import run_islands
from tests.meetings import Meeting, Member

pytestmark = pytest.mark.usefixtures("fast_clock")


def contents_of(meeting: Meeting) -> dict[str, bytes]:
    store = ObjectStore(meeting.url)
    return {path: store.get(path, 1 << 30) or b"" for path, _ in store.list()}


def put_back(meeting: Meeting, contents: Mapping[str, bytes]) -> None:
    """The store's contents of an earlier time take the place of those that are there."""
    store = ObjectStore(meeting.url)
    store.delete([path for path, _ in store.list() if path not in contents])
    for path, data in contents.items():
        store.put(path, data)


class Lives(NamedTuple):
    """Two islands after four rounds, and what there was after two of them."""

    meeting: Meeting
    islands: list[Member]
    earlier: list[Path]
    contents: dict[str, bytes]

    def end(self, island: int) -> None:
        self.islands[island].session.close()  # nothing of it is on its way into the store
        self.islands[island].die()


def live(folder: Path, min_islands: int) -> Lives:
    meeting = Meeting(folder, 2, min_islands=min_islands, grace=1.0, snapshot_every=2, join_timeout=2.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(4))
    for member in islands:
        member.session.rounds.archive.snapshots.wait()
    earlier = [member.save(folder / f"earlier-{member.number}") for member in islands]
    contents = contents_of(meeting)
    run_islands(2, lambda island: islands[island].train(4))
    return Lives(meeting, islands, earlier, contents)


@pytest.mark.parametrize("min_islands", [1, 2])
def test_a_round_that_others_have_completed_is_not_planned_again_where_the_store_has_lost_it(
    tmp_path: Path, min_islands: int
) -> None:
    """Island 0 and the store are put back from a copy, while island 1 goes on."""
    meeting, islands, earlier, contents = lives = live(tmp_path, min_islands)
    lives.end(0)
    put_back(meeting, contents)
    islands[1].session.members.heartbeat()  # type: ignore[union-attr]

    def go_on(island: int) -> Member:
        member = islands[1] if island else meeting.island(0, checkpoint=earlier[0], join_timeout=20.0)
        return member.train_to(8)

    first, second = run_islands(2, go_on)
    assert all(report.round > 4 for report in first.reports)
    assert (first.session.outer.round, first.hash) == (8, second.hash)


def test_a_checkpoint_that_is_newer_than_the_store_is_refused(tmp_path: Path) -> None:
    """Its island would plan rounds that others take from an older state."""
    meeting, islands, _, contents = lives = live(tmp_path, 1)
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    for island in (0, 1):
        lives.end(island)
    put_back(meeting, contents)
    with pytest.raises(CheckpointError, match=r"round 4 differs from .* at memory://.* restored from a copy"):
        meeting.island(1, checkpoint=checkpoint)


@pytest.mark.parametrize("round_number", [4, 5, 6])
def test_a_checkpoint_of_a_round_that_the_others_took_otherwise_is_refused(tmp_path: Path, round_number: int) -> None:
    """Island 0 and the store were put back from a copy, and have gone on since."""
    meeting, islands, earlier, contents = lives = live(tmp_path, 1)
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    for island in (0, 1):
        lives.end(island)
    put_back(meeting, contents)
    other = meeting.island(0, checkpoint=earlier[0]).train_to(round_number)
    other.session.close()
    other.die()
    with pytest.raises(CheckpointError, match="round 4 differs from that of the run"):
        meeting.island(1, checkpoint=checkpoint)
    again = meeting.island(1, checkpoint=earlier[1])
    assert (again.session.outer.round, again.hash) == (round_number, other.hash)


@pytest.mark.parametrize("of_island", [0, 1])
@pytest.mark.parametrize("min_islands", [1, 2])
def test_an_island_ends_where_another_run_has_taken_the_place_of_its_own(
    tmp_path: Path, min_islands: int, of_island: int
) -> None:
    """Island 0 has lost the store, and goes on from a checkpoint; started again, island 1 does so with it."""
    meeting, islands, earlier, _ = lives = live(tmp_path, min_islands)
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    lives.end(0)
    put_back(meeting, {})

    def go_on(island: int) -> Member:
        if island == 0:
            return meeting.island(0, checkpoint=earlier[of_island], join_timeout=60.0).train_to(4)
        wait_until(lambda: ObjectStore(meeting.url).get("start.json", 1 << 20) is not None, "another run")
        with pytest.raises(ExchangeError, match="has lost this run, and island 0 has begun another one there"):
            islands[1].train(2)
        lives.end(1)
        return meeting.island(1, checkpoint=checkpoint).train_to(4)

    first, second = run_islands(2, go_on)
    assert (first.session.outer.round, first.hash) == (4, second.hash)


def test_an_island_of_a_run_that_is_lost_decides_nothing_in_the_one_that_took_its_place(tmp_path: Path) -> None:
    """Not even where that has come to the same round."""
    meeting, islands, earlier, _ = lives = live(tmp_path, 1)
    lives.end(0)
    islands[1].session.members.stop_heartbeats()  # type: ignore[union-attr]  # one would be there before the new run
    put_back(meeting, {})
    meeting.island(0, checkpoint=earlier[0]).train_to(5).session.close()

    def records() -> dict[str, bytes]:
        return {path: data for path, data in contents_of(meeting).items() if path.startswith("rounds/")}

    before = records()
    with pytest.raises(ExchangeError, match="has lost this run"):
        islands[1].train(2)
    islands[1].leave(finished=False)
    assert records() == before
