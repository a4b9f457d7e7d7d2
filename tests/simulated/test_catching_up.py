"""Islands that come late or come back, where what they need is gone or damaged; and islands that stop or end."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_diloco.errors import (
    DivergedError,
    IslandLostError,
    MissedRoundError,
    PayloadError,
    StopRequested,
    StoreError,
)
from hf_diloco.membership.member_records import IncarnationRecord, incarnation_path
from hf_diloco.membership.round_records import SnapshotRecord
from hf_diloco.membership.run import open_run
from hf_diloco.rounds.joining import Joining
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.transport.bucket import BucketExchange
from tests.clocks import LONG, FastClock
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting, Member
from tests.streaming_meetings import Streams, train_all

pytestmark = pytest.mark.usefixtures("fast_clock")

STARTS = ["start.json", *(f"start-{number}.json" for number in range(2, 10))]


def log_of(meeting: Meeting) -> RunLog:
    return open_run(ObjectStore(meeting.url), b"")[1]


def has(meeting: Meeting, path: str) -> bool:
    """Whether there is a record already."""
    return ObjectStore(meeting.url).get(path, 1 << 20) is not None


def delete(log: RunLog, folder: str) -> None:
    log.store.delete(log.list(folder))


def damage(log: RunLog, *paths: str) -> None:
    for path in paths:
        log.store.put(path, b"")


# Snapshots


def test_snapshots_that_are_not_whole_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank's part is missing, or is of another snapshot; or nothing is in it."""
    meeting = Meeting(tmp_path, 1, max_islands=2, snapshot_every=2)
    first = meeting.island(0).train_to(2)
    first.session.close()
    log = log_of(meeting)

    def put(number: int, rank: int, state: str, num_ranks: int = 2) -> None:
        record = SnapshotRecord(round=number, rank=rank, num_ranks=num_ranks, state=state, tensors={})
        log.put(f"snapshots/{number:08d}/00000-000001/rank-{rank:05d}.json", record)

    put(9, 1, "ab")
    put(8, 0, "ab")
    put(8, 1, "cd")
    put(7, 0, "ab", num_ranks=1)
    assert meeting.island(1, seed=5).hash == first.hash
    assert "the parts of the snapshot snapshots/00000008/00000-000001 do not belong together" in caplog.text
    assert "the snapshot snapshots/00000007/00000-000001 is skipped: the snapshot" in caplog.text


def test_a_snapshot_of_other_outer_parameters_than_it_says_ends_who_reads_it(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2, snapshot_every=2)
    meeting.island(0).train_to(2).session.close()
    log = log_of(meeting)
    path = "snapshots/00000002/00000-000001/rank-00000.json"
    record = log.read(path, SnapshotRecord)
    assert record is not None
    log.put(path, record.model_copy(update={"state": "ab" * 32}))
    with pytest.raises(DivergedError, match=r"does not hold the outer parameters that it announces .*abababababab"):
        meeting.island(1, seed=5)


def test_nobody_begins_from_a_snapshot_that_is_gone_with_who_wrote_it(tmp_path: Path, fast_clock: FastClock) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2)
    meeting.island(0).train_to(1).die()
    delete(log_of(meeting), "snapshots")
    with pytest.raises(PayloadError, match="the snapshot snapshots/00000000/00000-000001 is gone: start again"):
        meeting.island(1, seed=5)


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000-anchor.bin"])
def test_who_joins_waits_for_a_newer_snapshot_than_a_damaged_start(
    tmp_path: Path, name: str, fast_clock: FastClock
) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2, snapshot_every=2)
    first = meeting.island(0)
    damage(log_of(meeting), f"snapshots/00000000/00000-000001/{name}")

    def go_on(island: int) -> Member:
        return meeting.island(1, seed=5) if island else first.train_to(2).leave()

    assert run_islands(2, go_on)[1].hash == first.hash


