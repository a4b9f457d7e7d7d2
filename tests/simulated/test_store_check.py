"""`hf-diloco store check` on stores of real runs: all that lies there is right, or explained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_diloco.cli.main import app
from hf_diloco.errors import RendezvousError
from hf_diloco.membership import decisions as deciding
from hf_diloco.membership.round_records import SnapshotRecord
from hf_diloco.membership.run import open_run
from hf_diloco.status import check
from hf_diloco.status.check import CheckReport, check_store, set_aside
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import MAX_RECORD_BYTES
from tests.clocks import LONG, FastClock, StillClock
from tests.islands import run_islands
from tests.meetings import Meeting
from tests.rubbish import JUNK, throw
from tests.secret_files import make_secrets


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch, fast_clock: FastClock) -> None:
    monkeypatch.setattr(deciding, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(check, "STILL_SECONDS", 0.1)


def look(url: str, key: bytes = b"", is_deep: bool = False) -> CheckReport:
    return check_store(ObjectStore(url), key, is_deep)


def kinds(report: CheckReport) -> dict[str, str]:
    return {finding.path: finding.kind for finding in report.findings}


def command(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["store", "check", *words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    meeting = Meeting(tmp_path, 2, snapshot_every=2, keep_rounds=1)
    meeting.url = f"file://{tmp_path}/store"
    return meeting


@pytest.mark.parametrize("exchange", ["bucket", "mesh"])
def test_a_run_under_way_and_over_is_clean(meeting: Meeting, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DILOCO_KEY", "k" * 32)
    monkeypatch.setattr(check, "STILL_SECONDS", 3.0)  # of a busy machine: averages are written behind the steps
    meeting.settings |= {"exchange": exchange} | ({"bind_address": "127.0.0.1"} if exchange == "mesh" else {})
    islands = run_islands(2, lambda island: meeting.island(island).train(6))
    assert look(meeting.url, b"k" * 32, is_deep=True).findings == []
    run_islands(2, lambda island: islands[island].leave())
    output = command(meeting.url, "--deep").output
    assert "found     nothing wrong" in output
    with pytest.raises(RendezvousError, match="another key"):
        look(meeting.url)


class ActingClock(StillClock):
    """One who waits by it finds that something has happened meanwhile."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._act()


def test_an_average_is_not_left_over_where_its_record_comes_a_moment_later(meeting: Meeting) -> None:
    meeting.settings |= {"exchange": "mesh", "bind_address": "127.0.0.1"}
    islands = run_islands(2, lambda island: meeting.island(island).train(6))
    run_islands(2, lambda island: islands[island].leave())
    store = ObjectStore(meeting.url)
    (average,) = (path for path, _ in store.list("payloads/00000003"))
    (path,) = (path for path, _ in store.list("rounds/00000003") if "/mean/" in path)
    record = store.get(path, MAX_RECORD_BYTES)
    assert record is not None
    store.delete([path])
    nothing = ActingClock(lambda: None)
    assert kinds(check_store(store, b"", clock=nothing)) == {average: "abandoned"}
    assert nothing.time > StillClock().time
    assert kinds(check_store(store, b"", clock=ActingClock(lambda: store.put(path, record)))) == {}


def test_what_islands_clear_up_meanwhile_is_neither_found_nor_missed(meeting: Meeting) -> None:
    meeting.settings |= {"snapshot_every": 1}
    islands = run_islands(2, lambda island: meeting.island(island).train(6))
    run_islands(2, lambda island: islands[island].leave())
    store = ObjectStore(meeting.url)
    newest = max(path for path, _ in store.list("snapshots"))
    older = newest.replace("00000003", "00000001").replace(".json", "-anchor.bin")
    store.put(older, b"the rest of one that is cleared up")
    assert kinds(check_store(store, b"", clock=ActingClock(lambda: store.delete([older])))) == {}
    store.put(older, b"the rest of one that nobody clears up")
    report = check_store(store, b"", clock=ActingClock(lambda: None))
    assert kinds(report) == {older: "abandoned"}
    store.delete([older])
    repaired = set_aside(store, report)
    assert [finding.moved_to for finding in repaired.findings] == ["(nowhere: it is gone by now)"]
    assert repaired.is_clean


def test_everything_that_was_thrown_into_a_store_is_explained_and_set_aside(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, snapshot_every=2, keep_rounds=1, grace=LONG, sync_timeout=LONG)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    store = ObjectStore(meeting.url)
    throw(store)
    run_islands(2, lambda island: islands[island].train(10))
    found = kinds(look(meeting.url))
    written_over = {path for path in JUNK if path not in found}
    assert written_over == {
        "rounds/00000005/00/votes/00001.json",
        "snapshots/00000000/00000-000001/rank-00001.json",  # cleared up
    }
    assert found["incarnations/0/999999.json"] == "damaged"
    assert found["heartbeats/1/000009.json"] == "forged"
    assert found["rounds/00000002/00/plan.json"] == found["rounds/00000003/00/outcome.json"] == "settled"
    assert found["elsewhere/notes.txt"] == "foreign"
    repaired = set_aside(store, look(meeting.url))
    assert {it.kind for it in repaired.findings if not it.moved_to} == {"settled", "foreign"}
    assert store.get("damaged/incarnations/0/999999.json", 10) == b"junk"
    assert set(kinds(look(meeting.url)).values()) == {"settled", "foreign"}
    run_islands(2, lambda island: islands[island].train(2))
    assert islands[0].hash == islands[1].hash


