"""`hf-diloco status`: what it says of real runs in a store, of damaged ones, and where there is none."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_diloco.cli.status import render, run_status
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, DiLoCoError, IslandLostError, RendezvousError, StoreError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.open import open_node
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership import unanimity
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord, PlanRecord
from hf_diloco.membership.run import open_run
from hf_diloco.methods.topology import make_topology
from hf_diloco.status.models import IslandStatus, RunStatus, figures
from hf_diloco.status.observer import Observer, observe
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES
from hf_diloco.transport.open import MeshTransport
from hf_diloco.utils.tables import print_figures, within
from tests.clocks import AT_ONCE, StillClock
from tests.fixed_runs import FixedIsland
from tests.islands import run_islands, try_islands
from tests.meetings import Meeting, Member, offer_spoilt
from tests.processes import Completed, Processes, find_free_port, run
from tests.report_runs import start as start_record, write_island, write_run

PROGRAM = [sys.executable, "-m", "hf_diloco.cli", "status"]
ENV = {"NO_COLOR": "1", "COLUMNS": "200"}
pytestmark = pytest.mark.usefixtures("quick_heartbeats")
KEY = "0123456789abcdef"


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    """A run of two islands in a folder."""
    meeting = Meeting(tmp_path, 2, grace=1.0)
    meeting.url = f"file://{tmp_path}/store"
    return meeting


def start(meeting: Meeting, num_steps: int = 6) -> list[Member]:
    return run_islands(2, lambda island: meeting.island(island).train(num_steps))


def status(*arguments: str | Path, expect: int = 0, **env: str) -> Completed:
    return run([*PROGRAM, *arguments], timeout=60, expect=expect, env={**ENV, **env})


def give_heartbeat(member: Member) -> None:
    """The next look finds where the island stands now, and not where it stood at its last heartbeat."""
    assert member.session.members is not None
    member.session.members.heartbeat()


def look(meeting: Meeting, **settings: Any) -> RunStatus:
    return Observer(ObjectStore(meeting.url, read_only=True), b"", **settings).look()


def shown(found: RunStatus, width: int = 200) -> str:
    console = Console(width=width, file=None)
    with console.capture() as capture:
        print_figures(console, *render(found).renderables)
    return capture.get()


def watched(found: RunStatus, width: int) -> str:
    console = Console(width=width, file=None)
    with console.capture() as capture:
        console.print(within(console, render(found)))
    return capture.get()


def test_islands_and_rounds(meeting: Meeting) -> None:
    islands = start(meeting, 7)
    for member in islands:
        give_heartbeat(member)
    found = look(meeting)
    assert (found.round, found.num_rounds, found.begun_by in (0, 1), found.has_key) == (3, None, True, False)
    assert found.run == islands[0].session.outer.run
    assert found.settings["sync_every"] == 2
    assert [(i.island, i.incarnation, i.phase, i.round, i.lag, i.num_ranks) for i in found.islands] == [
        (0, 1, "training", 3, 0, 1),
        (1, 1, "training", 3, 0, 1),
    ]
    assert [entry.round for entry in found.rounds] == [3, 2, 1]
    for entry in found.rounds:
        assert (entry.state, entry.attempts, entry.participants) == ("committed", 1, [0, 1])
        assert entry.payload_bytes == 2 * 4 * islands[0].session.outer.current.partition.numel
        assert entry.left_out == {}
        assert (entry.seconds is None) == (entry.round == 1)
    slow = [island.model_copy(update={"tokens_per_second": 0.4}) for island in found.islands]
    assert " 0.4 " in shown(found.model_copy(update={"islands": slow}))
    assert found.refused == {}
    assert found.snapshot is not None
    assert (found.snapshot.round, found.snapshot.num_parts) == (0, 1)
    store = ObjectStore(meeting.url)
    stored = found.stored
    assert stored.payloads == sum(size for _, size in store.list("payloads"))
    assert stored.snapshots == sum(size for _, size in store.list("snapshots"))
    heartbeats = sum(size for _, size in store.list("heartbeats"))  # which go on, and change in size
    rest = stored.payloads + stored.snapshots + stored.records - sum(size for _, size in store.list())
    assert abs(rest) < heartbeats
    assert [entry.round for entry in look(meeting, num_rounds=2).rounds] == [3, 2]


def test_looking_changes_nothing(meeting: Meeting) -> None:
    for member in start(meeting):
        member.leave()
    store = ObjectStore(meeting.url)
    before = store.entries()
    assert {island.presence for island in look(meeting).islands} == {"ended"}
    assert store.entries() == before


def test_an_island_is_alive_while_its_heartbeat_changes(meeting: Meeting) -> None:
    start(meeting)[1].die()
    found = json.loads(status(meeting.url, "--json").output)
    assert [(island["island"], island["presence"]) for island in found["islands"]] == [(0, "alive"), (1, "silent")]
    assert found["islands"][1]["seconds_silent"] >= 4.5  # a heartbeat may be late: the program's own are 2 s apart
    assert RunStatus.model_validate(found).round == 3
    assert re.search(r"^ +1 .*silent \d+ s", shown(RunStatus.model_validate(found)), re.MULTILINE)


def test_silence_is_measured_by_this_machines_clock_alone(meeting: Meeting) -> None:
    islands = start(meeting, 2)
    for member in islands:
        member.die()
    clock = StillClock()
    observer = Observer(ObjectStore(meeting.url), b"", clock=clock)

    def presence() -> list[tuple[str, float]]:
        return [(island.presence, island.seconds_silent) for island in observer.look().islands]

    assert presence() == [("unknown", 0), ("unknown", 0)]
    clock.sleep(0.2)
    give_heartbeat(islands[0])
    assert presence() == [("alive", 0), ("unknown", 0.2)]
    clock.sleep(10)
    assert presence() == [("silent", 10), ("silent", 10.2)]
    give_heartbeat(islands[0])
    assert presence() == [("alive", 0), ("silent", 10.2)]
    assert observer.look_until_known().islands[1].presence == "silent"


def test_a_restarted_island_is_its_newest_process(meeting: Meeting) -> None:
    start(meeting, 2)[1].leave(finished=False)
    give_heartbeat(meeting.island(1))
    found = look(meeting).islands[1]
    assert (found.incarnation, found.phase) == (2, "training")


def test_lag_is_counted_from_the_newest_round(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.0)
    first, _ = run_islands(2, lambda island: meeting.island(island))
    first.train(6)
    give_heartbeat(first)
    assert [(i.round, i.lag) for i in look(meeting).islands] == [(3, 0), (0, 3)]


def test_an_island_that_is_left_out_is_named_with_the_reason(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=5.0)
    islands = start(meeting, 2)

    offer_spoilt(islands, float("nan"))
    found = look(meeting)
    assert (found.rounds[0].participants, found.rounds[0].left_out) == ([0], {1: "not finite"})
    assert re.search(r"^ +2 +committed +1 +0 +1: not finite ", shown(found), re.MULTILINE)


def test_who_leaves_an_island_out_for_no_reason_is_named(meeting: Meeting) -> None:
    start(meeting, 2)
    _, log = open_run(ObjectStore(meeting.url), b"")
    path = "rounds/00000001/00/plan.json"
    plan = log.read(path, PlanRecord)
    assert plan is not None
    fewer = [participant for participant in plan.participants if participant.island != 0]
    log.put(path, plan.model_copy(update={"by": 1, "participants": fewer, "left_out": {"0": "not finite"}}))
    assert look(meeting).rounds[0].left_out == {0: "not finite, says island 1"}


def test_sizes_that_no_object_has_are_not_added_up(meeting: Meeting) -> None:
    start(meeting, 2)
    _, log = open_run(ObjectStore(meeting.url), b"")
    (path, _) = next(found for found in log.store.list("rounds/00000001/00/offers") if "/00001-" in found[0])
    offer = log.read(path, OfferRecord)
    assert offer is not None
    size = offer.objects[0]["num_bytes"]
    log.put(path, offer.model_copy(update={"objects": [{**offer.objects[0], "num_bytes": 10**400}]}))
    found = look(meeting)
    assert found.rounds[0].payload_bytes == size
    assert "payload" in shown(found)


def test_a_round_that_is_not_committed_yet(meeting: Meeting) -> None:
    islands = start(meeting, 2)
    islands[1].train(1).leave(finished=False)  # leaves what it has done for the next round
    islands[0].leave()
    found = look(meeting)
    assert (found.round, found.rounds[0].round) == (1, 2)
    assert (found.rounds[0].state, found.rounds[0].offered) == ("gathering", [1])
    assert "1 offer so far" in shown(found)


def test_an_attempt_that_was_aborted(meeting: Meeting) -> None:
    for member in start(meeting, 2):
        member.leave()
    store = ObjectStore(meeting.url)
    _, log = open_run(store, b"")
    offer = next(path for path, _ in store.list("rounds") if "/offers/" in path)
    store.delete(["rounds/00000001/00/outcome.json"])
    log.create(
        "rounds/00000001/00/outcome.json", OutcomeRecord(by=0, kind="abort", unusable=offer, reason="cut short")
    )
    (found,) = look(meeting).rounds
    assert (found.state, found.attempts, found.aborted) == ("gathering", 1, ["island 0 says: cut short"])
    assert found.participants == []


def test_objects_of_others_are_refused_and_shown(meeting: Meeting) -> None:
    for member in start(meeting, 4):
        member.leave()
    store = ObjectStore(meeting.url)
    heartbeat = store.get("heartbeats/0/000001.json", 10_000)
    assert heartbeat is not None
    store.put("heartbeats/7/000001.json", heartbeat)  # moved from another island
    store.put("rounds/99999999/00/plan.json", b"\x1b[2J nonsense")
    store.put("incarnations/1/000001.json", b" " * (MAX_RECORD_BYTES + 1))
    found = look(meeting)
    assert found.refused.keys() == {
        "heartbeats/7/000001.json",
        "rounds/99999999/00/plan.json",
        "incarnations/1/000001.json",
    }
    assert [(island.island, bool(island.host)) for island in found.islands] == [(0, True), (1, False)]
    assert found.rounds[0].round == 2
    output = status(meeting.url).output
    assert "warning: refused heartbeats/7/000001.json: the record heartbeats/7/000001.json was not sealed" in output
    assert "warning: refused rounds/99999999/00/plan.json" in output


def test_nothing_that_others_write_reaches_the_terminal_as_a_command(meeting: Meeting) -> None:
    for member in start(meeting, 2):
        member.leave()
    found = look(meeting)
    island: IslandStatus = found.islands[0].model_copy(update={"host": "\x1b[2J[red]evil"})
    assert "?[2J[red]evil" in shown(found.model_copy(update={"islands": [island]}))


def test_a_snapshot_counts_when_it_is_whole(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, snapshot_every=2)
    meeting.island(0).train(10).leave()
    found = look(meeting)
    assert found.snapshot is not None
    assert (found.round, found.snapshot.round, found.snapshot.island) == (5, 4, 0)
    store = ObjectStore(meeting.url)
    store.delete([path for path, _ in store.list("snapshots/00000004") if path.endswith(".json")])
    assert (again := look(meeting).snapshot) is not None
    assert again.round == 2


def test_a_run_with_a_key(meeting: Meeting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DILOCO_KEY", KEY)
    for member in start(meeting, 2):
        member.leave()
    monkeypatch.delenv("HF_DILOCO_KEY")
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    output = status(meeting.url, "--key-file", key_file).output
    assert re.search(r"^key +yes", output, re.MULTILINE)
    for env in ({}, {"HF_DILOCO_KEY": "another key of a run"}):
        output = status(meeting.url, expect=1, **env).output
        assert re.fullmatch(r"error: the run at \S+ was begun with another key[^\n]+ key_file\)[^\n]+\n", output)


def test_the_table(meeting: Meeting) -> None:
    run_islands(2, lambda island: meeting.island(island).train(4).leave())
    output = status(meeting.url).output
    assert re.search(r"^run +[0-9a-f]{12} at file:///\S+, begun by island [01] \(\S+\) *$", output, re.MULTILINE)
    assert re.search(r"^rounds +2 committed, \S+ s each *$", output, re.MULTILINE)
    assert re.search(r"^key +none", output, re.MULTILINE)
    assert re.search(r"^snapshot +round 0 by island [01], \S+ k?B *$", output, re.MULTILINE)
    assert re.search(r"^ +1 +\S+ +finished +— +2 +0 +0 of 2 +\S+ +1 +1$", output, re.MULTILINE)
    assert re.search(r"^ +2 +committed +1 +0, 1 +— +\S+ k?B +\S+ s$", output, re.MULTILINE)


def test_long_host_names_give_way(meeting: Meeting) -> None:
    start(meeting, 7)
    found = look(meeting)
    island = found.islands[0].model_copy(update={"host": "ip-10-0-12-34.eu-west-1.compute.internal"})
    narrow = shown(found.model_copy(update={"islands": [island]}), width=80)
    assert re.search(r"^island +host +phase +life +round +lag +steps", narrow, re.MULTILINE)
    assert re.search(r"^ +0 +ip-\S*… +\w+ +\w+", narrow, re.MULTILINE)
    narrow = shown(found, width=40)
    assert re.search(r"^ +1 +\S+ +\w+ +.* \d of 2 +\S+ +1 +1 *$", narrow, re.MULTILINE), narrow
    assert re.search(r"^ +3 +committed +1 +0, 1 +— +\S+ k?B +\S+ s$", narrow, re.MULTILINE), narrow
    lines = watched(found, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join("".join(lines).split()) == "".join(narrow.split()), "a terminal that watches shows all of it"


@pytest.mark.parametrize(
    ("url", "message", "kind"),
    [
        ("tcp://127.0.0.1:{port}", "no run can be seen at tcp://127.0.0.1:{port} ", RendezvousError),
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT", ConfigError),
        ("udp://127.0.0.1:29400", "status needs the place where the run's islands leave records", ConfigError),
        ("nowhere", "no run folder at nowhere: give the folder that the run wrote", ConfigError),
        ("file:relative", "a folder needs its full path", ConfigError),
        ("s3://", "is no object store", ConfigError),
        ("memory://here", "share no memory: use file:///DIR", ConfigError),
        ("file://{folder}", "there is no run at", RendezvousError),
        ("file://{folder}/none", "there is no folder", RendezvousError),
    ],
)
def test_where_there_is_no_run_one_line_says_so(
    tmp_path: Path, url: str, message: str, kind: type[DiLoCoError]
) -> None:
    port = find_free_port()
    with pytest.raises(kind) as caught:
        run_status(url.format(folder=tmp_path, port=port), None, None, 3, False)
    assert message.format(port=port) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_it_imports_no_torch(meeting: Meeting) -> None:
    run_islands(2, lambda island: meeting.island(island).train(2).leave())
    code = (
        "import sys; from hf_diloco.cli.main import app\n"
        "try: app(['status', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'accelerate', 'numpy', 'matplotlib'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    assert "committed" in run([sys.executable, "-c", code, meeting.url], env=ENV).output


@pytest.mark.distributed
def test_watching_until_ctrl_c(meeting: Meeting) -> None:
    start(meeting)
    with Processes() as processes:
        watching = processes.spawn([*PROGRAM, meeting.url, "--watch", "--json", "--interval", "0.5"], env=ENV)
        watching.wait_for(r'"alive".*"alive".*\n')
        watching.interrupt()
        lines = watching.wait().output.splitlines()
    found = [RunStatus.model_validate_json(line) for line in lines]
    assert [island.presence for island in found[0].islands] == ["unknown", "unknown"]
    assert [island.presence for island in found[-1].islands] == ["alive", "alive"]


@pytest.mark.distributed
def test_watching_on_a_terminal(meeting: Meeting) -> None:
    """Ctrl-C leaves a visible cursor."""
    start(meeting)
    env = {**ENV, "TERM": "xterm", "COLUMNS": "150", "LINES": "50", "TTY_COMPATIBLE": "1", "FORCE_COLOR": "1"}
    with Processes() as processes:
        watching = processes.spawn([*PROGRAM, meeting.url, "--watch", "--interval", "0.5"], env=env)
        watching.wait_for(r"(?s)alive.*alive.*alive")
        watching.interrupt()
        output = watching.wait().output
    assert output.rstrip().endswith("\x1b[?25h")


@pytest.mark.distributed
def test_watching_ends_with_the_run(meeting: Meeting) -> None:
    meeting.num_rounds = 3
    islands = start(meeting, 4)
    assert not look(meeting).is_over
    run_islands(2, lambda island: islands[island].train(2).leave())
    assert look(meeting).is_over
    output = status(meeting.url, "--watch").output
    assert re.search(r"^rounds +3 of 3 committed: the run is over *$", output, re.MULTILINE)


def test_watching_goes_on_where_the_store_does_not_answer_once(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting.num_rounds = 3
    islands = start(meeting, 6)
    run_islands(2, lambda island: islands[island].leave())
    answer, silent = Observer.look, [True, False]

    def look(observer: Observer) -> RunStatus:
        if silent.pop(0):
            raise StoreError("the store does not answer")
        return answer(observer)

    monkeypatch.setattr(Observer, "look", look)
    run_status(meeting.url, None, 0.01, 3, False)
    told = capsys.readouterr()
    assert told.err == "warning: the store does not answer\n"
    assert "3 of 3 committed: the run is over" in told.out


def test_how_long_a_run_has_to_go_and_that_no_snapshot_is_whole(meeting: Meeting) -> None:
    start(meeting)
    update = {"num_rounds": 10, "round": 4, "seconds_per_round": 90.0, "snapshot": None}
    told = dict(figures(look(meeting).model_copy(update=update)))
    assert told["rounds"] == "4 of 10 committed, 1 min 30 s each, 9 min 0 s to go"
    assert told["snapshot"] == "none that is whole"


def test_rounds_within_one_second_of_the_clock_of_s3(meeting: Meeting) -> None:
    start(meeting, 4)
    found = look(meeting)
    rounds = [entry.model_copy(update={"seconds": 0.0}) for entry in found.rounds]
    found = found.model_copy(update={"num_rounds": 10, "seconds_per_round": 0.0, "rounds": rounds})
    assert dict(figures(found))["rounds"] == "2 of 10 committed, under 1 s each"
    assert re.search(r"^ +2 +committed .* under 1 s$", shown(found), re.MULTILINE)


def test_a_run_folder_says_where_its_islands_meet(meeting: Meeting, tmp_path: Path) -> None:
    run_islands(2, lambda island: meeting.island(island).train(4).leave())
    folder = write_run(tmp_path / "demo")
    settings = folder / "run.json"
    settings.unlink(missing_ok=True)
    assert "demo does not say where its islands meet. If the run" in status(folder, expect=2).output
    write_island(tmp_path / "script", 0, [start_record(rendezvous=meeting.url)])
    assert "2 committed" in status(tmp_path / "script").output
    settings.write_text(json.dumps({"diloco": None, "model": {}}))
    assert "demo has no islands that meet anywhere; see `hf-diloco report" in status(folder, expect=2).output
    settings.write_text(json.dumps({"diloco": {"rendezvous": meeting.url}}))
    assert "2 committed" in status(folder).output


# Where island 0 keeps the store


def observe_tcp(url: str, key: bytes = b"") -> Observer:
    return observe(url, key, 10, timeout=4.0)


def look_until(observer: Observer, is_true: Callable[[RunStatus], bool]) -> RunStatus:
    """What is written behind the rounds is there in a moment."""
    deadline = time.monotonic() + AT_ONCE
    while not is_true(found := observer.look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def look_until_it_ends(observer: Observer) -> None:
    """Looks until the store is gone, and raises what that look does: what is written there holds it for a moment."""
    deadline = time.monotonic() + AT_ONCE
    while time.monotonic() < deadline:
        gc.collect()
        observer.look()


def test_a_run_of_fixed_membership(tmp_path: Path, free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island, num_rounds=3).train(4))
    observer = observe_tcp(url)
    found = look_until(observer, lambda status: len(status.rounds) == 2)
    assert (found.url, found.begun_by, found.has_key, found.waits_for_all) == (url, 0, False, True)
    assert (found.round, found.num_rounds, found.is_over) == (2, 3, False)
    assert found.settings["num_islands"] == 2
    assert [(entry.round, entry.state, entry.participants) for entry in found.rounds] == [
        (2, "committed", [0, 1]),
        (1, "committed", [0, 1]),
    ]
    assert found.rounds[0].payload_bytes is None, "values go directly between islands"
    assert found.rounds[0].seconds is not None
    table = shown(
        look_until(observer, lambda status: all((one.round, one.phase) == (2, "training") for one in status.islands))
    )
    assert re.search(r"^ +1 +\S+ +training +\S.* 2 +0 +0 of 2 +\S+ +1 +1 *$", table, re.MULTILINE), table
    assert "snapshot" not in table
    assert "direct" in table
    assert [one.folder for one in found.islands] == [str(tmp_path / str(island)) for island in range(2)]
    run_islands(2, lambda island: islands[island].train(2))
    last = look_until(observer, lambda status: len(status.rounds) == 3)
    assert not last.is_over, "the islands are there"
    run_islands(2, lambda island: islands[island].leave())
    assert observer.look().is_over
    islands.clear()
    with pytest.raises(StoreError, match="the process that hosts it has ended, or cannot be reached"):
        look_until_it_ends(observer)


def test_an_island_of_fixed_membership_that_leaves_is_seen_to(tmp_path: Path, free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(2))
    leaves = threading.Thread(target=islands[1].leave)  # which waits until all have said goodbye
    leaves.start()
    found = look_until(observe_tcp(url), lambda status: status.islands[1].phase == "finished")
    assert [island.presence for island in found.islands][1] == "ended"
    islands[0].leave()
    leaves.join()


def test_who_has_come_to_a_round_of_fixed_membership_and_why_it_ended(tmp_path: Path, free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(2))
    ends: list[Any] = []
    waits = threading.Thread(target=lambda: ends.extend(try_islands(1, lambda _: islands[0].train(2))))
    waits.start()
    observer = observe_tcp(url)
    (second, first) = look_until(observer, lambda status: len(status.rounds) == 2).rounds
    assert (first.state, first.participants) == ("committed", [0, 1])
    assert (second.round, second.state, second.offered, second.aborted) == (2, "gathering", [0], [])
    leaves = threading.Thread(target=lambda: islands[1].session.leave(finished=False))
    leaves.start()
    (second, _) = look_until(observer, lambda status: bool(status.rounds[0].aborted)).rounds
    reason = "island 1 left the run before round 2: it was asked to stop (by Ctrl-C, SIGTERM or stop())"
    assert second.aborted == [f"island 1 says: {reason}"]
    waits.join()
    assert isinstance(ends[0], IslandLostError)
    assert reason in str(ends[0])
    islands[0].session.leave(finished=False)
    leaves.join()


def test_a_run_of_fixed_membership_with_a_key(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    url, key_file = f"tcp://127.0.0.1:{free_port}", tmp_path / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island, key_file=key_file).train(2))
    found = look_until(observe_tcp(url, KEY.encode()), lambda status: len(status.rounds) == 1)
    assert (found.has_key, found.refused) == (True, {})
    for key in (b"", b"f" * 16):
        with pytest.raises(RendezvousError, match=r"was begun with another key"):
            observe_tcp(url, key)
    run_islands(2, lambda island: islands[island].leave())


def test_of_many_rounds_of_fixed_membership_the_last_are_kept(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanimity, "KEPT_ATTEMPTS", 2)
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(10))
    found = look_until(observe_tcp(url), lambda status: [entry.round for entry in status.rounds] == [5, 4])
    assert found.round == 5
    run_islands(2, lambda island: islands[island].leave())


def test_a_run_that_waits_for_its_islands(tmp_path: Path, free_port: int) -> None:
    """Before all have come it shows who is there; and before it has begun, that."""
    url = f"tcp://127.0.0.1:{free_port}"
    transport = MeshTransport(DiLoCoConfig(num_islands=2, island=0, rendezvous=url), is_leader=True)
    with pytest.raises(RendezvousError, match="has just begun: look again in a moment"):
        observe_tcp(url)
    del transport
    gc.collect()
    waits = threading.Thread(target=try_islands, args=(1, lambda _: FixedIsland(tmp_path, url, 0, join_timeout=2.0)))
    waits.start()
    observers: list[Observer] = []
    deadline = time.monotonic() + AT_ONCE
    while not observers:
        assert time.monotonic() < deadline
        with contextlib.suppress(RendezvousError):
            observers.append(observe_tcp(url))
    assert [(one.island, one.phase) for one in observers[0].look().islands] == [(0, "joining")]
    waits.join()


def test_watching_a_run_of_fixed_membership_ends_with_its_islands(
    tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(2))
    ends = threading.Timer(0.5, run_islands, (2, lambda island: islands[island].leave()))
    ends.start()
    run_status(url, None, 0.1, 3, False)
    ends.join()
    assert "1 committed: the run is over" in capsys.readouterr().out


def test_watching_a_run_ends_where_island_0_is_gone(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(2))
    answer, answers = Observer.look, iter([True, False, True, False, False, False])

    def look(observer: Observer) -> RunStatus:
        if next(answers):
            return answer(observer)
        raise StoreError("nobody listens there")

    monkeypatch.setattr(Observer, "look", look)
    with pytest.raises(StoreError, match="nobody listens there"):
        run_status(url, None, 0.01, 3, True)
    told = capsys.readouterr()
    assert (told.err.count("warning: nobody listens there\n"), len(told.out.splitlines())) == (3, 2)
    run_islands(2, lambda island: islands[island].leave())


def test_a_run_of_nodes(tmp_path: Path, free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    topology = make_topology("ring", 3)

    def begin(number: int) -> NodeNeighbours:
        node = open_node(GossipConfig(num_nodes=3, node=number, rendezvous=url), topology, IslandGroup())
        vector = torch.full((1000,), float(number))
        for step in range(2):
            node.mix([vector], [vector], step)
        node.standing.steps = 2
        node.set_phase("training")
        return node

    nodes = run_islands(3, begin)
    observer = observe_tcp(url)
    found = look_until(observer, lambda status: [node.steps for node in status.islands] == [2, 2, 2])
    assert (found.unit, found.round, found.rounds, found.is_over) == ("node", 0, [], False)
    assert {node.presence for node in observer.look_until_known().islands} == {"alive"}
    table = shown(found)
    assert re.search(r"^nodes +3 in a graph \(ring\), by decentlam *$", table, re.MULTILINE), table
    assert re.search(r"^ +2 +\S+ +training +\S.* 2 +1 +1 *$", table, re.MULTILINE), table
    assert "round" not in table
    nodes[2].set_phase("finished")
    nodes[2].close()
    found = look_until(observer, lambda status: status.islands[2].presence == "ended")
    assert found.islands[2].phase == "finished"
    nodes[1].close()
    assert look_until(observer, lambda status: status.islands[1].presence == "ended").islands[1].phase == "left"
    nodes[0].close()
    assert observer.look().is_over


def test_a_run_over_tcp_whose_islands_come_and_go(tmp_path: Path, free_port: int) -> None:
    meeting = Meeting(tmp_path, 2, grace=1.0, min_islands=1, exchange=None)
    meeting.url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: meeting.island(island).train(4))
    found = look_until(observe_tcp(meeting.url), lambda status: status.round == 2)
    assert (found.url, found.waits_for_all) == (meeting.url, False)
    assert found.snapshot is not None
    run_islands(2, lambda island: islands[island].leave())