def test_a_start_that_is_damaged_before_all_have_joined_is_written_again(
    tmp_path: Path, fast_clock: FastClock
) -> None:
    meeting = Meeting(tmp_path, 2)

    def begin(island: int) -> Member:
        while island and not has(meeting, "start.json"):
            fast_clock.sleep(0.1)
        if island:
            damage(log_of(meeting), "snapshots/00000000/00000-000001/rank-00000.json")
        return meeting.island(island, seed=island).train_to(1)

    first, second = run_islands(2, begin)
    assert (first.missed, second.hash) == (0, first.hash)


def test_a_start_whose_values_are_damaged_is_written_again_where_no_round_takes_place_without_who_joins(
    tmp_path: Path, fast_clock: FastClock
) -> None:
    meeting = Meeting(tmp_path, 2)
    values = "snapshots/00000000/00000-000001/rank-00000-anchor.bin"

    def begin(island: int) -> Member:
        while island and not has(meeting, "start.json"):
            fast_clock.sleep(0.1)
        if island:
            store = ObjectStore(meeting.url)
            first, *others = store.get(values, 1 << 20) or b""
            store.put(values, bytes([first ^ 1, *others]))
        return meeting.island(island, seed=island).train_to(2)

    first, second = run_islands(2, begin)
    assert first.missed
    assert (second.reports[0].participants, second.hash) == ([0, 1], first.hash)


@pytest.mark.parametrize(("newcomer", "is_alone"), [(1, False), (1, True), (0, True)])
def test_who_joins_where_the_record_of_the_start_is_gone_takes_the_newest_snapshot(
    tmp_path: Path, newcomer: int, is_alone: bool
) -> None:
    """As a rule of the bucket that deletes old objects does to a long run. Island 0 has begun it."""
    meeting = Meeting(tmp_path, 1, max_islands=2, snapshot_every=2)
    first = meeting.island(0).train_to(4)
    first.session.rounds.archive.snapshots.wait()
    if is_alone:
        first.leave(finished=False)
    log_of(meeting).store.delete(["start.json"])
    assert meeting.island(newcomer, seed=5).hash == first.hash
    assert has(meeting, "start.json")


