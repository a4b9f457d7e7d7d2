"""Objects that should not be in a run's store, and such that should and are gone or damaged: the run goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.errors import ForgedError, PayloadError, RendezvousError, StoreError
from hf_diloco.membership.decisions import MAX_ATTEMPTS, Decisions
from hf_diloco.membership.round_records import OutcomeRecord, Participant, PlanRecord, VoteRecord
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from tests.clocks import FastClock, StillClock
from tests.islands import run_islands
from tests.meetings import Meeting
from tests.rubbish import throw

pytestmark = pytest.mark.usefixtures("fast_clock")

# Decisions that are damaged after somebody has acted on them

ATTEMPT, NEXT = "rounds/00000001/00", "rounds/00000001/01"
PLAN = PlanRecord(by=0, state="00", participants=[Participant(offer="x", island=0, weight=1.0, norm=1.0)])
COMMIT = OutcomeRecord(by=0, kind="commit", mean="ab")


@pytest.fixture
def log() -> RunLog:
    log = RunLog(ObjectStore(f"memory://{os.urandom(8).hex()}"), Seal(b"", "run"))
    log.create(f"{ATTEMPT}/plan.json", PLAN)
    return log


def decisions(log: RunLog, island: int = 0) -> Decisions:
    return Decisions(log, island, StillClock())


def vote(log: RunLog, attempt: str, island: int) -> None:
    log.create(f"{attempt}/votes/{island:05d}.json", VoteRecord(island=island, mean="ab"))


def abort(by: int = 0, reason: str = "lost") -> OutcomeRecord:
    return OutcomeRecord(by=by, kind="abort", reason=reason)


def damage(log: RunLog, *paths: str) -> None:
    for path in paths:
        log.store.put(path, b"")


def test_where_nobody_has_voted_nobody_can_have_committed(log: RunLog) -> None:
    damage(log, f"{ATTEMPT}/outcome.json")
    assert decisions(log).outcome(ATTEMPT) is None
    assert decisions(log, 0).decide(ATTEMPT, abort()).kind == "abort"
    vote(log, ATTEMPT, 1)
    assert decisions(log, 1).decide(ATTEMPT, COMMIT) == abort()


def test_who_has_heard_the_votes_commits_before_the_store_has_them(log: RunLog) -> None:
    """Islands of fixed membership tell each other directly."""
    damage(log, f"{ATTEMPT}/outcome.json")
    assert decisions(log, 0).decide(ATTEMPT, COMMIT) == COMMIT
    assert decisions(log, 1).decide(ATTEMPT, COMMIT.model_copy(update={"by": 1})) == COMMIT


def test_a_commit_that_was_acted_on_stays_one(log: RunLog) -> None:
    vote(log, ATTEMPT, 0)
    assert decisions(log, 0).decide(ATTEMPT, COMMIT) == COMMIT
    damage(log, f"{ATTEMPT}/outcome.json")
    with pytest.raises(PayloadError, match="an island that has voted for the average may have committed it"):
        decisions(log, 1).decide(ATTEMPT, abort(by=1))
    vote(log, ATTEMPT, 1)
    assert decisions(log, 1).decide(ATTEMPT, COMMIT) == COMMIT
    assert decisions(log, 1).outcome(ATTEMPT) == COMMIT


def test_who_has_read_an_abort_that_becomes_a_commit_comes_back(log: RunLog) -> None:
    """Island 0 reads the abort, and is about to plan the next attempt, when the record is damaged."""
    vote(log, ATTEMPT, 1)
    assert decisions(log, 0).decide(ATTEMPT, abort()).kind == "abort"
    damage(log, f"{ATTEMPT}/outcome.json")
    assert decisions(log, 1).decide(ATTEMPT, COMMIT) == COMMIT
    log.create(f"{NEXT}/plan.json", PLAN)
    vote(log, NEXT, 0)
    assert decisions(log, 0).decide(NEXT, COMMIT).kind == "abort"
    assert decisions(log, 0).outcome(ATTEMPT) == COMMIT


def test_an_abort_stays_one_once_the_next_attempt_has_a_plan(log: RunLog) -> None:
    vote(log, ATTEMPT, 1)
    decisions(log, 0).decide(ATTEMPT, abort())
    log.create(f"{NEXT}/plan.json", PLAN)
    damage(log, f"{ATTEMPT}/outcome.json")
    assert decisions(log, 1).decide(ATTEMPT, COMMIT).kind == "abort"


class Meanwhile(StillClock):
    """Something happens in the store while an island waits."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens

    def sleep(self, seconds: float) -> None:
        self._happens()


