"""Who waits says for whom, in time and not too often; through everything that waits for other islands."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import IslandLostError, RendezvousError
from hf_diloco.membership.all_gather import AllGather
from hf_diloco.membership.candidates import Rules
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import IncarnationRecord
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OfferRecord, offer_path
from hf_diloco.rounds.joining import await_islands
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.store.tcp_store import Rendezvous, meet
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.text import name_all
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import LONG, StillClock, wait_until
from tests.fixed_runs import convene, offer_of, unanimity, vote
from tests.islands import run_islands


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1], "island 1"),
        ([2, 1], "islands 1, 2"),
        (range(1, 33), "islands 1-32"),
        ([], "islands unknown"),
    ],
)
def test_names_are_sorted_and_short(numbers: range | list[int], text: str) -> None:
    assert name_all(numbers) == text


def test_a_wait_is_said_after_3_s_and_every_30_s(clock: StillClock, caplog: pytest.LogCaptureFixture) -> None:
    wait = WaitNotes(0, clock=clock).begin(600, where="tcp://10.0.0.1:29400")
    for _ in range(700):
        clock.sleep(0.1)
        wait.look([1])
    assert caplog.messages == [
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (3 s of 600 s)",
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (33 s of 600 s)",
        "island 0: waiting for island 1 at tcp://10.0.0.1:29400 (63 s of 600 s)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_short_waits_are_silent_and_many_rounds_share_one_line(
    clock: StillClock, caplog: pytest.LogCaptureFixture
) -> None:
    notes = WaitNotes(3, "node", clock=clock)
    for number in range(20):
        wait = notes.begin(1800, f"round {number}")
        for _ in range(4):
            clock.sleep(1)
            wait.look(lambda: {4, 5})
    assert caplog.messages == [
        "node 3: round 0: waiting for nodes 4, 5 (3 s of 1,800 s)",
        "node 3: round 8: waiting for nodes 4, 5 (3 s of 1,800 s)",
        "node 3: round 16: waiting for nodes 4, 5 (3 s of 1,800 s)",
    ]


def test_a_call_that_blocks_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    with WaitNotes(0, first=0.05).begin(float("inf"), "lane0").blocking("islands 1, 2 to connect"):
        wait_until(lambda: caplog.messages, "it is said")
    (said,) = caplog.messages
    assert re.fullmatch(r"island 0: lane0: waiting for islands 1, 2 to connect \(\d+ s\)", said)


# Through what waits


def test_who_gathers_says_who_has_not_come(clock: StillClock, caplog: pytest.LogCaptureFixture) -> None:
    book = AllGather(ValueStore.in_memory(), 0, 3, where="tcp://h:29400", clock=clock)
    with pytest.raises(IslandLostError):
        book.share("join", {}, 5)
    assert caplog.messages == ["island 0: waiting for islands 1, 2 at tcp://h:29400 (3 s of 5 s)"]


def test_a_round_says_who_is_late_for_it_and_for_its_vote(clock: StillClock, caplog: pytest.LogCaptureFixture) -> None:
    store = ValueStore.in_memory()
    store.log.put(offer_path(Attempt(7, 0), offer_of(1)), offer_of(1))
    with pytest.raises(IslandLostError):
        convene(unanimity(store, 0, 3, 40.0, clock=clock), 7, offer_of(0))
    assert caplog.messages[0] == "island 0: round 7: waiting for island 2 (3 s of 40 s)"
    assert len(caplog.messages) == 2
    caplog.clear()
    clock.sleep(30)
    with pytest.raises(IslandLostError):
        vote(unanimity(store, 0, 3, 10.0, clock=clock), 8)
    assert caplog.messages == ["island 0: round 8, vote: waiting for islands 1, 2 (3 s of 10 s)"]


def test_who_waits_for_the_rendezvous_to_open_says_so(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    url = f"tcp://127.0.0.1:{free_port}"

    def mine() -> list[str]:
        return [message for message in caplog.messages if url in message]  # not those of other tests' threads

    def run(island: int) -> Rendezvous:
        config = DiLoCoConfig(num_islands=2, island=island, rendezvous=url, join_timeout=LONG)
        if island == 0:
            wait_until(mine, "island 1 says for whom it waits")
        size, notes = {"num_islands": 2}, WaitNotes(island, first=0)
        return meet(config, Credentials(), island == 0, f"island {island}", size, LONG, notes)

    run_islands(2, run, 3 * LONG)
    (said,) = mine()
    assert re.fullmatch(rf"island 1: waiting for island 0 at {url} \(\d+ s of 60 s; Connection refused\)", said)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog(ObjectStore(tmp_path.as_uri()), Seal(b"", "run"))


def test_islands_that_gather_in_a_store_say_who_is_missing(
    log: RunLog, clock: StillClock, caplog: pytest.LogCaptureFixture
) -> None:
    url = "file:///some/folder"
    config = DiLoCoConfig(num_islands=2, island=0, rendezvous=url, join_timeout=5)
    members = Members(log, 0, clock=clock)
    members.enter()
    members.heartbeat()
    members.look()
    other = Members(log, 1, clock=clock)
    other.enter()
    other.leave("left")  # as it was refused
    with pytest.raises(RendezvousError):
        await_islands(config, members, lambda: False, clock=clock)
    assert caplog.messages == [
        "island 1 joined and left again: its own log says why",
        f"island 0: waiting for island 1 at {url} (3 s of 5 s)",
    ]


def test_an_island_that_has_finished_is_waited_for_if_progress_needs_it(
    log: RunLog, clock: StillClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Both had missed rounds, and are started again one after the other."""
    url = "file:///some/folder"
    config = DiLoCoConfig(num_islands=2, island=0, rendezvous=url, join_timeout=5, min_islands=2)
    members = Members(log, 0, clock=clock)
    members.enter()
    members.heartbeat()
    other = Members(log, 1, clock=clock)
    other.enter()
    other.standing.steps = 2
    other.leave("finished")
    alone = DiLoCoConfig(num_islands=2, island=0, rendezvous=url, join_timeout=5, min_islands=1)
    await_islands(alone, members, lambda: False, has_progress=True, clock=clock)
    await_islands(config, members, lambda: False, has_progress=False, clock=clock)
    assert not caplog.messages
    with pytest.raises(RendezvousError, match=r"islands \[1\] have not joined within 5 s"):
        await_islands(config, members, lambda: False, has_progress=True, clock=clock)
    assert caplog.messages == [f"island 0: waiting for island 1 at {url} (3 s of 5 s)"]
    again = Members(log, 1, clock=clock)
    again.enter()
    again.leave("finished")
    await_islands(config, members, lambda: False, has_progress=True, clock=clock)
    late = Members(log, 0, clock=clock)  # which has not heard of the other while it was there
    await_islands(config, late, lambda: False, has_progress=True, clock=clock)