def test_islands_begin_where_lists_lag_behind_what_was_written(
    tmp_path: Path, fast_clock: FastClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a network file system that caches folders do."""
    list_all, seen = ObjectStore.list, dict[str, float]()

    def list_late(store: ObjectStore, prefix: str = "") -> list[tuple[str, int]]:
        found, now = list_all(store, prefix), fast_clock.now()
        return [entry for entry in found if now - seen.setdefault(entry[0], now) >= 4.0]

    monkeypatch.setattr(ObjectStore, "list", list_late)
    meeting = Meeting(tmp_path, 2, sync_timeout=60.0, join_timeout=60.0, grace=20.0)
    islands = run_islands(2, lambda island: meeting.island(island, seed=island).train_to(2))
    assert islands[0].hash == islands[1].hash
    assert [report.participants for report in islands[0].reports] == [[0, 1]] * 2


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000-anchor.bin"])
def test_a_damaged_start_is_written_again_by_its_islands_next_process(
    tmp_path: Path, name: str, fast_clock: FastClock
) -> None:
    """Both are killed before the first round, and only the one that wrote the start has a checkpoint."""
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island, seed=island))
    checkpoint, start = islands[0].save(tmp_path / "checkpoint"), islands[0].hash
    for island in islands:
        island.die()
    log = log_of(meeting)
    damage(log, f"snapshots/00000000/00000-000001/{name}")
    log.store.put("snapshots/00000000/00000-000001/rank-00001.json", b"{}")  # it may have had more ranks

    def begin(island: int) -> Member:
        while island and not has(meeting, "heartbeats/0/000002.json"):
            fast_clock.sleep(0.1)
        return meeting.island(island, seed=island, checkpoint=None if island else checkpoint).train_to(1)

    first, second = run_islands(2, begin)
    assert (second.reports[0].participants, second.hash) == ([0, 1], first.hash)
    assert start != first.hash


@pytest.mark.parametrize("engine", ENGINES)
def test_who_cannot_catch_up_gets_a_snapshot_from_who_waits_for_it(
    tmp_path: Path, engine: str, fast_clock: FastClock
) -> None:
    """Two that need each other: there is no round without the other, and so no snapshot of a later one."""
    meeting = Meeting(tmp_path, 2, snapshot_every=100, exchange_timeout=3.0, **ENGINES[engine])
    islands = run_islands(2, lambda island: meeting.island(island).train_to(1))
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    run_islands(2, lambda island: islands[island].train_to(3))
    islands[1].die()
    delete(log_of(meeting), "payloads")

    def go_on(island: int) -> Member:
        back = meeting.island(1, checkpoint=checkpoint) if island else islands[0]
        while back.session.outer.round < 4:
            back.train(1)
            fast_clock.sleep(0.1)
        return back

    first, second = run_islands(2, go_on)
    assert second.hash == first.hash
    assert log_of(meeting).list("snapshots/00000003")


def test_where_the_start_is_damaged_for_good_the_newest_snapshot_takes_its_place(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=3, snapshot_every=2)
    first = meeting.island(0).train_to(2)
    first.session.close()
    log = log_of(meeting)
    damage(log, *STARTS)
    second = meeting.island(1, seed=5)
    assert second.hash == first.hash
    delete(log, "snapshots")
    first.die()
    second.leave(finished=False)
    with pytest.raises(StoreError, match=r"all start\.json are damaged: keep others away"):
        meeting.island(2, seed=6)


def test_each_rank_writes_its_part_of_a_snapshot_and_the_first_clears_up() -> None:
    log = RunLog(ObjectStore(f"memory://{os.urandom(8).hex()}"), Seal(b"", "run"))
    log.create(incarnation_path(0, 1), IncarnationRecord(host="", machine="", pid=1, folder=""))
    log.store.put("payloads/00000003/00000-000001-0/rank-00000.bin", b"old")
    ranks = [Snapshots(log, [BucketExchange(log.store, 4 * rank, 4)], "00000-000001", rank, 2) for rank in (0, 1)]

    def write(rank: int, number: int) -> None:
        ranks[rank].write_behind(number, "ab", [{"anchor": torch.full((4,), float(rank))}], keep_rounds=0)
        ranks[rank].wait()

    write(0, 4)
    assert ranks[0].newest() is None
    assert log.list("payloads"), "nothing is to be spared before a snapshot is whole"
    write(1, 4)
    found = ranks[0].newest()
    assert found is not None
    assert [ranks[rank].fetch(found)[0]["anchor"].tolist() for rank in (0, 1)] == [[0.0] * 4, [1.0] * 4]
    assert log.list("payloads")
    write(0, 5)
    assert not log.list("payloads")


# Rounds of which something is gone


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_back", [False, True])
def test_who_finds_neither_values_nor_a_snapshot_is_told_or_waits(tmp_path: Path, engine: str, is_back: bool) -> None:
    """A later snapshot may yet come."""
    settings: dict[str, Any] = {"snapshot_every": 100, "exchange_timeout": 3.0, **ENGINES[engine]}
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, **settings)
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    checkpoint = late.save(tmp_path / "checkpoint")
    number = late.session.outer.round + 1
    if is_back:
        late.die()
    first.train_to(number)
    first.session.close()
    delete(log_of(meeting), "payloads")

    def go_on() -> None:
        if is_back:
            meeting.island(1, checkpoint=checkpoint, join_timeout=5.0)
        else:
            late.sync()

    if is_back:
        with pytest.raises(StopRequested):
            meeting.island(1, checkpoint=checkpoint, should_stop=lambda: True)
        with pytest.raises(IslandLostError, match=rf"payloads/{number:08d}.* stop all, and start them with an empty"):
            go_on()
    else:
        go_on()
        assert (late.missed, late.session.outer.round) == (1, number - 1)


def test_a_missed_round_names_who_may_still_hold_its_average(tmp_path: Path, fast_clock: FastClock) -> None:
    settings: dict[str, Any] = {"snapshot_every": 100, "exchange_timeout": 3.0, **ENGINES["mesh"]}
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, **settings)
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    number = late.session.outer.round + 1
    first.train_to(number)
    first.session.close()
    delete(log_of(meeting), f"rounds/{number:08d}/00/mean")
    with pytest.raises(MissedRoundError, match=rf"the average of round {number}, taken by island 0, is not in"):
        late.session.sync()


def test_who_needs_what_only_a_lost_island_holds_ends_after_a_while(tmp_path: Path) -> None:
    """Else it would train alone for ever, and wait in each round for what does not come."""
    meeting = Meeting(tmp_path, 2, snapshot_every=100, exchange_timeout=3.0, **ENGINES["mesh"])
    holder, left = run_islands(2, lambda island: meeting.island(island).train(2))
    holder.session.rounds.archive.engines[0].on_outcome = lambda *_: None  # type: ignore[method-assign]
    left.session.rounds.apply_outcome = Mock(side_effect=StoreError("the store is down"))  # type: ignore[method-assign]
    run_islands(2, lambda island: (holder, left)[island].train(2))
    assert (holder.session.outer.round, left.session.outer.round) == (2, 1)
    del left.session.rounds.apply_outcome
    for _ in range(8):  # longer than join_timeout
        left.train(2)
    assert left.missed == 9, "the other is there, and holds it"
    holder.die()

    def train_on() -> None:
        for _ in range(100):
            left.step()
            with suppress(MissedRoundError):
                left.session.advance()  # as the callback does

    with pytest.raises(IslandLostError, match=r"average of round 2.* within 20 s \(join_timeout\).*: start all\."):
        train_on()


def test_an_average_whose_record_makes_no_sense_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has the seal of the run, so one of its islands wrote it, perhaps of another version."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=100, **ENGINES["mesh"])
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    number = late.session.outer.round + 1
    first.train_to(number)
    first.session.rounds.wait_for_uploads()
    log, path = log_of(meeting), f"rounds/{number:08d}/00/mean/rank-00000.json"
    log.store.put(path, log.seal.wrap(path, {"rank": 0, "num_ranks": 1, "object": {}}))
    first.session.rounds.archive.rescue_average()
    assert f"{path} is no MeanRecord of this version" in caplog.text
    late.sync()
    assert late.hash == first.hash


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_round_is_missed_until_there_is_a_snapshot(tmp_path: Path, engine: str) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=4, **ENGINES[engine])
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    number = late.session.outer.round + 1
    first.train_to(number)
    damage(log_of(meeting), f"rounds/{number:08d}/00/plan.json")
    late.sync()
    assert (late.missed, late.session.outer.round) == (1, number - 1)
    first.train_to(4)
    first.session.close()
    late.train_to(4)
    assert late.hash == first.hash


@pytest.mark.parametrize("engine", ENGINES)
def test_who_comes_back_passes_over_a_round_whose_outcome_is_damaged(
    tmp_path: Path, engine: str, fast_clock: FastClock
) -> None:
    """A later snapshot shows that it was committed, though nobody is left who could say so."""
    settings: dict[str, Any] = {"snapshot_every": 1, "min_islands": 1, **ENGINES[engine]}
    meeting = Meeting(tmp_path, 2, **settings)
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    checkpoint = late.save(tmp_path / "checkpoint")
    run_islands(2, lambda island: (first, late)[island].train_to(2))
    late.die()
    first.train_to(4)
    first.session.close()
    damage(log_of(meeting), "rounds/00000002/00/outcome.json")
    assert meeting.island(1, checkpoint=checkpoint).hash == first.hash


@pytest.mark.parametrize("fragments", [{}, {"sync_every": 8, "num_fragments": 4}], ids=["whole", "fragments"])
def test_progress_that_a_damaged_round_may_have_used_is_not_brought_again(
    tmp_path: Path, fragments: dict[str, Any]
) -> None:
    """By an island that comes back from a checkpoint: its last process may have offered what that holds."""
    meeting = Streams(tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=1, **fragments)
    islands = train_all(meeting.join_all(), 3)
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    number = islands[1].session.outer.round + 1
    numbers = range(len(islands[1].session.outer.fragments))
    assert any(islands[1].progress_of(one).any() for one in numbers)
    islands[1].die()
    islands[0].stream_to(number + 4)
    islands[0].session.close()
    damage(log_of(meeting), f"rounds/{number:08d}/00/plan.json")
    again = meeting.join(1, checkpoint)
    assert again.hash == islands[0].hash
    assert not any(again.progress_of(one).any() for one in numbers)


# Islands that are asked to stop before they train


def test_who_is_asked_to_stop_does_not_wait_for_the_others_to_begin(tmp_path: Path) -> None:
    with pytest.raises(StopRequested):
        Meeting(tmp_path, 2).island(0, should_stop=lambda: True)


def test_who_is_asked_to_stop_does_not_wait_for_the_first_ones_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(tmp_path, 2)
    is_there, may_go_on = threading.Event(), threading.Event()
    take_state = Joining.take_state

    def take_late(self: Joining, *args: Any, **kwargs: Any) -> bool:
        if self.config.island == 0:
            is_there.set()
            assert may_go_on.wait(60)
        return take_state(self, *args, **kwargs)

    monkeypatch.setattr(Joining, "take_state", take_late)

    def run(island: int) -> None:
        if island == 0:
            with pytest.raises(StopRequested):
                meeting.island(0, should_stop=may_go_on.is_set)
            return
        assert is_there.wait(60)
        with pytest.raises(StopRequested):
            meeting.island(1, should_stop=lambda: True)
        may_go_on.set()

    run_islands(2, run)


def test_who_is_asked_to_stop_does_not_wait_for_a_round_to_pass(tmp_path: Path, fast_clock: FastClock) -> None:
    """That others are about to take."""
    meeting = Meeting(tmp_path, 2, max_islands=3, grace=30.0, sync_timeout=60.0)
    first, second = run_islands(2, lambda island: meeting.island(island).train(2))
    second.step()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(first.train, 2)
        fast_clock.sleep(1.5)
        with pytest.raises(StopRequested):
            meeting.island(2, seed=7, should_stop=lambda: True)
        second.train(1)
        early.result()
    assert [member.reports[-1].participants for member in (first, second)] == [[0, 1], [0, 1]]


# The island that keeps the store


def test_island_0_keeps_the_store_until_the_others_have_ended(tmp_path: Path, free_port: int) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, max_islands=3, grace=0.1, bind_address="127.0.0.1")
    meeting.url = f"tcp://127.0.0.1:{free_port}"
    keeper, other = run_islands(2, lambda island: meeting.island(island).train(2))
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(keeper.leave)
        other.train_to(other.session.outer.round + 2)
        assert not leaving.done()
        other.leave()
        leaving.result(LONG)
    socket.create_server(("127.0.0.1", free_port)).close()


def test_island_0_comes_back_for_who_missed_the_end(tmp_path: Path, free_port: int) -> None:
    settings: dict[str, Any] = {"min_islands": 1, "max_islands": 3, "grace": 0.1, "bind_address": "127.0.0.1"}
    meeting = Meeting(tmp_path, 2, num_rounds=2, **settings)
    meeting.url = f"tcp://127.0.0.1:{free_port}"
    keeper, other = run_islands(2, lambda island: meeting.island(island).train(2))
    other.leave(finished=False)
    checkpoint = keeper.train(2).save(tmp_path / "checkpoint")
    keeper.leave()
    again = meeting.island(0, checkpoint=checkpoint)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(again.leave)
        with pytest.raises(TimeoutError):
            leaving.result(1)
        late = meeting.island(1)
        assert late.session.is_over
        late.leave()
        leaving.result(LONG)
    assert late.hash == keeper.hash


def test_who_misses_a_round_without_island_0_is_not_asked_for_a_server(tmp_path: Path, free_port: int) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, bind_address="127.0.0.1", exchange_timeout=1.0)
    meeting.url = f"tcp://127.0.0.1:{free_port}"
    keeper, other = run_islands(2, lambda island: meeting.island(island).train(2))
    keeper.leave(finished=False)
    for _ in range(2):
        other.step()
    with pytest.raises(MissedRoundError, match=r"round 2 is missed, .*: the process that hosts it has ended"):
        other.session.sync()
    other.die()