@pytest.mark.parametrize(
    ("name", "copied", "act"),
    [
        ("outcome.json", COMMIT, lambda island: island.outcome(ATTEMPT)),
        ("outcome.json", COMMIT, lambda island: island.decide(ATTEMPT, abort(by=1))),
        ("plan.json", PLAN, lambda island: island.plan(NEXT)),
        ("plan.json", PLAN, lambda island: island.decide_plan(NEXT, PLAN.model_copy(update={"by": 1}))),
    ],
)
def test_a_decision_that_is_still_being_copied_counts(
    log: RunLog, name: str, copied: Record, act: Callable[[Decisions], Record]
) -> None:
    """Another program, which does not write as this one does, shows a record before it is whole."""
    path = f"{ATTEMPT if name == 'outcome.json' else NEXT}/{name}"
    log.create(path, copied)
    whole = log.store.get(path, 1 << 20) or b""
    log.store.put(path, whole[:20])
    assert act(Decisions(log, 1, Meanwhile(lambda: log.store.put(path, whole)))) == copied


@pytest.mark.parametrize(
    ("path", "act"),
    [
        (f"{ATTEMPT}/outcome.json", lambda island: island.decide(ATTEMPT, COMMIT)),
        (f"{NEXT}/plan.json", lambda island: island.decide_plan(NEXT, PLAN)),
    ],
)
def test_nothing_is_decided_where_somebody_deletes_decisions(
    log: RunLog, path: str, act: Callable[[Decisions], Record]
) -> None:
    """Another island may have acted on what lay there."""
    damage(log, path)
    with pytest.raises(ForgedError, match=path):
        act(Decisions(log, 0, Meanwhile(lambda: log.store.delete([path]))))
    assert log.store.get(path, 1 << 20) is None


def test_votes_that_were_split_abort_also_where_the_outcome_is_damaged(log: RunLog) -> None:
    """Nobody can have committed."""
    vote(log, ATTEMPT, 0)
    log.create(f"{ATTEMPT}/votes/00001.json", VoteRecord(island=1, mean="cd"))
    damage(log, f"{ATTEMPT}/outcome.json")
    split = OutcomeRecord(by=1, kind="abort", is_split=True)
    assert decisions(log, 1).decide(ATTEMPT, split) == split
    assert decisions(log, 0).outcome(ATTEMPT) == split


def test_an_abort_stays_one_once_a_later_attempt_is_committed(log: RunLog) -> None:
    """Whose plan is damaged as well; the attempt between them was aborted, too."""
    last = "rounds/00000001/02"
    vote(log, ATTEMPT, 1)
    damage(log, f"{ATTEMPT}/outcome.json", f"{last}/plan.json")
    decisions(log).decide(NEXT, abort())
    vote(log, last, 0)
    decisions(log).decide(last, COMMIT)
    found = decisions(log, 1).decide(ATTEMPT, COMMIT)
    assert (found.kind, found.reason) == (
        "abort",
        f"{ATTEMPT}/outcome.json is damaged, and a later attempt is committed",
    )


ALL_OUTCOMES = ["outcome.json", *(f"outcome-{number}.json" for number in range(2, 10))]


def test_rubbish_under_all_names_is_told(log: RunLog) -> None:
    damage(log, *(f"{ATTEMPT}/{name}" for name in ALL_OUTCOMES))
    with pytest.raises(StoreError, match=r"rounds/00000001/00 .*hf-diloco store check"):
        decisions(log).outcome(ATTEMPT)
    with pytest.raises(StoreError, match=r"rounds/00000001/00 .*hf-diloco store check"):
        decisions(log).decide(ATTEMPT, abort())


def test_the_last_attempt_cannot_be_decided_anew_for_a_later_one(log: RunLog) -> None:
    last = f"rounds/00000001/{MAX_ATTEMPTS - 1}"
    vote(log, last, 0)
    damage(log, f"{last}/outcome.json")
    with pytest.raises(StoreError, match=r"too many records of rounds/00000001/99 .*hf-diloco store check"):
        decisions(log).decide(last, COMMIT)