def test_a_round_in_a_store_says_who_is_late(log: RunLog, clock: StillClock, caplog: pytest.LogCaptureFixture) -> None:
    members = [Members(log, island, clock=clock) for island in (0, 1)]
    for member in members:
        member.enter()
        member.standing.phase = "training"
        member.heartbeat()
    members[0].look()
    quorum = Quorum(members[0], Rules(min_islands=2, patience=5), clock=clock)
    offer = OfferRecord(island=0, incarnation=1, serial=1, state="ab", weight=1.0, norm=1.0, steps=1, objects=[{}])
    with pytest.raises(IslandLostError):
        quorum.convene(quorum.current(1), offer)
    assert caplog.messages == ["island 0: round 1: waiting for island 1 (3 s of 5 s)"]


def test_who_finds_its_number_taken_says_what_it_waits_for(
    log: RunLog, clock: StillClock, caplog: pytest.LogCaptureFixture
) -> None:
    log.create("incarnations/0/000001.json", IncarnationRecord(host="far", machine="other", pid=7, folder=""))
    Members(log, 0, lease=10, clock=clock).enter()
    (line,) = [message for message in caplog.messages if "waiting for" in message]
    assert line.startswith("island 0: start: waiting for a heartbeat of the process that had this number before")
    assert line.endswith("(process 7 on far) (3 s of 10 s)")
