"""Islands with identities, in an encrypted store: what lies there, and what becomes of one that others do not list."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_diloco.cli.status import render
from hf_diloco.errors import RendezvousError, StoreError
from hf_diloco.membership import heartbeats
from hf_diloco.membership.decisions import MAX_ATTEMPTS, Decisions
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord, Participant, PlanRecord, author_of
from hf_diloco.membership.run import open_run
from hf_diloco.membership.voting import Voting
from hf_diloco.rounds.elastic_rounds import MAX_IN_A_ROW
from hf_diloco.sealing.channel import Agreement
from hf_diloco.status.observer import Observer
from hf_diloco.store.credentials import find_credentials, make_identity
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.transport import meeting as connecting
from tests.clocks import LONG, FastClock
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting
from tests.secret_files import forms_of, make_secrets, text_of

EVERYTHING = 1 << 30
FIRST = "rounds/00000001/00"


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of three islands with a key and an identity each."""
    monkeypatch.delenv("HF_DILOCO_IDENTITY", raising=False)
    return make_secrets(tmp_path, 3)


def objects(url: str) -> dict[str, bytes]:
    store = ObjectStore(url)
    return {path: store.get(path, EVERYTHING) or b"" for path, _ in store.list()}


@pytest.mark.parametrize("engine", ["bucket", "mesh"])
def test_who_keeps_the_store_reads_nothing_and_the_islands_train_as_without(
    tmp_path: Path, secrets: dict[str, Any], engine: str
) -> None:
    def train(**settings: Any) -> tuple[Meeting, list[torch.Tensor]]:
        meeting = Meeting(tmp_path / ("sealed" if settings else "bare"), 2, **ENGINES[engine], **settings)
        return meeting, run_islands(2, lambda island: meeting.island(island).train(6).leave().weights)

    bare, expected = train()
    sealed, found = train(**secrets, encrypt_store=True)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    in_clear = [data for path, data in objects(bare.url).items() if path.endswith(".bin")]
    assert in_clear
    for path, data in objects(sealed.url).items():
        if path.endswith(".json"):
            assert json.loads(data).keys() == {"sealed"}, path
        else:
            assert not any(plain[at : at + 16] in data for plain in in_clear for at in range(0, len(plain), 16)), path
    key = secrets["key_file"].read_bytes().strip()
    status = Observer(ObjectStore(sealed.url, read_only=True), key).look()
    assert [entry.participants for entry in status.rounds] == [[0, 1]] * 3
    with pytest.raises(RendezvousError, match="was begun with another key"):
        Observer(ObjectStore(sealed.url, read_only=True), b"")