# A run in whose store somebody writes what he likes


@pytest.mark.parametrize("exchange", ["bucket", "mesh"])
def test_rubbish_of_all_kinds_neither_stops_a_run_nor_changes_it(tmp_path: Path, exchange: str) -> None:
    settings: dict[str, Any] = {"exchange": exchange, "snapshot_every": 2, "keep_rounds": 1, "max_islands": 3}
    settings |= {"grace": 60.0, "sync_timeout": 60.0}  # no round is to be taken without one, or missed
    if exchange == "mesh":
        settings["bind_address"] = "127.0.0.1"
    meeting = Meeting(tmp_path, 2, **settings)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    throw(ObjectStore(meeting.url))
    run_islands(2, lambda island: islands[island].train(10))
    assert [member.session.outer.round for member in islands] == [6, 6]
    assert [member.missed for member in islands] == [0, 0]
    assert [report.participants for report in islands[0].reports] == [[0, 1]] * 6
    assert islands[0].hash == islands[1].hash
    newcomer = meeting.island(2, seed=9)
    assert newcomer.hash == islands[0].hash
    islands[1].die()
    assert meeting.island(1, seed=9).hash == islands[0].hash  # whose number rubbish claims


def test_records_written_while_islands_run(tmp_path: Path, fast_clock: FastClock) -> None:
    """One thread puts rubbish over and beside what two islands write, as fast as it can."""
    meeting = Meeting(tmp_path, 2)
    store = ObjectStore(meeting.url)
    islands = run_islands(2, lambda island: meeting.island(island))
    has_ended = fast_clock.event()

    def vandalise() -> None:
        while not has_ended.wait(0.02):
            throw(store)

    vandal = threading.Thread(target=vandalise, daemon=True)
    vandal.start()
    try:
        run_islands(2, lambda island: islands[island].train_to(6))
    finally:
        has_ended.set()
        vandal.join()
    assert islands[0].hash == islands[1].hash


@pytest.mark.parametrize("name", ["plan.json", "offers/"])
def test_a_committed_round_of_which_a_record_is_damaged_is_passed_over(tmp_path: Path, name: str) -> None:
    """By a snapshot, as where its pseudo-gradients are gone."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=1)
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    number = late.session.outer.round + 1
    first.train_to(number + 2)
    first.session.close()
    store = ObjectStore(meeting.url)
    damage_in(meeting, *(path for path, _ in store.list(f"rounds/{number:08d}") if f"/{name}" in path))
    late.sync()
    assert late.session.outer.round == first.session.outer.round
    assert late.hash == first.hash


def test_an_island_joins_from_the_snapshot_before_a_damaged_one(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2, snapshot_every=2)
    first = meeting.island(0).train_to(4)
    first.session.close()
    store = ObjectStore(meeting.url)
    for path, size in store.list("snapshots/00000004"):
        if path.endswith(".bin"):
            store.put(path, bytes(size))
    assert meeting.island(1, seed=5).hash == first.hash


def test_a_damaged_start_is_decided_anew(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, max_islands=2)
    first = meeting.island(0)
    damage_in(meeting, "start.json")
    assert meeting.island(1, seed=5).hash == first.hash
    first.train_to(1)


def damage_in(meeting: Meeting, *paths: str) -> None:
    for path in paths:
        ObjectStore(meeting.url).put(path, b"")


# run.json


def test_a_run_whose_name_is_gone_is_not_begun_again(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1)
    island = meeting.island(0).train_to(2)
    checkpoint = island.save(tmp_path / "checkpoint")
    island.die()
    store = ObjectStore(meeting.url)
    before = store.get("run.json", 1 << 20) or b""
    store.delete(["run.json"])
    with pytest.raises(
        RendezvousError, match=r"holds records of a run \(heartbeats/.*\), but run.json.* Bring run.json back"
    ):
        meeting.island(0, checkpoint=checkpoint)
    assert store.get("run.json", 1 << 20) is None
    store.put("run.json", before)
    assert meeting.island(0, checkpoint=checkpoint).hash == island.hash


def test_islands_that_run_say_that_none_can_be_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a rule of the bucket has deleted the oldest objects, among them the island's claim of its number."""
    meeting = Meeting(tmp_path, 1)
    island = meeting.island(0).train_to(2)
    store = ObjectStore(meeting.url)
    store.delete(["run.json", *(path for path, _ in store.list("incarnations"))])
    island.train_to(5)
    told = [line for line in caplog.messages if "no island can be started there any more" in line]
    assert len(told) == 1, "once"
    assert f"{meeting.url} has lost records of this run" in told[0]
    assert "Bring run.json back from a copy" in told[0]


