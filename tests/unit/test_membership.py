"""Who is there, and who takes part: incarnations, signs of life and plans in a store, in one thread."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.errors import (
    DiLoCoError,
    DuplicateIslandError,
    ExchangeError,
    FingerprintError,
    ForgedError,
    IslandLostError,
    PayloadError,
    RendezvousError,
    StopRequested,
)
from hf_diloco.membership import heartbeats
from hf_diloco.membership.candidates import Candidates, Rules, UsualNorms
from hf_diloco.membership.decisions import Decisions
from hf_diloco.membership.ended_runs import has_noted_ends, is_of_ended_run, note_end
from hf_diloco.membership.facts import Facts
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import HeartbeatRecord, IncarnationRecord, Phase, incarnation_path
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import (
    Attempt,
    OfferRecord,
    OutcomeRecord,
    Participant,
    PlanRecord,
    SnapshotRecord,
    VoteRecord,
    assemble,
    author_of,
)
from hf_diloco.membership.run import RunRecord, enter_run, open_run
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.long_poll import Listing
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MEETING, RUN_PATH, Seal
from tests.clocks import LONG, StillClock

LEASE = 10.0


class EventfulClock(StillClock):
    """Has something happen while somebody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()


class Store:
    """A store in memory, of which a test replaces single operations."""

    def __init__(self) -> None:
        self._store = ObjectStore(f"memory://{os.urandom(8).hex()}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def store() -> Any:
    return Store()


@pytest.fixture
def log(store: ObjectStore) -> RunLog:
    return RunLog(store, Seal(b"", "run"))


@pytest.fixture
def clock() -> EventfulClock:
    return EventfulClock()


@pytest.fixture
def process(log: RunLog, clock: EventfulClock) -> Callable[..., Members]:
    """One process of an island, with a folder of its own, which enters the run unless it is told not to."""
    numbers = itertools.count()

    def start(island: int = 0, enters: bool = True, folder: str = "") -> Members:
        members = Members(log, island, folder or f"/{next(numbers)}", LEASE, clock)
        if enters:
            members.enter()
            members.standing.phase = "training"
            members.heartbeat()
        return members

    return start


Process = Callable[..., Members]

# Claims


@pytest.mark.parametrize("folder", ["", "/the/same"], ids=["anywhere", "in equal containers"])
def test_of_two_processes_that_begin_as_one_island_at_once_one_is_refused(
    store: Any, process: Process, clock: EventfulClock, folder: str
) -> None:
    slow, fast = process(enters=False, folder=folder), process(enters=False, folder=folder)
    create = store.create

    def create_late(path: str, data: bytes) -> bool:
        store.create = create
        fast.enter()
        return bool(create(path, data))

    store.create = create_late
    clock.meanwhile = fast.heartbeat
    with pytest.raises(DuplicateIslandError, match=r"another process runs as island 0 .*end that process first"):
        slow.enter()
    assert (fast.incarnation, slow.incarnation) == (1, 0)


def test_who_hangs_until_its_number_is_taken_ends_at_its_next_round(log: RunLog, process: Process) -> None:
    hangs = process()
    assert process().incarnation == 2, "it gave no sign of life"
    quorum = Quorum(hangs, Rules(), clock=StillClock())
    with pytest.raises(DuplicateIslandError, match=r"has taken over as island 0 .*that was synchronised is lost"):
        quorum.convene(quorum.current(1), offer_of(0))


def test_signs_of_life_end_with_whoever_gives_them(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that somebody drops without closing it keeps neither a thread nor its store."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.02)
    refreshed = threading.Event()

    class Session:
        def __init__(self) -> None:
            self.members = Members(log, 0)
            self.members.enter()
            self.members.refresh = self.refresh
            self.members.start_heartbeats()

        def refresh(self) -> None:
            refreshed.set()

    session = Session()
    assert refreshed.wait(LONG)
    (thread,) = [one for one in threading.enumerate() if one is session.members._thread]
    del session
    deadline = time.monotonic() + LONG
    while thread.is_alive():  # in the middle of a sign of life it has the session for a moment
        assert time.monotonic() < deadline
        gc.collect()
        thread.join(0.05)


def test_a_change_is_told_at_once_and_else_signs_of_life_come_in_their_time(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", LONG)
    members = Members(log, 0)
    members.enter()
    members.start_heartbeats()
    for number in (2, 3):
        members.set_phase("syncing")
        deadline = time.monotonic() + LONG / 2
        while members.num_heartbeats < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.05)
        assert members.num_heartbeats == number
    members.stop_heartbeats()


@pytest.mark.parametrize("leases", [0.6, 2.0])
def test_a_store_that_was_silent_for_most_of_a_lease_or_longer_makes_nobody_count_as_gone(
    store: Any, process: Process, clock: EventfulClock, leases: float
) -> None:
    """It answers in the end, and the other island's next sign of life is on its way."""
    here, there = process(0), process(1)
    assert here.alive().keys() == {0, 1}

    def list_late(prefix: str = "") -> Any:
        clock.time += leases * LEASE
        del store.list
        return store.list(prefix)

    store.list = list_late
    assert here.alive().keys() == {0, 1}
    clock.time += 0.6 * LEASE
    assert here.alive().keys() == {0, 1}
    clock.time += LEASE
    assert here.alive().keys() == {0}, "it has had a lease's time"
    there.heartbeat()
    assert here.alive().keys() == {0, 1}


def test_who_was_refused_leaves_no_sign_of_life(log: RunLog, process: Process) -> None:
    process()
    second = process(enters=False)
    with pytest.raises(DuplicateIslandError):
        second.enter(may_return=False)
    second.leave("left")
    assert log.list("heartbeats") == ["heartbeats/0/000001.json"]


def test_signs_of_life_of_an_islands_earlier_processes_do_not_pile_up(log: RunLog, process: Process) -> None:
    log.store.put("heartbeats/0/000000.json", b"of no process of the run")
    process(1)
    for _ in range(5):
        members = process(enters=False)
        members.enter()
        members.start_heartbeats()
        members.leave("left")
    assert log.list("heartbeats") == [
        "heartbeats/0/000000.json",
        "heartbeats/0/000005.json",
        "heartbeats/1/000001.json",
    ]


def test_an_island_that_leaves_is_not_waited_for_until_its_lease_ends(process: Process, clock: EventfulClock) -> None:
    """By a process that is to follow it."""
    before, since = process(), clock.now()
    clock.meanwhile = lambda: before.leave("left")
    assert process().incarnation == 2
    assert clock.now() - since < 1


@pytest.mark.parametrize(("is_known", "seconds"), [(True, 0.0), (False, LEASE)])
def test_whether_a_process_has_ended_is_seen_at_once_where_its_number_tells(
    log: RunLog,
    process: Process,
    clock: EventfulClock,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
    seconds: float,
) -> None:
    """A system that does not say which process numbers are its own leaves the lease."""
    if not is_known:

        def fail(path: str) -> str:
            raise FileNotFoundError(path)

        monkeypatch.setattr(os, "readlink", fail)
    process()
    incarnation = log.read(incarnation_path(0, 1), IncarnationRecord)
    assert incarnation is not None
    log.put(incarnation_path(0, 1), incarnation.model_copy(update={"pid": 1 << 30}))  # more than there can be
    since = clock.now()
    assert process().incarnation == 2
    assert clock.now() - since == seconds


def test_a_damaged_sign_of_life_is_not_taken_for_that_of_an_earlier_process(log: RunLog, process: Process) -> None:
    process()
    newer = process()
    newer.leave("finished")
    observer = process(island=1)
    seen = observer.look()[0]
    log.store.put("heartbeats/0/000002.json", b"")
    assert observer.look()[0] == seen
    assert observer.alive().keys() == {1}


# Plans


def offer_of(island: int, **settings: Any) -> OfferRecord:
    values: dict[str, Any] = {"state": "ab", "weight": 1.0, "norm": 1.0, "steps": 1, "objects": [{}], **settings}
    return OfferRecord(island=island, incarnation=1, serial=0, **values)


def test_a_plan_that_is_damaged_as_it_is_written_costs_an_attempt(
    log: RunLog, process: Process, clock: EventfulClock
) -> None:
    """Just then the island need not wait for the other one any longer."""
    here, _ = process(0), process(1)
    first = Attempt(1, 0)

    def damage() -> bool:
        log.store.put(f"{first.path}/plan.json", b"")
        return True

    quorum = Quorum(here, Rules(min_islands=1), clock=clock, is_awaited=damage)
    planned = quorum.convene(first, offer_of(0))
    assert planned.number == 1
    assert planned.plan is not None
    assert planned.plan.islands == {0}
    assert quorum.current(1) == planned


@pytest.mark.parametrize(
    ("spoilt", "reason", "remedy"),
    [
        ({"norm": None}, "not finite", "lower the inner"),
        ({"weight": 0.0}, "no examples behind it", "set weight_by to uniform"),
    ],
)
def test_what_no_average_can_be_made_of_is_left_out(
    log: RunLog, process: Process, spoilt: dict[str, Any], reason: str, remedy: str
) -> None:
    first, second = process(0), process(1)
    quorums = [Quorum(members, Rules(min_islands=2), clock=StillClock()) for members in (first, second)]
    quorums[1].offer(Attempt(1, 0), offer_of(1, **spoilt))
    plan = quorums[0].convene(Attempt(1, 0), offer_of(0)).plan
    assert plan is not None
    assert (plan.islands, plan.left_out) == (frozenset({0}), {"1": reason})
    quorums[1].offer(Attempt(2, 0), offer_of(1, **spoilt))
    with pytest.raises(ExchangeError, match=rf"round 2: no island .* counts .*'1': '{reason}'.*{remedy}"):
        quorums[0].convene(Attempt(2, 0), offer_of(0, **spoilt))


@pytest.mark.parametrize("needs_presence", [False, True])
def test_for_whom_a_round_waits(log: RunLog, process: Process, needs_presence: bool) -> None:
    standings: list[tuple[Phase, int]] = [
        ("training", 4),
        ("syncing", 3),  # has missed round 4, and carries it out now
        ("training", 3),
        ("passing", 4),  # begins in the midst of the run
        ("training", 3),  # was in round 4: its next sign of life is on its way
        ("left", 4),
    ]
    members = [process(island) for island in range(len(standings))]
    for one, (phase, number) in zip(members, standings, strict=True):
        one.standing.phase, one.standing.round = phase, number
        one.heartbeat()
    candidates = Candidates(members[0], Rules(needs_presence=needs_presence))
    participant = Participant(offer="offers/4", island=4, weight=1.0, norm=1.0)
    candidates.remember(4, PlanRecord(by=4, state="ab", participants=[participant]))
    alive = members[0].alive()
    assert candidates.awaited(Attempt(5, 0), alive, 0.0) == {0, 1, 4}
    assert candidates.awaited(Attempt(5, 0), alive, 1.0) == {0, 4}
    lost = Attempt(5, 1, unusable=(author_of(4, 1),))
    assert candidates.awaited(lost, alive, 0.0) == {0, 1, 4}
    assert candidates.awaited(lost, alive, 1.0) == ({0} if needs_presence else {0, 4})
    assert candidates.awaited(Attempt(5, 2, unusable=lost.unusable * 2), alive, 0.0) == {0, 1}


def test_who_trains_on_after_its_offer_takes_no_part_in_a_direct_exchange(log: RunLog, process: Process) -> None:
    here, there = process(0), process(1)
    candidates = Candidates(here, Rules(needs_presence=True))
    offer = offer_of(1, heartbeat=there.num_heartbeats)
    assert candidates.waits(offer, here.alive()), "its next sign of life may be on its way"
    there.heartbeat()
    assert not candidates.waits(offer, here.alive())
    there.standing.phase = "syncing"
    there.heartbeat()
    assert candidates.waits(offer, here.alive())
    another = process(1)
    another.standing.phase = "syncing"
    another.heartbeat()
    assert not candidates.waits(offer, here.alive()), "another process has come in its place"


def test_a_norm_is_unusual_beside_those_of_the_last_rounds_of_its_fragment() -> None:
    norms, offer = UsualNorms(num_fragments=2, factor=10.0), offer_of(0, norm=50.0)
    for number in range(2, 10, 2):
        norms.remember(number, [1.0, 1.0, 30.0])
        norms.remember(number + 1, [100.0])
    assert norms.why_not(10, offer, 1.0) == "", "of four rounds nobody knows what is usual"
    norms.remember(10, [1.0])
    reason = "its norm 50 is more than 10 times the usual 1 (outlier_factor)"
    assert norms.why_not(12, offer, 1.0) == reason
    assert norms.why_not(13, offer, 1.0) == "", "of the other fragment"
    norms.remember(11, [100.0])
    assert "the usual 100" in norms.why_not(13, offer_of(0, norm=2000.0), 1.0)
    assert norms.why_not(12, offer, 5.0) == "", "where all are longer than usual"
    assert norms.why_not(12, offer_of(0, norm=10.0), 1.0) == ""
    for number in range(12, 100, 2):
        norms.remember(number, [1.0])
    for number in range(100, 132, 2):
        norms.remember(number, [20.0])
    assert norms.why_not(132, offer, 1.0) == "", "what was usual long ago does not count"


@pytest.mark.parametrize(
    ("is_asked_to_stop", "error", "said"),
    [(True, StopRequested, None), (False, IslandLostError, "round 1 is not decided after 3 s")],
)
def test_a_round_that_others_carry_out_is_waited_for_with_patience(
    log: RunLog,
    process: Process,
    clock: EventfulClock,
    is_asked_to_stop: bool,
    error: type[Exception],
    said: str | None,
) -> None:
    here, there = process(0), process(1)
    planned = Quorum(there, Rules(grace=0.0), clock=clock).convene(Attempt(1, 0), offer_of(1))
    quorum = Quorum(here, Rules(grace=30.0), lambda: is_asked_to_stop, clock)
    there.set_phase("syncing")
    clock.meanwhile = there.heartbeat
    since = clock.now()
    with pytest.raises(error, match=said):
        quorum.await_outcome(replace(planned, offers=(offer_of(1),)), patience=3.0)
    assert clock.now() - since == (0.0 if is_asked_to_stop else 3.0)


def test_a_plan_of_offers_to_another_attempt_is_not_carried_out(log: RunLog, process: Process) -> None:
    """These may start from other outer parameters, and have been used."""
    quorum = Quorum(process(0), Rules(), clock=StillClock())
    first = quorum.convene(Attempt(1, 0), offer_of(0))
    assert quorum.with_offers(first, "ab") == replace(first, offers=(offer_of(0, heartbeat=1),))
    second = replace(first, number=1)
    assert quorum.with_offers(second, "ab") is None
    outcome = log.read(f"{second.path}/outcome.json", OutcomeRecord)
    assert outcome is not None
    assert (outcome.kind, outcome.unusable) == ("abort", "")
    assert outcome.reason.startswith(f"the plan that island 0 wrote ({second.path}) includes an offer to another")
    assert log.newly_refused.take().keys() == {0}


def test_who_offers_what_another_island_has_written_is_to_blame(log: RunLog, process: Process) -> None:
    """Or that one would be, for objects that cannot be used."""
    quorum = Quorum(process(0), Rules(), clock=StillClock())
    path = "payloads/00000001/00001-000001-5/rank-00000.bin"
    attempt = quorum.convene(Attempt(1, 0), offer_of(0).model_copy(update={"objects": [{"path": path}]}))
    assert attempt.plan is not None
    assert quorum.with_offers(attempt, "ab") is None
    outcome = log.read(f"{attempt.path}/outcome.json", OutcomeRecord)
    assert outcome is not None
    assert (outcome.kind, outcome.unusable) == ("abort", attempt.plan.participants[0].offer)
    assert f"names {path}, which island 0 cannot have written" in outcome.reason


@pytest.mark.parametrize("is_asked_to_stop", [False, True])
def test_a_vote_is_waited_for_no_longer_than_the_grace(
    log: RunLog, process: Process, clock: EventfulClock, is_asked_to_stop: bool
) -> None:
    """Of an island that gives signs of life and hangs; and not by one that is asked to stop."""
    here, there = process(0), process(1)
    there.standing.phase = "syncing"

    def hang() -> None:
        there.heartbeat()
        assert clock.now() - since < 10

    clock.meanwhile = hang
    quorum = Quorum(here, Rules(min_islands=2, grace=2.0), lambda: is_asked_to_stop, clock)
    offers = [offer_of(0), offer_of(1)]
    for offer in offers:
        quorum.offer(Attempt(1, 0), offer)
    since = clock.now()
    assert quorum.commit(Attempt(1, 0, offers=tuple(offers)), "ab").kind == "commit"
    assert (clock.now() - since < 1) if is_asked_to_stop else (2 <= clock.now() - since < 4)
    abstention = log.read("rounds/00000001/00/votes/00001.json", VoteRecord)
    assert abstention is not None
    assert abstention.mean == ""


def test_nobody_waits_for_ever_for_who_votes_in_anothers_name(
    log: RunLog, process: Process, clock: EventfulClock
) -> None:
    here, there = process(0), process(1)
    there.standing.phase = "syncing"
    there.heartbeat()
    log.create("rounds/00000001/00/votes/00001.json", VoteRecord(island=0, mean="cd"))
    quorum = Quorum(here, Rules(min_islands=2, grace=2.0), clock=clock)
    since = clock.now()
    outcome = quorum.commit(Attempt(1, 0, offers=(offer_of(0), offer_of(1))), "ab")
    assert (outcome.kind, outcome.mean) == ("commit", "ab")
    assert clock.now() - since < 1


@pytest.mark.parametrize(
    ("votes", "is_split", "reason"),
    [
        ({}, False, "none of its participants has voted"),
        ({1: "ab", 2: "cd"}, True, "its participants hold different averages"),
    ],
)
def test_averages_are_in_doubt_only_where_two_differ(
    log: RunLog, process: Process, clock: EventfulClock, votes: dict[int, str], is_split: bool, reason: str
) -> None:
    """Not where the participants hang, as on machines that sleep, and an island without a part votes them out."""
    attempt = Attempt(1, 0, offers=(offer_of(1), offer_of(2)))
    for island, mean in votes.items():
        log.create(f"{attempt.path}/votes/{island:05d}.json", VoteRecord(island=island, mean=mean))
    outcome = Quorum(process(0), Rules(grace=2.0), clock=clock).commit(attempt, "ab")
    assert (outcome.kind, outcome.is_split, outcome.reason) == ("abort", is_split, reason)


@pytest.mark.parametrize("number", [-1, 1 << 53, 10**400])
def test_numbers_that_nothing_can_be_counted_by_are_refused(log: RunLog, number: int) -> None:
    """They would end whoever writes them down, or compares them with fractions."""
    heartbeat = HeartbeatRecord(count=1, phase="training", round=1, steps=1, num_ranks=1, tokens_per_second=1.0)
    outcome = OutcomeRecord(by=0, kind="abort", lost=[1])
    plan = PlanRecord(by=0, state="ab", participants=[Participant(offer="x", island=0, weight=1.0, norm=1.0)])
    wrong: dict[str, Record] = {
        name: record.model_copy(update={name: value})
        for record, name, value in [
            *((heartbeat, name, number) for name in ("count", "round", "steps", "num_ranks")),
            *((offer_of(0), name, number) for name in ("island", "incarnation", "serial", "steps", "heartbeat")),
            (outcome, "lost", [number]),
            (outcome, "by", number),
            (plan, "left_out", {str(number): "no reason"}),
            (plan, "left_out", {"9" * 5000: "no reason"}),
        ]
    }
    for name, record in wrong.items():
        log.put(name, record)
        with pytest.raises(ForgedError, match=rf"{name} is no {type(record).__name__} of this version"):
            log.read(name, type(record))


@pytest.mark.parametrize("are_gone", [False, True])
def test_who_is_outvoted_waits_for_the_commit_of_the_others_and_aborts_where_they_are_gone(
    log: RunLog, process: Process, clock: EventfulClock, are_gone: bool
) -> None:
    here, *others = process(0), process(1), process(2)
    first = Attempt(1, 0, offers=tuple(offer_of(island) for island in range(3)))
    for other in others:
        other.standing.phase = "syncing"
        other.heartbeat()
        log.create(f"{first.path}/votes/{other.island:05d}.json", VoteRecord(island=other.island, mean="cd"))
        if are_gone:
            other.leave("left")
    quorums = [Quorum(members, Rules(min_islands=3, grace=5.0), clock=clock) for members in (here, others[0])]

    def commit() -> None:
        if clock.now() > since:  # it has looked, and waits
            clock.meanwhile = lambda: None
            quorums[1].commit(first, "cd")

    if not are_gone:
        clock.meanwhile = commit
    since = clock.now()
    outcome = quorums[0].commit(first, "ab")
    if are_gone:
        assert (outcome.kind, outcome.is_split) == ("abort", False)
        assert outcome.reason == "those who agree on another average are gone"
        assert quorums[1].commit(first, "cd") == outcome, "which counts for them too, if they come back"
    else:
        assert (outcome.kind, outcome.mean, outcome.by) == ("commit", "cd", 1)


def test_a_vote_that_is_damaged_is_not_taken_back(log: RunLog, process: Process) -> None:
    """By it a commit may have been decided: nobody else may say then that the attempt came to nothing."""
    quorums = [Quorum(process(island), Rules(), clock=StillClock()) for island in (0, 1)]
    attempt = replace(quorums[0].convene(Attempt(1, 0), offer_of(0)), offers=(offer_of(0),))
    assert quorums[0].commit(attempt, "ab").kind == "commit"
    for name in ("plan", "outcome", "votes/00000"):
        log.store.put(f"{attempt.path}/{name}.json", b"")
    with pytest.raises(DiLoCoError, match="may have committed it"):
        quorums[1].current(1)
    for quorum in quorums:
        with pytest.raises(PayloadError, match="round 1 is committed, but its plan can no longer be read"):
            quorum.current(1)
    assert log.read_or_refuse(f"{attempt.path}/votes/00000.json", VoteRecord) is None, "no abstention"


def test_a_commit_is_not_judged_before_most_have_voted(log: RunLog, process: Process) -> None:
    quorum = Quorum(process(0), Rules(), clock=StillClock())
    attempt = replace(quorum.convene(Attempt(1, 0), offer_of(0)), offers=(offer_of(0),))
    other = OutcomeRecord(by=0, kind="commit", mean="cd")
    with pytest.raises(IslandLostError, match=r"rounds/00000001/00 is committed, but most .* have yet to vote"):
        quorum.commit(replace(attempt, outcome=other), "ab")
    assert quorum.commit(attempt, "ab").mean == "ab"
    assert quorum.commit(replace(attempt, outcome=other), "ab").mean == "ab", "which others cannot have committed"
    agreed = OutcomeRecord(by=0, kind="commit", mean="ab")
    assert quorum.commit(replace(attempt, outcome=agreed), "cd") == agreed


# Beginning a run


def begin(store: Any, key: bytes = b"", clock: StillClock | None = None) -> tuple[RunRecord, bool]:
    return enter_run(store, Seal(key, "-"), 0, "", None, {}, clock or StillClock())


def test_a_run_that_has_ended_is_taken_up_again_in_its_own_folder_only(tmp_path: Path, store: ObjectStore) -> None:
    run, _ = begin(store)
    seal = Seal(b"", run.run)
    assert not is_of_ended_run(store, seal, 1, tmp_path / "other")
    note_end(Members(RunLog(store, seal), 1, str(tmp_path / "own")))
    assert has_noted_ends(1)
    assert is_of_ended_run(store, seal, 1, tmp_path / "other")
    assert not is_of_ended_run(store, seal, 1, tmp_path / "own")
    assert not is_of_ended_run(store, seal, 2, tmp_path / "other"), "another island of this process"


def test_of_islands_with_other_keys_that_begin_at_once_one_is_refused(store: Any) -> None:
    check = store.check_creation

    def check_late() -> None:
        del store.check_creation
        begin(store, b"the other key....")
        check()

    store.check_creation = check_late
    with pytest.raises(RendezvousError, match=r"begun with another key.*HF_DILOCO_KEY or key_file"):
        begin(store, b"this key.........")


def test_the_number_of_trainable_parameters_is_named_before_digests(store: Any) -> None:
    """Records are sorted by name; a parameter that is frozen on one island only changes several facts."""
    theirs: Facts = {"trainable parameters": 96, "model (names and sizes)": "ab"}
    ours: Facts = {"trainable parameters": 64, "model (names and sizes)": "cd"}
    enter_run(store, Seal(b"", "-"), 0, "", None, theirs, StillClock())
    with pytest.raises(FingerprintError, match=r"trainable parameters differs .*0: 96; island 1: 64\).*frozen \(req"):
        enter_run(store, Seal(b"", "-"), 1, "", None, ours, StillClock())


def test_who_may_come_and_go_does_not_join_those_who_wait_for_each_other(store: Any) -> None:
    store.put(MEETING, b"")
    with pytest.raises(
        RendezvousError, match=r"wait for each other.*same settings \(min_islands, max_islands, exchange\)"
    ):
        begin(store)


def test_a_run_of_those_who_wait_for_each_other_that_begins_between_two_questions_has_just_begun(store: Any) -> None:
    """Its first records come before `run.json`."""
    get = store.get

    def begin_meanwhile(path: str, limit: int) -> bytes | None:
        store.get = get
        found = get(path, limit)
        store.put(MEETING, b"")
        store.put("incarnations/0/000001.json", b"")
        return bytes(found) if found else None

    store.get = begin_meanwhile
    with pytest.raises(RendezvousError, match="has just begun: look again in a moment"):
        open_run(store, b"")
    store.delete([MEETING, "incarnations/0/000001.json"])
    store.get = begin_meanwhile
    with pytest.raises(RendezvousError, match="wait for each other"):
        begin(store)


def test_who_decides_too_late_on_a_run_does_not_join_those_who_wait_for_each_other(store: Any) -> None:
    check = store.check_creation

    def begin_meanwhile() -> None:
        check()
        run = RunRecord(run="0" * 32, by=0, parent="", num_rounds=None, fingerprint={}, waits_for_all=True)
        RunLog(store, Seal(b"", "-")).put(RUN_PATH, run)

    store.check_creation = begin_meanwhile
    with pytest.raises(RendezvousError, match="wait for each other"):
        begin(store)


def test_what_was_seen_while_it_was_copied_is_looked_at_again(log: RunLog, clock: EventfulClock) -> None:
    """Where one request has answered all that an island asks before a round."""
    outcome = OutcomeRecord(by=0, kind="abort")
    decisions = Decisions(log, 0, clock)
    log.put(path := "rounds/00000001/00/outcome.json", outcome)
    with log.store.listings.answer_from(Listing(("rounds",), frozenset(), {path: b""}, {path: ""}, {})):
        assert decisions.outcome("rounds/00000001/00") == outcome


@pytest.mark.parametrize("num_looks", [1, 3, 100])
def test_a_run_that_a_network_file_system_does_not_show_yet_is_looked_for_again(store: Any, num_looks: int) -> None:
    """It lists the file, and remembers for some seconds that there was none."""
    run, is_new = begin(store)
    assert is_new
    store.put("incarnations/0/000001.json", b"")
    get, looks, clock = store.get, iter(range(num_looks)), StillClock()
    store.get = lambda path, limit: None if path == RUN_PATH and next(looks, None) is not None else get(path, limit)
    if num_looks < 100:
        assert begin(store, clock=clock) == (run, False)
    else:
        with pytest.raises(RendezvousError, match=r"holds records of a run .*Bring run.json back"):
            begin(store, clock=clock)
        assert clock.now() - StillClock().now() == 4.0, "seconds"


# Snapshots


def part(rank: int, state: str = "ab") -> SnapshotRecord:
    return SnapshotRecord(round=3, rank=rank, num_ranks=2, state=state, tensors={})


def test_a_snapshot_is_whole_when_all_ranks_have_written_their_parts() -> None:
    whole = assemble("here", [part(0), None, part(1)])
    assert whole is not None
    assert (whole.round, whole.state, len(whole.parts)) == (3, "ab", 2)
    for parts in ([], [None], [part(0)], [part(1)], [part(1), part(0)]):
        assert assemble("here", parts) is None