def test_an_island_that_was_taken_out_is_refused_by_name_and_the_others_train(
    tmp_path: Path, secrets: dict[str, Any], fast_clock: FastClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds the run's key, and has yet to hear that its identity is listed no more."""
    meeting = Meeting(tmp_path / "run", 2, max_islands=3, min_islands=2, **secrets)
    others = {island: keys for island, keys in secrets["identities"].items() if island != 2}
    started, is_done = threading.Event(), threading.Event()

    def run(island: int) -> str:
        if island == 2:
            started.wait(60)
            try:
                with pytest.raises(RendezvousError) as caught:
                    meeting.island(2)
                return str(caught.value)
            finally:
                is_done.set()
        member = meeting.island(island, identities=others)
        member.train(2)
        started.set()
        is_done.wait(60)
        member.train(4)
        assert len(member.reports) == 3
        member.leave()
        return ""

    *_, said = run_islands(3, run)
    assert "rejects island 2, whose identity ed25519:" in said
    assert "is not listed there (identities.2)" in said


def test_islands_that_were_killed_refuse_nobody(
    tmp_path: Path, secrets: dict[str, Any], fast_clock: FastClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Island 0 gets another key, and what island 1 listed before lies in the store."""
    meeting = Meeting(tmp_path / "run", 2, **secrets)
    for member in run_islands(2, lambda island: meeting.island(island).train(2)):
        member.die()
    monkeypatch.setattr(heartbeats, "_runs", lambda pid: False)  # as is seen at once on the machine where they were
    old, new = secrets["identities"], tmp_path / "new.pem"
    identities = {**old, 0: [f"{old[0][0]} until 1", text_of(make_identity(new))]}

    def come_back(island: int) -> int:
        fast_clock.sleep(2.0 * island)
        identity = secrets["identity_file"] if island else new
        return meeting.island(island, identities=identities, identity_file=identity).session.outer.round

    assert run_islands(2, come_back) == [1, 1]


def test_what_an_unlisted_island_leaves_in_the_store_is_refused_and_shown(
    tmp_path: Path, secrets: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It was there first, and so met nobody who could tell it."""
    meeting = Meeting(tmp_path / "run", 1, max_islands=3, min_islands=1, **secrets)
    others = {island: keys for island, keys in secrets["identities"].items() if island != 2}
    stranger = meeting.island(2)
    member = meeting.island(0, identities=others).train(4)
    assert len(member.reports) == 2
    key = secrets["key_file"].read_bytes().strip()
    assert "which is not listed for it here (identities.2)" in member.session.take_refused()[2]
    status = Observer(ObjectStore(meeting.url, read_only=True), key).look()
    refused = next(island for island in status.islands if island.island == 0).refuses
    assert "which is not listed for it here (identities.2)" in refused["2"]
    printed = Console(width=1000, file=StringIO())
    printed.print(render(status))
    assert "warning: island 0 refuses island 2: island 2 shows the identity" in printed.file.getvalue()  # type: ignore[attr-defined]
    stranger.die()
    member.leave()


def test_what_an_island_did_before_it_was_taken_out_stays(
    tmp_path: Path, secrets: dict[str, Any], fast_clock: FastClock
) -> None:
    meeting = Meeting(tmp_path / "run", 1, max_islands=3, min_islands=1, **secrets)
    lost = meeting.island(2).train(4).leave(finished=False)
    retired = {**secrets["identities"], 2: [f"{secrets['identities'][2][0]} until 2"]}
    member = meeting.island(0, identities=retired)
    assert (member.session.outer.round, member.hash) == (2, lost.hash)
    member.train(2)
    assert len(member.reports) == 1
    with pytest.raises(RendezvousError, match=r"island 0 rejects island 2, .* or only until a round"):
        meeting.island(2)
    new = make_identity(tmp_path / "replaced.pem")
    replaced = {**retired, 2: [*retired[2], text_of(new)]}
    member.leave(finished=False)
    again = meeting.island(2, identities=replaced, identity_file=tmp_path / "replaced.pem")
    assert again.session.outer.round == 3
    again.leave()


def test_who_does_not_prove_who_it_is_costs_attempts_and_no_island(
    tmp_path: Path,
    secrets: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody between islands 0 and 2 spoils what the second says while the first attempts connect."""
    for seconds in ("FORGED_SECONDS", "GONE_SECONDS"):
        monkeypatch.setattr(connecting, seconds, 0.2)
    confirm, spoilt = Agreement.confirm, tuple(f"00000001-{attempt:02d}/" for attempt in range(MAX_IN_A_ROW))

    def say(part: Agreement, public: bytes) -> bytes:
        answer = confirm(part, public)
        return bytes(len(answer)) if part._own == 1 and part._name.startswith(spoilt) else answer

    monkeypatch.setattr(Agreement, "confirm", say)
    meeting = Meeting(tmp_path / "run", 2, max_islands=3, grace=LONG, sync_timeout=LONG, **ENGINES["mesh"], **secrets)
    here, there = run_islands(2, lambda place: meeting.island(2 * place).train(6).leave())
    assert here.hash == there.hash
    assert (here.missed, there.missed) == (1, 1)
    assert [report.participants for report in here.reports] == [[0, 2]] * 2
    assert "retrying round 1: islands [2] were refused in round 1 (the process that answered for" in caplog.text
    assert "peer" not in caplog.text
    assert "the process that answered for island 2" in here.session.take_refused()[2]
    status = Observer(ObjectStore(meeting.url, read_only=True), secrets["key_file"].read_bytes().strip()).look()
    assert "the process that answered for island 2 does not hold the run's key" in status.islands[0].refuses["2"]


def test_a_link_that_is_attacked_for_good_costs_one_of_its_ends_the_rounds(
    tmp_path: Path, secrets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between islands 0 and 2 spoils all that the second says to the first."""
    for seconds in ("FORGED_SECONDS", "GONE_SECONDS"):
        monkeypatch.setattr(connecting, seconds, 0.2)
    confirm = Agreement.confirm

    def say(part: Agreement, public: bytes) -> bytes:
        answer, ends = confirm(part, public), [part._parties.island(end) for end in (part._own, part._peer)]
        return bytes(len(answer)) if ends == [2, 0] else answer

    monkeypatch.setattr(Agreement, "confirm", say)
    patient: dict[str, Any] = {"grace": LONG, "sync_timeout": LONG}
    meeting = Meeting(tmp_path / "run", 3, num_rounds=3, min_islands=2, **patient, **ENGINES["mesh"], **secrets)
    members = run_islands(3, lambda island: meeting.island(island).train_to(3).leave())
    assert len({member.hash for member in members}) == 1
    status = Observer(ObjectStore(meeting.url, read_only=True), secrets["key_file"].read_bytes().strip()).look()
    for entry in status.rounds:
        assert len(entry.participants) == 2
        assert set(entry.participants) != {0, 2}
    assert all(entry.attempts <= MAX_IN_A_ROW for entry in status.rounds)


@pytest.mark.parametrize("num_attempts", [20, MAX_ATTEMPTS])
def test_a_listed_island_that_aborts_attempts_costs_rounds_and_no_run(
    tmp_path: Path, secrets: dict[str, Any], fast_clock: FastClock, num_attempts: int
) -> None:
    """It takes no part, and says of each attempt of the first round that it came to nothing."""
    meeting = Meeting(tmp_path / "run", 2, max_islands=3, **secrets)
    islands = run_islands(2, meeting.island)
    plan = PlanRecord(by=2, state=islands[0].hash, participants=[take_part(2)])
    log = log_of(meeting, 2)
    for attempt in range(num_attempts):
        log.create(f"rounds/00000001/{attempt:02d}/plan.json", plan)
        log.create(f"rounds/00000001/{attempt:02d}/outcome.json", OutcomeRecord(by=2, kind="abort", reason="no"))
    if num_attempts < MAX_ATTEMPTS:
        run_islands(2, lambda island: islands[island].train_to(1).leave())
        assert islands[0].hash == islands[1].hash
        return
    run_islands(2, lambda island: islands[island].train(4))
    assert [member.missed for member in islands] == [2, 2]
    with pytest.raises(StoreError, match=r"all 100 attempts of round 1 .* because: no\. Look .* with an empty prefix"):
        islands[0].session.rounds.find()


def log_of(meeting: Meeting, island: int) -> RunLog:
    """What an island reads and writes in the store, though it takes no part."""
    store, credentials = ObjectStore(meeting.url), find_credentials(meeting.config(island), island)
    run, _ = open_run(store, credentials.key)
    return RunLog(store, credentials.seal(run.run))


def take_part(island: int) -> Participant:
    return Participant(offer=f"{FIRST}/offers/{author_of(island, 1)}-000000.json", island=island, weight=1.0, norm=1.0)


FORGED_PLANS: dict[str, Callable[[PlanRecord], dict[str, Any]]] = {
    "weight": lambda plan: {"participants": [plan.participants[0].model_copy(update={"weight": 1e9})]},
    "norm": lambda plan: {"participants": [one.model_copy(update={"norm": 0.0}) for one in plan.participants]},
    "twice": lambda plan: {"participants": [*plan.participants, plan.participants[0]]},
    "state": lambda plan: {"state": "0" * 32},
    "rates": lambda plan: {"rates": [1e9]},
    "alone": lambda plan: {"state": "0" * 32, "participants": [take_part(2)]},
}


@pytest.mark.parametrize("forge", FORGED_PLANS.values(), ids=FORGED_PLANS)
def test_a_plan_that_says_otherwise_than_the_offers_is_refused(
    tmp_path: Path,
    secrets: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    forge: Callable[[PlanRecord], dict[str, Any]],
) -> None:
    """A listed island that takes no part writes it first."""
    meeting = Meeting(tmp_path / "run", 2, max_islands=3, grace=LONG, sync_timeout=LONG, **secrets)
    decide_plan = Decisions.decide_plan

    def forestalled(decisions: Decisions, attempt: str, wish: PlanRecord) -> PlanRecord:
        if attempt == FIRST:
            log, plan = log_of(meeting, 2), wish.model_copy(update={"by": 2, **forge(wish)})
            offer = OfferRecord(
                island=2, incarnation=1, serial=0, steps=2, weight=1.0, norm=1.0, state=plan.state, objects=[{}]
            )
            log.create(take_part(2).offer, offer)
            log.create(f"{attempt}/plan.json", plan)
        return decide_plan(decisions, attempt, wish)

    monkeypatch.setattr(Decisions, "decide_plan", forestalled)
    here, there = run_islands(2, lambda island: meeting.island(island).train(4).leave())
    assert here.hash == there.hash
    assert [report.participants for report in here.reports] == [[0, 1]] * 2
    assert f"the plan that island 2 wrote ({FIRST})" in here.session.take_refused()[2]


@pytest.mark.parametrize("engine", ["bucket", "mesh"])
@pytest.mark.parametrize("is_early", [True, False], ids=["before the votes", "after them"])
def test_a_commit_for_which_nobody_voted_is_refused(
    tmp_path: Path, secrets: dict[str, Any], monkeypatch: pytest.MonkeyPatch, engine: str, is_early: bool
) -> None:
    """A listed island that takes no part writes it first."""
    meeting = Meeting(tmp_path / "run", 2, max_islands=3, grace=LONG, sync_timeout=LONG, **ENGINES[engine], **secrets)
    kind, name = (Voting, "vote") if is_early else (Decisions, "decide")
    forestall = getattr(kind, name)

    def forestalled(self: object, attempt: str, *others: Any, **named: Any) -> Any:
        if attempt == FIRST:
            log_of(meeting, 2).create(f"{attempt}/outcome.json", OutcomeRecord(by=2, kind="commit", mean="0" * 32))
        return forestall(self, attempt, *others, **named)

    monkeypatch.setattr(kind, name, forestalled)
    here, there = run_islands(2, lambda island: meeting.island(island).train(4).leave())
    assert here.hash == there.hash
    assert {here.session.outer.round, there.session.outer.round} == {2}
    refused = here.session.take_refused() | there.session.take_refused()
    assert f"island 2 wrote {FIRST}/outcome.json" in refused[2]
    late = meeting.island(2).leave()
    assert late.hash == here.hash


def test_islands_that_differ_in_their_secrets_are_told_at_the_start(tmp_path: Path, secrets: dict[str, Any]) -> None:
    key_alone = {"key_file": secrets["key_file"]}
    for first, second, message in (
        (secrets, key_alone, r"identities differs \(the run, begun by island 0: listed; island 1: None\)"),
        (key_alone, secrets, r"identities differs \(the run, begun by island 0: None; island 1: listed\)"),
        ({**key_alone, "encrypt_store": True}, key_alone, r"store differs \(the run, .*: encrypted; island 1: None\)"),
    ):
        meeting = Meeting(tmp_path / "run", 1, max_islands=2, min_islands=1)
        here = meeting.island(0, **first)
        with pytest.raises(RendezvousError, match=message):
            meeting.island(1, **second)
        here.leave()


def test_no_key_is_in_what_islands_leave(
    tmp_path: Path, secrets: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Objects of the store, a checkpoint and the log; in bytes, hexadecimal and base64."""
    caplog.set_level(logging.DEBUG)
    meeting = Meeting(tmp_path / "run", 1, max_islands=2, min_islands=1, **secrets)
    member = meeting.island(0).train(4)
    member.save(tmp_path / "checkpoint")
    member.leave()
    left = {**objects(meeting.url), "log": caplog.text.encode()}
    left |= {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    forms = forms_of(secrets, 0)
    for name, data in left.items():
        assert not any(form in data for form in forms), name
    assert any(secrets["identities"][0][0].encode() in data for data in left.values())