def test_a_run_that_begins_from_a_checkpoint_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An empty folder may be a mount point without its file system."""
    island = Meeting(tmp_path, 1).island(0).train_to(1)
    checkpoint = island.save(tmp_path / "checkpoint")
    Meeting(tmp_path, 1).island(0, checkpoint=checkpoint)
    assert f"beginning a new run from the checkpoint of run {island.session.outer.run}" in caplog.text
    assert "its file system mounted?" in caplog.text


# What is deleted


def in_folder(meeting: Meeting, folder: Path) -> Path:
    meeting.url = f"file://{folder}"
    return folder


def test_only_what_this_run_has_written_is_cleared_up(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, snapshot_every=2, keep_rounds=1)
    root = in_folder(meeting, tmp_path / "store")
    elsewhere = tmp_path / "elsewhere" / "00000-000001-1"
    elsewhere.mkdir(parents=True)
    (elsewhere / "rank-00000.bin").write_bytes(b"precious")
    island = meeting.island(0).train_to(1)
    own = next(path for path in (root / "payloads/00000001").iterdir())
    (root / "payloads/00000001/notes.txt").write_text("mine")
    (root / "payloads/00000001/00007-000001-1").mkdir()
    (root / "payloads/00000001/00007-000001-1/rank-00000.bin").write_text("of no process of this run")
    (root / "payloads/00000002").symlink_to(elsewhere.parent)
    island.train_to(1)
    (root / "payloads/00000002").unlink()
    (root / "payloads/00000000").symlink_to(elsewhere.parent)
    island.train_to(8)
    island.session.close()
    assert (elsewhere / "rank-00000.bin").read_bytes() == b"precious"
    assert not own.exists()
    assert sorted(path.name for path in (root / "payloads/00000001").iterdir()) == ["00007-000001-1", "notes.txt"]
    assert sorted(path.name for path in (root / "payloads").iterdir()) == ["00000000", "00000001", "00000008"]


def test_what_a_killed_writer_left_goes_when_rounds_have_passed(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, snapshot_every=1, keep_rounds=1)
    root = in_folder(meeting, tmp_path / "store")
    island = meeting.island(0).train_to(1)
    left = root / "payloads/00000001/00000-000001-9/rank-00000.bin#1"
    left.parent.mkdir()
    left.write_bytes(b"half")
    (root / "payloads/00000099/empty").mkdir(parents=True)
    island.session.close()
    assert left.exists()
    for number in (2, 3):
        island.train_to(number)
        island.session.close()
    assert not left.parent.exists()
    assert not (root / "payloads/00000099").exists()


def test_a_full_store_is_cleared_and_the_round_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has space again once something is deleted that nobody needs."""
    meeting = Meeting(tmp_path, 1, snapshot_every=1, keep_rounds=50)
    root = in_folder(meeting, tmp_path / "store")
    island = meeting.island(0).train_to(4)
    island.session.close()
    full = threading.Event()
    monkeypatch.setattr(os, "write", failing(os.write, full))
    unlink = os.unlink

    def unlink_and_notice(path: str, **kwargs: int) -> None:
        unlink(path, **kwargs)
        if "#" not in path:
            full.clear()

    monkeypatch.setattr(os, "unlink", unlink_and_notice)
    full.set()
    island.train(2)
    assert (island.missed, full.is_set(), island.session.outer.round) == (1, False, 4)
    assert not (root / "payloads").exists()
    assert sorted(path.name for path in (root / "snapshots").iterdir()) == ["00000004"]
    island.train_to(6)
    assert island.reports[-2].weight == 2.0  # the steps of the missed round count
    island.session.close()  # the last snapshot is written behind
    assert not [path for path in root.rglob("*#*") if "heartbeats" not in path.parts], (
        "a sign of life may be on its way"
    )


def failing(write: Callable[..., int], full: threading.Event) -> Callable[..., int]:
    def attempt(fd: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    return attempt