def test_what_a_killed_process_leaves_is_found_and_set_aside(meeting: Meeting, tmp_path: Path) -> None:
    islands = run_islands(2, lambda island: meeting.island(island).train(8))
    run_islands(2, lambda island: islands[island].leave())
    root = tmp_path / "store"
    orphan = root / "payloads/00000004/00001-000001-77/rank-00000.bin"
    orphan.parent.mkdir()
    orphan.write_bytes(b"never offered")
    (orphan.parent / "rank-00001.bin#9-ab").write_bytes(b"half")
    (root / "payloads/00000003").mkdir(exist_ok=True)
    (root / "checks").mkdir()
    (root / "checks/77").write_bytes(b"first")
    (root / "snapshots/00000001/00001-000001").mkdir(parents=True)
    (root / "snapshots/00000001/00001-000001/rank-00000-anchor.bin").write_bytes(b"part")
    (root / "snapshots/00000099").symlink_to(tmp_path)
    listing = json.loads(command(meeting.url, "--json", code=1).stdout)
    assert {it["path"]: it["kind"] for it in listing["findings"]} == {
        "checks/77": "abandoned",
        "payloads/00000003/": "abandoned",
        "payloads/00000004/00001-000001-77/rank-00000.bin": "abandoned",
        "payloads/00000004/00001-000001-77/rank-00001.bin#9-ab": "abandoned",
        "snapshots/00000001/00001-000001/rank-00000-anchor.bin": "abandoned",
        "snapshots/00000099": "forged",
    }
    assert "5 abandoned, 1 forged" in command(meeting.url, code=1).output
    assert "moved to damaged/snapshots/00000099" in command(meeting.url, "--repair").output
    assert "nothing wrong" in command(meeting.url).output
    assert (root / "damaged/payloads/00000004/00001-000001-77/rank-00001.bin+9-ab").read_bytes() == b"half"
    assert (root / "damaged/snapshots/00000099").is_symlink()


def test_values_that_are_gone_or_changed(meeting: Meeting) -> None:
    islands = run_islands(2, lambda island: meeting.island(island).train(10))
    run_islands(2, lambda island: islands[island].leave())
    store = ObjectStore(meeting.url)
    anchor, *_ = (path for path, _ in store.list("snapshots/00000004") if path.endswith(".bin"))
    gone, short = (path for path, _ in store.list("payloads/00000005"))
    store.put(anchor, bytes(dict(store.list())[anchor]))
    store.put(short, b"short")
    store.delete([gone])
    assert kinds(look(meeting.url)) == {gone: "damaged", short: "damaged"}
    assert kinds(look(meeting.url, is_deep=True)) == {gone: "damaged", short: "damaged", anchor: "damaged"}


def test_a_broken_plan_of_a_round_that_islands_may_be_at_stays(meeting: Meeting) -> None:
    """Without it, they would take the round in another way than those who have passed over it."""
    run_islands(2, lambda island: meeting.island(island).train(4))
    plans = [f"rounds/{number:08d}/00/plan.json" for number in (3, 4)]
    for plan in plans:
        ObjectStore(meeting.url).put(plan, b"{")
    output = command(meeting.url, "--repair", code=1).output
    assert re.search(rf"damaged {plans[0]}.* \(it stays: islands pass over it by themselves\)", output)
    assert re.search(rf"damaged {plans[1]}.*; moved to damaged/{plans[1]}", output), "nobody can be at the round after"
    assert ObjectStore(meeting.url).get(plans[0], 10) == b"{"


def test_values_that_are_announced_where_none_can_be(tmp_path: Path) -> None:
    """By whoever can seal records: without a key, everybody."""
    meeting = Meeting(tmp_path, 1)
    meeting.island(0).train(2).leave()
    log = open_run(ObjectStore(meeting.url), b"")[1]
    path = "snapshots/00000000/00000-000001/rank-00000.json"
    record = log.read(path, SnapshotRecord)
    assert record is not None
    log.put(path, record.model_copy(update={"tensors": {"anchor": {"path": "nowhere", "num_bytes": 5}}}))
    assert path not in kinds(look(meeting.url)), "it is a record, though of nothing"


@pytest.mark.parametrize("encrypt_store", [False, True])
def test_a_record_of_another_place_is_forged_however_it_is_sealed(
    tmp_path: Path, encrypt_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_DILOCO_IDENTITY", raising=False)
    secrets = make_secrets(tmp_path, 1)
    meeting = Meeting(tmp_path, 1, encrypt_store=encrypt_store, **secrets)
    meeting.island(0).train(2).leave()
    store = ObjectStore(meeting.url)
    record = store.get("heartbeats/0/000001.json", MAX_RECORD_BYTES)
    assert record is not None
    store.put("heartbeats/0/000009.json", record)
    store.put("heartbeats/0/000010.json", b'{"wind": "north"}')
    assert kinds(look(meeting.url, secrets["key_file"].read_bytes().strip())) == {
        "heartbeats/0/000009.json": "forged",
        "heartbeats/0/000010.json": "damaged",
    }


def test_where_there_is_no_run_or_no_name_of_it(meeting: Meeting, tmp_path: Path) -> None:
    ObjectStore(meeting.url).put("heartbeats/0/000001.json", b"{}")
    with pytest.raises(RendezvousError, match=r"run\.json, which names that run, is gone"):
        look(meeting.url)
    with pytest.raises(RendezvousError, match="there is no run at"):
        look(f"file://{tmp_path}/none")
