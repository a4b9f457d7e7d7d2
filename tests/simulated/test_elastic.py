"""Islands that come and go, as threads that share an object store in memory: what comes out, bit for bit."""

from __future__ import annotations

import base64
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import (
    CheckpointError,
    DamagedTransferError,
    DivergedError,
    DuplicateIslandError,
    FingerprintError,
    IslandLostError,
    PayloadError,
    RendezvousError,
    StoreError,
)
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import LanePartition
from hf_diloco.membership.heartbeats import LEASE_SECONDS
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OutcomeRecord, Participant, PlanRecord, Snapshot
from hf_diloco.membership.run import open_run
from hf_diloco.rounds import joining
from hf_diloco.rounds.direct import SegmentedMesh
from hf_diloco.rounds.elastic import ElasticSession
from hf_diloco.rounds.elastic_rounds import ElasticRounds
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.joining import Joining, await_islands
from hf_diloco.rounds.round import SyncClock, capture
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.status.check import check_store
from hf_diloco.status.observer import Observer
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.values import BytesRecord, ValueStore
from hf_diloco.transport import meeting as connecting
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.objects import ObjectInfo
from hf_diloco.transport.open import MemoryTransport
from tests.clocks import LONG, FastClock, wait_until
from tests.islands import run_islands, try_islands
from tests.meetings import ENGINES, FEDAVG, BrokenStore, Meeting, Member, make_optimizer, offer_spoilt, sent_of
from tests.small_model import batches, make_model, take_step, weights_of

pytestmark = pytest.mark.usefixtures("fast_clock")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever the engine, the same must come out."""
    metafunc.parametrize("engine", getattr(metafunc.function, "engines", list(ENGINES)), indirect=True)


def only(engine: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of what just this engine does."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.engines = [engine]  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Meeting, "engine", ENGINES[request.param])
    return str(request.param)


def train_fixed(num_islands: int, num_steps: int, width: int = 8, **settings: Any) -> list[torch.Tensor]:
    """The same training in a run of fixed membership."""
    network, store = MemoryNetwork(num_islands), ValueStore.in_memory()
    config = {"sync_every": 2, "num_islands": num_islands, "rendezvous": "tcp://127.0.0.1:1", **settings}

    def run(island: int) -> torch.Tensor:
        model = make_model(width=width)
        optimizer = make_optimizer(model, width)
        transport = MemoryTransport(network, store, island)
        session = FixedSession(DiLoCoConfig(island=island, **config), IslandGroup(), transport=transport)
        session.join(open_shards(model, optimizer, 1), Path(f"island-{island}"))
        for batch in itertools.islice(itertools.cycle(batches(100 + island, 64)), num_steps):
            take_step(model, optimizer, batch)
            if session.outer.count_step(weight=4.0):
                session.sync()
        session.leave(finished=True)
        return weights_of(model)

    return run_islands(num_islands, run)


@pytest.mark.parametrize(("num_islands", "payload"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (2, "fp16"), (3, "fp32")])
def test_a_run_in_which_nothing_happens_is_the_mesh_bit_for_bit(
    tmp_path: Path, num_islands: int, payload: str
) -> None:
    """Of three islands or more, the mesh encodes the sum once more, and one alone encodes nothing."""
    meeting = Meeting(tmp_path, num_islands, payload=payload)
    found = run_islands(num_islands, lambda island: meeting.island(island).train(10).leave())
    assert {len(member.reports) for member in found} == {5}
    assert {tuple(report.participants) for member in found for report in member.reports} == {tuple(range(num_islands))}
    for member, expected in zip(found, train_fixed(num_islands, 10, payload=payload), strict=True):
        assert torch.equal(member.weights, expected)


WIDE = 701  # of the hidden layer: 4,908 values, more than a block of any codec
FEEDBACK: list[dict[str, Any]] = [{"payload": "topk"}, {"payload": "sign"}, {"payload": "int4", "error_feedback": 1.0}]


@pytest.mark.parametrize(
    ("num_islands", "settings"),
    [(2, {"payload": "int8"}), *[(2, one) for one in FEEDBACK], (3, {"payload": "topk"}), (3, {"payload": "sign"})],
)
def test_a_run_of_codes_in_which_nothing_happens_is_the_mesh_bit_for_bit(
    tmp_path: Path, num_islands: int, settings: dict[str, Any]
) -> None:
    """Where each island averages by itself."""
    meeting = Meeting(tmp_path, num_islands, width=WIDE, **settings)
    found = run_islands(num_islands, lambda island: meeting.island(island).train(8).leave())
    assert not any(member.missed for member in found)
    assert {tuple(report.participants) for member in found for report in member.reports} == {tuple(range(num_islands))}
    for member, expected in zip(found, train_fixed(num_islands, 8, WIDE, **settings), strict=True):
        assert torch.equal(member.weights, expected)
        block_values = member.session.outer.codec.block_values
        assert all(start % block_values == 0 for start, _ in member.session.outer.current.partition.intervals)


@only("mesh")
def test_three_islands_that_code_the_mean_again_are_the_mesh_bit_for_bit(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, width=WIDE, payload="int8")
    found = run_islands(3, lambda island: meeting.island(island).train(4).leave())
    for member, expected in zip(found, train_fixed(3, 4, WIDE, payload="int8"), strict=True):
        assert torch.equal(member.weights, expected)


@only("bucket")
def test_three_islands_that_need_not_code_the_mean_again_are_closer_to_it(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, width=WIDE, payload="int4")
    found = run_islands(3, lambda island: meeting.island(island).train(2).leave())
    assert len({member.hash for member in found}) == 1
    exact = train_fixed(3, 2, WIDE)[0]
    coded_again = train_fixed(3, 2, WIDE, payload="int4")[0]
    assert (found[0].weights - exact).norm() < 0.9 * (coded_again - exact).norm()


def test_islands_start_from_the_first_ones_weights(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3)
    found = run_islands(3, lambda island: meeting.island(island, seed=island))
    assert len({member.hash for member in found}) == 1
    assert any(torch.equal(found[0].weights, weights_of(make_model(seed))) for seed in range(3))
    assert sum(member.session.speaks_for_all for member in found) == 1
    for member in found:
        assert torch.equal(member.weights, found[0].weights)
        member.leave()


def test_a_killed_island_stalls_nobody_longer_than_its_lease(tmp_path: Path, fast_clock: FastClock) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=60.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    islands[1].die()
    begun = fast_clock.now()
    run_islands(2, lambda which: islands[2 * which].train(4))
    assert fast_clock.now() - begun < LEASE_SECONDS + 3.0
    assert [report.participants for report in islands[0].reports] == [[0, 1, 2], [0, 2], [0, 2]]
    assert islands[0].hash == islands[2].hash


def test_a_killed_island_resumes_and_catches_up(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(3))
    checkpoint = islands[1].save(tmp_path / "checkpoint-3")
    islands[1].die()
    run_islands(2, lambda which: islands[2 * which].train(4))
    again = meeting.island(1, seed=9, checkpoint=checkpoint)
    assert again.session.outer.round == islands[0].session.outer.round == 3
    assert again.hash == islands[0].hash
    assert again.session.outer.steps == 1  # the step since its last round is its own still
    run_islands(3, lambda which: [islands[0], again, islands[2]][which].train_to(7))
    assert len({member.hash for member in (islands[0], again, islands[2])}) == 1
    assert any(1 in report.participants for report in again.reports)


def test_progress_of_an_island_that_missed_rounds_is_kept_on_top_of_the_others(tmp_path: Path) -> None:
    """With FedAvg and one straggler: its masters move by what the outer parameters moved."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.0, **FEDAVG)
    first, late = run_islands(2, lambda island: meeting.island(island))
    start = first.weights
    for _ in range(3):
        late.step()
    progress = late.weights - start
    first.train(4)
    moved = first.weights - start
    assert first.session.outer.round == 2
    late.sync()
    assert late.session.outer.round == 2  # caught up; the first one has just begun its inner steps, so it goes on
    assert (late.session.outer.steps, late.session.outer.current.due_at) == (3, 5)
    assert torch.allclose(late.weights, start + moved + progress, atol=1e-6)
    before = late.weights
    late.step()
    late.step()
    last = late.weights - before
    late.sync()
    # alone in its round: outer parameters = the others' and all its own progress
    assert late.session.outer.round == 3
    assert torch.allclose(late.weights, start + moved + progress + last, atol=1e-6)
    assert late.reports[-1].weight == 2.5  # five steps, and two make a round


@only("bucket")
def test_an_offer_that_was_used_later_is_used_once(tmp_path: Path) -> None:
    """An island that offers, gives up waiting and trains on keeps just what it has done since."""
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=0.2, sync_timeout=0.5, **FEDAVG)
    first, second = run_islands(2, lambda island: meeting.island(island))
    start = first.weights
    first.train(2)
    assert first.missed == 1
    offered = first.weights - start
    first.step()
    since = first.weights - start - offered
    second.train(2)  # finds the first one's offer, so there is a quorum
    assert second.reports[-1].participants == [0, 1]
    mean = second.weights - start
    first.session.outer.current.due_at = 0
    report = first.session.sync()
    assert report.round == 1
    assert first.session.outer.steps == 1
    assert torch.allclose(first.weights, start + mean + since, atol=1e-6)


@only("bucket")
@pytest.mark.parametrize("payload", ["fp32", "topk"])
def test_a_killed_island_keeps_what_it_has_done_since_an_offer_that_was_used(tmp_path: Path, payload: str) -> None:
    """It had given up waiting, trained on and written a checkpoint."""
    settings = {"payload": payload, "width": WIDE, **FEDAVG}
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=0.2, sync_timeout=0.5, **settings)
    first, second = run_islands(2, lambda island: meeting.island(island))
    first.train(2)
    assert first.missed == 1
    sent = sent_of(payload, first.progress)
    first.step()
    since = first.progress - sent
    checkpoint = first.save(tmp_path / "checkpoint")
    first.die()
    second.train(2)  # finds the first one's offer, so there is a quorum
    assert second.reports[-1].participants == [0, 1]
    again = meeting.island(0, checkpoint=checkpoint)
    assert (again.session.outer.round, again.session.outer.steps, again.hash) == (1, 1, second.hash)
    assert torch.allclose(again.progress + again.residual if payload == "topk" else again.progress, since, atol=1e-5)


@only("bucket")
@pytest.mark.parametrize("steps_since", [0, 2])
def test_an_offer_that_was_used_and_is_gone_is_used_once(tmp_path: Path, steps_since: int) -> None:
    """An island offers and hangs; when it wakes up, only a snapshot leads to where the others are."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=2, keep_rounds=1, **FEDAVG)
    first, late = run_islands(2, lambda island: meeting.island(island))
    late.step()
    late.step()
    late.session.rounds.publish_and_leave()
    for _ in range(steps_since):
        late.step()
    progress = late.weights - first.weights
    first.train(16)
    first.session.close()
    assert first.reports[0].participants == [0, 1]
    late.sync()
    assert late.missed == 1  # there is no report of what it has not carried out
    assert late.session.outer.round == 8
    assert late.session.outer.steps == steps_since
    assert torch.allclose(late.weights, first.weights + progress * steps_since / (2 + steps_since), atol=1e-6)


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_snapshot_that_is_cleared_up_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newcomer: bool
) -> None:
    meeting = Meeting(tmp_path, 2, max_islands=3, min_islands=1, grace=0.1, snapshot_every=2, keep_rounds=1)
    first, late = run_islands(2, lambda island: meeting.island(island))
    first.train(8)
    first.session.close()
    fetch = Snapshots.fetch
    folders = []

    def fail_once(self: Snapshots, snapshot: Snapshot) -> list[dict[str, torch.Tensor]]:
        folders.append(snapshot.folder)
        if len(folders) == 1:
            first.train(4)
            first.session.close()  # the next snapshot is whole
            raise PayloadError("gone", snapshot.folder)
        return fetch(self, snapshot)

    monkeypatch.setattr(Snapshots, "fetch", fail_once)
    if newcomer:
        late = meeting.island(2, seed=5)
    else:
        late.sync()
    assert folders[0] != folders[1]
    assert late.hash == first.hash


def test_a_new_island_joins_from_a_snapshot_and_the_rounds_since(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, max_islands=4, snapshot_every=2, grace=1.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(10))
    newcomer = meeting.island(3, seed=77)
    assert newcomer.hash == islands[0].hash
    assert newcomer.session.outer.round == 5
    assert torch.equal(newcomer.weights, islands[0].weights)
    everyone = [*islands, newcomer]
    run_islands(3, lambda which: everyone[which].train_to(8))
    assert len({member.hash for member in everyone}) == 1
    assert [0, 1, 3] in [report.participants for report in islands[0].reports]


def test_an_island_that_comes_when_all_is_over_waits_for_nobody(tmp_path: Path) -> None:
    """Of three islands one has ended, and one has died and does not come back."""
    meeting = Meeting(tmp_path, 3, num_rounds=2, min_islands=2, grace=0.2, join_timeout=3.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    islands[1].die()
    islands[2].train(1)
    run_islands(2, lambda which: islands[2 * which].train_to(2))
    islands[0].leave(finished=True)
    islands[2].die()
    again = meeting.island(1, checkpoint=checkpoint)
    assert again.session.is_over
    assert again.hash == islands[0].hash


def test_a_late_island_makes_no_round_after_the_last(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, num_rounds=2, min_islands=1, grace=0.1)
    first, late = run_islands(2, lambda island: meeting.island(island))
    first.train(4).leave()
    late.train(2)
    assert late.session.is_over
    assert late.session.outer.round == 2
    assert late.hash == first.hash


def test_nobody_waits_until_an_island_that_joins_has_trained(tmp_path: Path, fast_clock: FastClock) -> None:
    """It joins when one island has offered already, and the other is about to."""
    meeting = Meeting(tmp_path, 2, max_islands=3, grace=8.0, sync_timeout=60.0)
    first, second = run_islands(2, lambda island: meeting.island(island).train(2))
    second.step()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(first.train, 2)
        newcomer = pool.submit(meeting.island, 2, seed=7)
        fast_clock.sleep(1.5)
        begun = fast_clock.now()
        second.train(1)
        early.result()
        assert fast_clock.now() - begun < 4
        joined = newcomer.result()
    assert [member.reports[-1].participants for member in (first, second)] == [[0, 1], [0, 1]]
    assert (joined.hash, joined.session.outer.round) == (first.hash, 2)
    run_islands(3, lambda which: [first, second, joined][which].train(2))
    assert first.reports[-1].participants == [0, 1, 2]


def test_all_stop_and_start_again(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island).train(4))
    saved = [member.save(tmp_path / f"saved-{member.number}") for member in islands]
    for member in islands:
        member.leave(finished=False)
    again = run_islands(2, lambda island: meeting.island(island, seed=5, checkpoint=saved[island]).train(4))
    assert {member.session.outer.round for member in again} == {4}
    assert len({member.hash for member in again}) == 1


@only("bucket")
def test_what_an_island_that_stops_has_done_is_left_to_the_others(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=5.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    islands[1].train(1)
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    islands[1].leave(finished=False)
    islands[0].train(2)
    assert islands[0].reports[-1].participants == [0, 1]
    again = meeting.island(1, checkpoint=checkpoint)
    assert torch.equal(again.weights, islands[0].weights)  # its step is in there; nothing of it is left
    assert again.session.outer.on_boundary


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_a_pseudo_gradient_out_of_all_reason_is_left_out(tmp_path: Path, value: float) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=1.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(12))

    offer_spoilt(islands, value)
    assert [member.reports[-1].participants for member in islands] == [[0], [0]]
    assert islands[0].hash == islands[1].hash
    assert torch.equal(islands[0].weights, islands[1].weights)
    assert torch.isfinite(islands[0].weights).all()


def test_a_refusal_that_is_taken_while_a_round_adds_another_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where training reports on earlier rounds, and one is carried out behind it."""
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=1.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    told: list[dict[int, str]] = []
    apply = ElasticRounds.apply_outcome

    class TakenMeanwhile(dict[str, str]):
        def items(self) -> Any:
            told.append(islands[0].session.take_refused())
            return super().items()

    def apply_outcome(rounds: ElasticRounds, planned: Attempt, *others: Any) -> bool:
        if rounds is islands[0].session.rounds:
            left_out = TakenMeanwhile(planned.agreed.left_out)
            planned = replace(planned, plan=planned.agreed.model_copy(update={"left_out": left_out}))
        return apply(rounds, planned, *others)

    monkeypatch.setattr(ElasticRounds, "apply_outcome", apply_outcome)
    islands[0].session.rounds.refused.add({7: "an earlier one"})
    offer_spoilt(islands, float("nan"))
    told.append(islands[0].session.take_refused())
    assert [one.keys() for one in told] == [{7}, {1}]


def test_an_island_whose_outer_parameters_changed_ends_and_spoils_nobody(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    islands[1].session.outer.current.method.parameters[3] += 1.0
    islands[1].session.outer.update_digest(islands[1].session.outer.current)
    outcomes = try_islands(3, lambda which: islands[which].train_to(2))
    assert isinstance(outcomes[1], DivergedError)
    assert islands[0].hash == islands[2].hash
    assert islands[0].reports[-1].participants == [0, 2]


def test_an_island_that_computes_another_average_is_outvoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=20.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    ill = islands[0].session.rounds.archive.engines[0]
    average = ill.average

    def average_wrongly(planned: Any, mean: torch.Tensor, *others: Any) -> Any:
        traffic = average(planned, mean, *others)
        mean[5] += 1.0
        return traffic

    monkeypatch.setattr(ill, "average", average_wrongly)
    outcomes = try_islands(3, lambda which: islands[which].train(2))
    assert isinstance(outcomes[0], DivergedError)
    assert islands[1].hash == islands[2].hash
    assert islands[1].reports[-1].participants == [0, 1, 2]


def average_wrongly(member: Member, is_wrong: Callable[[int], bool]) -> None:
    """Has an island compute wrong averages: of those that it computes, the ones that `is_wrong` names."""
    engine: Any = member.session.rounds.archive.engines[0]
    average, count = engine.average, itertools.count()

    def wrong(planned: Any, mean: torch.Tensor, *others: Any) -> Any:
        traffic = average(planned, mean, *others)
        if is_wrong(next(count)):
            mean[5] += 1.0
        return traffic

    engine.average = wrong


def test_two_that_disagree_once_take_the_round_again(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, grace=20.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    average_wrongly(islands[0], lambda count: count == 0)
    run_islands(2, lambda which: islands[which].train(4))
    assert islands[0].hash == islands[1].hash
    assert [report.participants for report in islands[0].reports] == [[0, 1]] * 3
    undisturbed = Meeting(tmp_path / "other", 2, grace=20.0)
    assert run_islands(2, lambda island: undisturbed.island(island).train(6))[0].hash == islands[0].hash


def test_two_that_go_on_disagreeing_both_end_with_their_state(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, grace=20.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    before = [member.hash for member in islands]
    average_wrongly(islands[0], lambda count: True)
    for outcome in try_islands(2, lambda which: islands[which].train(2)):
        assert isinstance(outcome, DivergedError)
        assert outcome.is_state_sound
        assert "no majority" in str(outcome)
    assert [member.hash for member in islands] == before


def test_who_comes_to_two_averages_of_the_same_values_ends(tmp_path: Path) -> None:
    """First the one is wrong, then the other: no majority, and each has shown that it cannot be relied on."""
    meeting = Meeting(tmp_path, 2, grace=20.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    for member in islands:
        average_wrongly(member, lambda count, number=member.number: count == number)  # type: ignore[misc]
    for outcome in try_islands(2, lambda which: islands[which].train(2)):
        assert isinstance(outcome, DivergedError)
        assert "computed two different averages of the same pseudo-gradients" in str(outcome)


@only("bucket")
def test_who_hung_blames_nobody_for_what_the_others_have_used_and_cleared_up(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=1.0, snapshot_every=1, keep_rounds=1)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    engine: Any = islands[1].session.rounds.archive.engines[0]
    average, hangs, over = engine.average, threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        hangs.set()
        assert over.wait(LONG)
        return average(*arguments)

    engine.average = hang

    def go_on(which: int) -> None:
        if which:
            islands[1].train(2)
        else:
            islands[0].train_to(6)
            over.set()
            assert hangs.is_set()

    run_islands(2, go_on)
    assert islands[1].hash == islands[0].hash
    assert islands[1].session.take_refused() == {}


EMPTY = ObjectInfo(path="empty", codec="fp32", start=0, length=0, num_bytes=0, block_values=1 << 20, digests=[])


@pytest.mark.parametrize(
    "said",
    [{}, {"path": "elsewhere"}, {"path": 7, "start": -1, "length": 1}, EMPTY.model_dump()],
    ids=["nothing", "little", "nonsense", "no values"],
)
def test_who_announces_what_cannot_be_is_left_out(tmp_path: Path, said: dict[str, Any]) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=1.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    engine: Any = islands[1].session.rounds.archive.engines[0]
    engine.announce = lambda *_: (said, Traffic())
    outcomes = try_islands(3, lambda which: islands[which].train_to(2))
    assert (outcomes[0], outcomes[2]) == (islands[0], islands[2])
    assert islands[0].reports[-1].participants == [0, 2]
    assert islands[0].hash == islands[2].hash


def test_one_of_three_that_is_wrong_once_is_outvoted_and_goes_on(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, grace=20.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    average_wrongly(islands[0], lambda count: count == 0)
    run_islands(3, lambda which: islands[which].train(4))
    assert len({member.hash for member in islands}) == 1
    assert islands[0].reports[-1].participants == [0, 1, 2]


@only("mesh")
def test_numbers_that_come_damaged_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(tmp_path, 3, grace=20.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    average, count = SegmentedMesh.average, itertools.count()

    def damaged(*args: Any) -> Traffic:
        traffic = average(*args)
        if next(count) == 0:
            raise DamagedTransferError([1])
        return traffic

    monkeypatch.setattr(SegmentedMesh, "average", damaged)
    run_islands(3, lambda which: islands[which].train(4))
    assert len({member.hash for member in islands}) == 1
    assert [report.participants for report in islands[2].reports] == [[0, 1, 2]] * 3
    assert {number for member in islands for number in member.session.take_refused()} == {1}


def test_who_comes_back_tries_again_while_a_round_is_not_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.5)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    checkpoint = islands[1].save(tmp_path / "checkpoint")
    islands[1].die()
    islands[0].train(4)
    follow, count = ElasticRounds.follow, itertools.count()

    def undecided(self: ElasticRounds, *args: Any) -> Any:
        if next(count) < 2:
            raise IslandLostError("round 2 is not decided after 2 s")
        return follow(self, *args)

    monkeypatch.setattr(ElasticRounds, "follow", undecided)
    again = meeting.island(1, checkpoint=checkpoint)
    assert again.hash == islands[0].hash


# What the codec left out


@pytest.mark.parametrize("payload", ["topk", "sign"])
def test_an_island_alone_brings_in_all_it_has_just_once(tmp_path: Path, payload: str) -> None:
    """Others read codes, so what was left out of them counts as such also where nobody reads them."""
    member = Meeting(tmp_path, 1, width=WIDE, payload=payload, error_feedback=1.0, **FEDAVG).island(0)
    for number in range(4):
        member.step()
        member.step()
        before, total = member.weights, member.progress + member.residual
        anchor = before + member.progress
        member.sync()
        assert member.session.outer.round == number + 1
        sent = anchor - member.weights
        assert torch.allclose(sent, sent_of(payload, total), atol=1e-6)
        assert torch.allclose(member.residual + sent, total, atol=1e-6)
        assert member.residual.any()


def test_a_killed_island_resumes_with_what_its_codec_left_out(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0, width=WIDE, payload="topk")
    islands = run_islands(3, lambda island: meeting.island(island).train(3))
    checkpoint, residual, progress = (
        islands[1].save(tmp_path / "checkpoint-3"),
        islands[1].residual,
        islands[1].progress,
    )
    assert residual.any()
    islands[1].die()
    run_islands(2, lambda which: islands[2 * which].train(4))
    again = meeting.island(1, seed=9, checkpoint=checkpoint)
    assert again.hash == islands[0].hash
    assert torch.equal(again.residual, residual)
    assert torch.allclose(again.progress, progress, atol=1e-6)
    run_islands(3, lambda which: [islands[0], again, islands[2]][which].train_to(6))
    assert len({member.hash for member in (islands[0], again, islands[2])}) == 1
    assert any(1 in report.participants for report in again.reports)
    assert not torch.equal(again.residual, residual)


@only("bucket")
@pytest.mark.parametrize("settings", FEEDBACK)
def test_an_island_that_stops_leaves_its_steps_to_the_others_and_keeps_what_the_codec_left_out(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=5.0, width=WIDE, **settings)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    islands[1].train(1)
    checkpoint, expected = islands[1].save(tmp_path / "checkpoint"), islands[1].next_residual
    islands[1].leave(finished=False)
    islands[0].train(2)
    assert islands[0].reports[-1].participants == [0, 1]
    again = meeting.island(1, checkpoint=checkpoint)
    assert again.session.outer.on_boundary
    assert torch.equal(again.weights, islands[0].weights)
    assert torch.equal(again.residual, expected)


def test_islands_that_finished_without_a_round_bring_their_steps_when_they_are_started_again(tmp_path: Path) -> None:
    """The first waits for the other, which had finished, too."""
    meeting = Meeting(tmp_path, 2, min_islands=2)
    store = ObjectStore(meeting.url)

    def finish(island: int) -> Path:
        member = meeting.island(island)
        member.step()
        member.step()
        checkpoint = member.save(tmp_path / f"checkpoint-{island}")
        member.leave()
        return checkpoint

    checkpoints = run_islands(2, finish)

    def start_again(island: int) -> Member:
        if island == 1:
            wait_until(lambda: len(list(store.list("incarnations/0/"))) == 2, "island 0 is back")
        member = meeting.island(island, checkpoint=checkpoints[island])
        member.sync()
        return member

    first, second = run_islands(2, start_again)
    assert [report.participants for report in first.reports] == [[0, 1]]
    assert first.hash == second.hash


def test_an_island_whose_others_have_nothing_more_to_bring_takes_its_last_rounds_alone(tmp_path: Path) -> None:
    """They took fewer rounds, of more steps, as it had been away: else it would miss its rounds at every start."""
    meeting = Meeting(tmp_path, 2, num_rounds=3, min_islands=2)
    other, member = run_islands(2, meeting.island)
    run_islands(2, lambda number: (other, member)[number].train(2))
    other.leave()
    member.train(2)
    assert [report.participants for report in member.reports] == [[0, 1], [1]]
    checkpoint = member.save(tmp_path / "checkpoint")
    member.session.leave(finished=False)
    again = meeting.island(1, checkpoint=checkpoint)  # waits for nobody
    assert again.train(2).session.is_over


def test_two_islands_wait_for_each_other_when_the_third_has_finished(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, num_rounds=3, min_islands=3)
    done, early, late = run_islands(3, meeting.island)
    run_islands(3, lambda number: (done, early, late)[number].train(2))
    done.leave()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(early.train, 2)
        late.train(2)
        waiting.result(LONG)
    assert (early.missed, late.missed) == (0, 0)
    assert early.reports[-1].participants == late.reports[-1].participants == [1, 2]


def test_a_round_reads_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be on a device, and is copied for it."""
    first, second = run_islands(2, Meeting(tmp_path, 2, min_islands=2).island)
    reads: list[int] = []
    gather = LanePartition.gather

    def count(partition: LanePartition, out: torch.Tensor) -> None:
        reads.append(out.numel())
        gather(partition, out)

    monkeypatch.setattr(LanePartition, "gather", count)
    run_islands(2, lambda island: (first, second)[island].train(4))
    assert len(reads) == 2 * 2


def test_islands_that_began_together_take_all_steps_of_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one sees the other train already when it begins."""
    meeting = Meeting(tmp_path, 2)
    has_stepped = threading.Event()
    gather = await_islands

    def gather_late(config: DiLoCoConfig, *args: Any) -> None:
        gather(config, *args)
        if config.island == 1:
            assert has_stepped.wait(30)

    monkeypatch.setattr(joining, "await_islands", gather_late)

    def run(island: int) -> int:
        member = meeting.island(island)
        steps_left = member.session.outer.steps_left
        if island == 0:
            member.step()
            members = member.session.members
            assert members is not None
            members.set_phase("training")
            while members.look()[0].steps != 1:
                members.heartbeat()
            has_stepped.set()
        return steps_left

    assert run_islands(2, run) == [2, 2]


@pytest.mark.parametrize("settings", FEEDBACK)
def test_what_was_left_out_before_missed_rounds_comes_after_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.0, width=WIDE, **settings)
    first, late = run_islands(2, lambda island: meeting.island(island))
    late.train_to(1)  # alone or not
    first.sync()
    late.step()
    late.step()
    late.step()
    residual, progress = late.residual, late.progress
    assert residual.any()
    first.train_to(late.session.outer.round + 2)
    late.sync()
    assert late.hash == first.hash
    assert late.session.outer.steps == 3
    assert torch.equal(late.residual, residual)
    assert torch.allclose(late.progress, progress, atol=1e-6)
    expected = late.next_residual
    late.sync()  # alone
    assert late.session.outer.on_boundary
    assert torch.equal(late.residual, expected)


@only("bucket")
@pytest.mark.parametrize(("payload", "decay"), [("topk", 1.0), ("topk", 0.95), ("sign", 1.0), ("int8", 0.95)])
@pytest.mark.parametrize("is_known", [True, False])
def test_an_offer_that_was_used_later_leaves_what_the_codec_left_out(
    tmp_path: Path, payload: str, decay: float, is_known: bool
) -> None:
    """Nothing of the island's progress is lost or counted twice, also where another offer was made in between."""
    settings = {"width": WIDE, "payload": payload, "error_feedback": decay, **FEDAVG}
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=0.2, sync_timeout=20.0, **settings)
    first, second = run_islands(2, lambda island: meeting.island(island).train(4))
    anchor = first.weights
    first.step()
    first.step()
    kept = decay * first.residual
    total = first.progress + kept
    left_out = first.next_residual
    first.sync()
    assert first.missed == 1
    offered = first.weights
    first.step()
    since = offered - first.weights
    second.train(2)  # finds the first one's offer, so there is a quorum
    assert second.reports[-1].participants == [0, 1]
    if not is_known:  # as for an offer that the store did not take
        capture(first.session.outer, SyncClock()).complete(first.session.island)
    before = first.residual
    first.session.outer.current.due_at = 0
    assert first.session.sync().round == 3
    assert first.session.outer.steps == 1
    assert first.session.outer.current.weight == pytest.approx(4.0), "the examples of one step"
    assert first.hash == second.hash
    assert torch.allclose(first.weights + first.progress, second.weights, atol=1e-6)
    # What others have read, and what is left to bring, are together what there was.
    sent = sent_of(payload, total)
    remaining = first.progress + (first.residual if is_known else kept)
    assert torch.allclose(sent + remaining, total + since, atol=1e-5)
    if is_known:
        assert torch.equal(first.residual, left_out)
        assert torch.allclose(first.progress, since, atol=1e-5)
    else:
        assert torch.equal(first.residual, before)
    assert not torch.equal(second.weights, anchor)


@only("bucket")
@pytest.mark.parametrize("settings", FEEDBACK)
@pytest.mark.parametrize("steps_since", [0, 2])
def test_an_offer_that_was_used_and_is_gone_leaves_what_the_codec_left_out(
    tmp_path: Path, settings: dict[str, Any], steps_since: int
) -> None:
    meeting = Meeting(
        tmp_path, 2, min_islands=1, grace=0.1, snapshot_every=2, keep_rounds=1, width=WIDE, **settings, **FEDAVG
    )
    first, late = run_islands(2, lambda island: meeting.island(island))
    late.step()
    late.step()
    expected = late.next_residual
    late.session.rounds.publish_and_leave()
    for _ in range(steps_since):
        late.step()
    progress = late.progress
    first.train(16)
    first.session.close()
    assert first.reports[0].participants == [0, 1]
    late.sync()
    assert late.session.outer.round == 8
    assert late.session.outer.steps == steps_since
    assert torch.equal(late.residual, expected)
    assert torch.allclose(late.progress, progress * steps_since / (2 + steps_since), atol=1e-6)


@only("mesh")
@pytest.mark.parametrize("is_known", [True, False])
def test_a_round_that_was_carried_out_but_not_heard_of_leaves_what_the_codec_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The store is away from one island just when it would vote; the other commits. It trains on meanwhile."""
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=20.0, width=WIDE, payload="topk", **FEDAVG)
    islands = run_islands(2, lambda island: meeting.island(island).train(4))
    deaf = islands[1]
    quorum = deaf.session.rounds.archive.quorum

    def fail(*_: Any) -> None:
        raise StoreError("the store is away")

    expected = {}

    def train(which: int) -> None:
        member = islands[which]
        member.step()
        member.step()
        expected[which] = member.next_residual
        if which == 1:
            with monkeypatch.context() as patch:
                patch.setattr(quorum, "commit", fail)
                member.sync()
        else:
            member.sync()

    run_islands(2, train)
    assert (deaf.missed, deaf.session.outer.round, islands[0].session.outer.round) == (1, 2, 3)
    assert islands[0].reports[-1].participants == [0, 1]
    deaf.step()
    progress, residual = deaf.progress, deaf.residual
    if not is_known:
        capture(deaf.session.outer, SyncClock()).complete(deaf.session.island)
    deaf.session.outer.current.due_at = 0
    deaf.sync()
    assert (deaf.hash, deaf.session.outer.round, deaf.session.outer.steps) == (islands[0].hash, 3, 1)
    assert torch.allclose(deaf.progress, progress / 3, atol=1e-6), "a third of the steps"
    estimate = progress * (2 / 3) + 0.95 * residual
    estimate -= sent_of("topk", estimate)
    assert torch.equal(deaf.residual, expected[1] if is_known else estimate)


@pytest.mark.parametrize("value", [float("nan"), 50.0])
def test_an_island_that_is_left_out_keeps_what_its_codec_left_out(tmp_path: Path, value: float) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=2, grace=1.0, width=WIDE, payload="topk")
    islands = run_islands(2, lambda island: meeting.island(island).train(12))
    residual = islands[1].residual
    assert residual.any()

    offer_spoilt(islands, value)
    assert [member.reports[-1].participants for member in islands] == [[0], [0]]
    assert torch.equal(islands[1].residual, residual)
    run_islands(2, lambda island: islands[island].train(2))
    assert [member.reports[-1].participants for member in islands] == [[0, 1], [0, 1]]
    assert islands[0].hash == islands[1].hash
    assert torch.isfinite(islands[1].residual).all()


# Directly between islands


@only("mesh")
def test_an_attempt_that_fails_leaves_what_the_codec_left_out(tmp_path: Path) -> None:
    """It is sent again as it was, to those that are left."""
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=1.0, width=WIDE, payload="topk")
    islands = run_islands(3, lambda island: meeting.island(island).train(4))
    vanish(islands[1])
    expected = {}

    def train(which: int) -> None:
        islands[which].step()
        islands[which].step()
        expected[which] = islands[which].next_residual
        islands[which].sync()

    outcomes = try_islands(3, train)
    assert isinstance(outcomes[1], Vanished)
    for survivor in (islands[0], islands[2]):
        assert survivor.reports[-1].participants == [0, 2]
        assert torch.equal(survivor.residual, expected[survivor.number])
    assert islands[0].hash == islands[2].hash


@only("mesh")
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_island_that_is_lost_in_the_exchange_costs_no_step(
    tmp_path: Path, fast_clock: FastClock, num_before: int
) -> None:
    """The others drop their connections, if they have any yet, and try again without it, with what they had."""
    patience: dict[str, Any] = {} if num_before else {"exchange_timeout": 3.0}  # connecting takes as much of real time
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=60.0, **patience, **FEDAVG)
    islands = run_islands(3, meeting.island)
    run_islands(3, lambda which: islands[which].train(2 * num_before))
    start = islands[0].weights
    vanish(islands[1])
    begun = fast_clock.now()
    outcomes = try_islands(3, lambda which: islands[which].train(2))
    if num_before:
        assert fast_clock.now() - begun < LEASE_SECONDS
    assert isinstance(outcomes[1], Vanished)
    assert islands[0].hash == islands[2].hash
    for survivor in (islands[0], islands[2]):
        assert survivor.reports[-1].participants == [0, 2]
        assert survivor.session.outer.round == num_before + 1
        assert survivor.missed == 0
    assert not torch.equal(islands[0].weights, start)
    run_islands(2, lambda which: islands[2 * which].train(2))
    assert islands[0].reports[-1].participants == [0, 2]


@only("mesh")
def test_who_shows_an_address_in_anothers_name_costs_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no island: without a key, all who reach the store can."""
    monkeypatch.setattr(connecting, "GONE_SECONDS", 0.2)
    meeting = Meeting(tmp_path, 2, grace=600.0, sync_timeout=600.0)  # connecting takes real time
    islands = run_islands(2, meeting.island)
    _, log = open_run(ObjectStore(meeting.url), b"")
    log.put("links/mesh/00000001-00/0/at/1.json", BytesRecord(value=base64.b64encode(b"{}").decode()))
    engine: Any = islands[1].session.rounds.archive.engines[0]
    average = engine.average

    def average_late(planned: Any, *others: Any) -> Traffic:
        """When island 0 has seen what lies there: this one would overwrite it."""
        deadline = time.monotonic() + LONG
        while planned.number == 0 and "rounds/00000001/00/outcome.json" not in log.list("rounds/00000001/00"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        traffic: Traffic = average(planned, *others)
        return traffic

    engine.average = average_late
    run_islands(2, lambda which: islands[which].train(2))
    outcome = log.read("rounds/00000001/00/outcome.json", OutcomeRecord)
    assert outcome is not None
    assert "it published an invalid address: b'{}'" in outcome.reason
    assert [member.reports[-1].participants for member in islands] == [[0, 1], [0, 1]]
    assert islands[0].hash == islands[1].hash


@only("mesh")
def test_an_island_whose_own_address_is_gone_misses_a_round_and_no_more(tmp_path: Path) -> None:
    """As while its VPN is down: the others take the round without it, and the next one with it."""
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=2.0, sync_timeout=600.0)  # connecting takes real time
    islands = run_islands(3, meeting.island)
    engine: Any = islands[1].session.rounds.archive.engines[0]
    address, engine.address = engine.address, "192.0.2.1"  # RFC 5737: no machine has it
    run_islands(3, lambda which: islands[which].train(2))
    for survivor in (islands[0], islands[2]):
        assert survivor.reports[-1].participants == [0, 2]
        assert survivor.missed == 0
    _, log = open_run(ObjectStore(meeting.url), b"")
    outcome = log.read("rounds/00000001/00/outcome.json", OutcomeRecord)
    assert outcome is not None
    assert "islands [1] were lost in round 1 (island 1 cannot listen on 192.0.2.1" in outcome.reason
    engine.address = address
    run_islands(3, lambda which: islands[which].train(2))
    assert {tuple(member.reports[-1].participants) for member in islands} == {(0, 1, 2)}
    assert len({member.hash for member in islands}) == 1


class Vanished(BaseException):
    """This island is gone."""


def vanish(member: Member) -> None:
    """Dies as soon as it is asked to exchange anything."""

    def average(*_: Any) -> None:
        member.die()
        member.session.rounds.archive.engines[0].close()
        raise Vanished

    member.session.rounds.archive.engines[0].average = average  # type: ignore[method-assign,assignment]


@only("mesh")
def test_who_was_lost_is_not_waited_for_as_long_as_who_is_late(tmp_path: Path) -> None:
    """It gives signs of life, but hangs; its grace would be a minute."""
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=60.0, **FEDAVG)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    others_are_done = threading.Barrier(3)

    def hang(*_: Any) -> None:
        islands[1].session.rounds.archive.engines[0].close()
        others_are_done.wait(30)
        raise Vanished

    islands[1].session.rounds.archive.engines[0].average = hang  # type: ignore[method-assign,assignment]

    def train(which: int) -> None:
        islands[which].train(2)
        others_are_done.wait(30)

    outcomes = try_islands(3, train)
    assert [type(outcome) for outcome in outcomes] == [type(None), Vanished, type(None)]
    assert islands[0].reports[-1].participants == [0, 2]
    assert islands[0].hash == islands[2].hash


@only("mesh")
def test_an_attempt_that_nobody_carries_out_is_given_up(tmp_path: Path) -> None:
    """All islands die between plan and exchange, and are started again."""
    meeting = Meeting(tmp_path, 2, grace=1.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in islands]
    for member in islands:
        vanish(member)
    assert all(isinstance(end, Vanished) for end in try_islands(2, lambda island: islands[island].train(2)))
    again = run_islands(2, lambda island: meeting.island(island, checkpoint=checkpoints[island]).train(2))
    assert [member.session.outer.round for member in again] == [2, 2]
    assert again[0].hash == again[1].hash
    assert again[0].reports[-1].participants == [0, 1]


@only("mesh")
@pytest.mark.parametrize("exchange_timeout", [2.0, 600.0])
def test_an_attempt_that_all_have_missed_is_given_up(
    tmp_path: Path, fast_clock: FastClock, exchange_timeout: float
) -> None:
    """The store did not answer when it was planned. All have trained on, and none waits for the others to exchange."""
    meeting = Meeting(tmp_path, 2, grace=3.0, exchange_timeout=exchange_timeout)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    for member in islands:
        engine = member.session.rounds.archive.engines[0]
        engine.average = fails_once(engine, "average", StoreError("the store is down"))  # type: ignore[method-assign]
    run_islands(2, lambda island: islands[island].train(2))
    assert [member.missed for member in islands] == [1, 1]
    begun = fast_clock.now()
    run_islands(2, lambda island: islands[island].train_to(2))
    assert fast_clock.now() - begun < 60
    assert islands[0].hash == islands[1].hash
    assert islands[0].reports[-1].participants == [0, 1]


def fails_once(owner: object, name: str, error: Exception) -> Callable[..., Any]:
    """A method that raises an error, and then does what it did before."""
    method, errors = getattr(owner, name), [error]

    def call(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return method(*args)

    return call


@only("mesh")
def test_where_an_average_was_not_kept_a_snapshot_takes_its_place(tmp_path: Path) -> None:
    """The island that was to put it into the store died; it comes back, and needs it."""
    meeting = Meeting(tmp_path, 2, grace=1.0, snapshot_every=100)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in islands]
    for member in islands:
        member.session.rounds.archive.engines[0].on_outcome = lambda *_: None  # type: ignore[method-assign]
    run_islands(2, lambda island: islands[island].train(2))
    _, outcome = islands[0].session.rounds.archive.last or (None, None)
    assert outcome is not None
    lost = islands[outcome.by]
    lost.die()
    survivor = islands[1 - lost.number]

    def go_on(which: int) -> Member:
        if which == survivor.number:
            return survivor.train_to(3)
        return meeting.island(which, checkpoint=checkpoints[which]).train_to(3)

    after = run_islands(2, go_on)
    assert [member.session.outer.round for member in after] == [3, 3]
    assert after[0].hash == after[1].hash
    assert after[0].reports[-1].participants == [0, 1]


@only("mesh")
@pytest.mark.parametrize("rounds_since", [1, 2])
def test_rounds_that_nobody_holds_any_more_are_taken_again(tmp_path: Path, rounds_since: int) -> None:
    """All islands were killed before an average was in the store, or a checkpoint of that round."""
    meeting = Meeting(tmp_path, 2, grace=1.0, snapshot_every=100)
    islands = run_islands(2, lambda island: meeting.island(island).train(3))
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in islands]
    for member in islands:
        member.session.rounds.archive.engines[0].on_outcome = lambda *_: None  # type: ignore[method-assign]
        member.session.rounds.archive.rescue_average = lambda: None  # type: ignore[method-assign]
    run_islands(2, lambda island: islands[island].train(2 * rounds_since))
    assert islands[0].session.outer.round == 1 + rounds_since
    for member in islands:
        member.die()

    def go_on(island: int) -> Member:
        member = meeting.island(island, checkpoint=checkpoints[island])
        assert (member.session.outer.round, member.session.outer.steps) == (1, 1)
        return member.train_to(4)

    again = run_islands(2, go_on)
    assert [report.round for report in again[0].reports] == [2, 3, 4]
    assert all(report.participants == [0, 1] for report in again[0].reports)
    assert again[0].hash == again[1].hash
    again[1].leave(finished=False)
    late = meeting.island(1, checkpoint=checkpoints[1])
    assert late.hash == again[0].hash, "it finds the rounds that count"
    seen = {found.round: found for found in Observer(ObjectStore(meeting.url), b"").look().rounds}
    assert (seen[2].state, seen[2].attempts) == ("committed", 2)
    assert "no island that took part in round 2 still holds its average" in seen[2].aborted[0]
    found = {finding.path for finding in check_store(ObjectStore(meeting.url), b"").findings}
    assert not any("revoked" in path or "missing" in path for path in found)


@only("mesh")
def test_a_round_of_whose_commit_nobody_has_heard_is_taken_again(tmp_path: Path) -> None:
    """The store went away when it was committed."""
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    for member in islands:
        quorum = member.session.rounds.archive.quorum
        assert quorum is not None

        def commit(*args: Any, decide: Callable[..., OutcomeRecord] = quorum.commit, quorum: Quorum = quorum) -> None:
            del quorum.commit
            assert decide(*args).kind == "commit"
            raise StoreError("the store is down")

        quorum.commit = commit  # type: ignore[method-assign, assignment]
    run_islands(2, lambda island: islands[island].train(2))
    assert [(member.missed, member.session.outer.round) for member in islands] == [(1, 1)] * 2
    run_islands(2, lambda island: islands[island].train_to(3))
    assert islands[0].hash == islands[1].hash
    assert [report.participants for report in islands[0].reports] == [[0, 1]] * 3


@only("mesh")
def test_a_round_that_one_island_holds_is_not_taken_again(tmp_path: Path) -> None:
    """Its checkpoint may be of it."""
    meeting = Meeting(tmp_path, 3, min_islands=2, snapshot_every=100, join_timeout=5.0, exchange_timeout=5.0)
    islands = run_islands(3, lambda island: meeting.island(island).train(2))
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in islands]
    for member in islands:
        member.session.rounds.archive.engines[0].on_outcome = lambda *_: None  # type: ignore[method-assign]
    run_islands(3, lambda island: islands[island].train(2))
    newest = islands[2].save(tmp_path / "newest")
    for member in islands:
        member.die()
    ends = try_islands(2, lambda island: meeting.island(island, checkpoint=checkpoints[island]))
    assert all("stop all, and start them with an empty rendezvous" in str(end) for end in ends)

    def go_on(island: int) -> Member:
        checkpoint = newest if island == 2 else checkpoints[island]
        return meeting.island(island, checkpoint=checkpoint, join_timeout=60.0).train_to(3)

    again = run_islands(3, go_on)
    assert len({member.hash for member in again}) == 1


@only("mesh")
@pytest.mark.parametrize("rounds_since", [1, 2])
def test_who_resumes_from_a_round_that_is_not_in_the_store_shares_it_at_once(
    tmp_path: Path, rounds_since: int
) -> None:
    """The others wait for it before they take part, and it would wait for them."""
    meeting = Meeting(tmp_path, 2, snapshot_every=100, join_timeout=60.0, sync_timeout=180.0)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    older = islands[0].save(tmp_path / "older")
    for member in islands:
        member.session.rounds.archive.engines[0].on_outcome = lambda *_: None  # type: ignore[method-assign]
        member.session.rounds.archive.rescue_average = lambda: None  # type: ignore[method-assign]
    run_islands(2, lambda island: islands[island].train(2 * rounds_since))
    newer = islands[1].save(tmp_path / "newer")
    for member in islands:
        member.die()
    again = run_islands(2, lambda island: meeting.island(island, checkpoint=newer if island else older))
    assert [member.session.outer.round for member in again] == [1 + rounds_since] * 2
    assert again[0].hash == again[1].hash
    run_islands(2, lambda island: again[island].train_to(2 + rounds_since))
    assert again[0].hash == again[1].hash


@only("mesh")
def test_connections_last_while_the_same_islands_take_part(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    first = [member.session.rounds.archive.engines[0].links for member in islands]
    assert first == ["00000001-00"] * 2
    run_islands(2, lambda island: islands[island].train(4))
    assert [member.session.rounds.archive.engines[0].links for member in islands] == first


def go_on_without_one(islands: list[Member]) -> tuple[Member, list[Member]]:
    """Has two of three connected islands take a round; returns who is late for it, and them."""
    _, outcome = islands[0].session.rounds.archive.last or (None, None)
    assert outcome is not None
    late = islands[2 if outcome.by != 2 else 1]
    others = [member for member in islands if member is not late]
    run_islands(2, lambda which: others[which].train(2))
    assert others[0].reports[-1].participants == [member.number for member in others]
    assert late.session.rounds.goes_on, "it looks nothing up"
    return late, others


@only("mesh")
def test_who_is_still_connected_hears_with_its_offer_that_a_round_took_place_without_it(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0)  # all are in the first two rounds
    islands = run_islands(3, lambda island: meeting.island(island).train(4))
    late, _ = go_on_without_one(islands)
    late.train(2)
    assert late.session.outer.round == 3
    assert len({member.hash for member in islands}) == 1
    assert late.session.outer.steps == 2, "what it has done goes into the next round"
    run_islands(3, lambda which: islands[which].train_to(4))
    assert islands[0].reports[-1].participants == [0, 1, 2]
    assert len({member.hash for member in islands}) == 1


@only("mesh")
def test_who_is_still_connected_misses_a_round_whose_plan_is_damaged(tmp_path: Path) -> None:
    """And goes on from a snapshot."""
    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0, snapshot_every=3)
    late, others = go_on_without_one(run_islands(3, lambda island: meeting.island(island).train(4)))
    for member in others:
        member.session.close()
    ObjectStore(meeting.url).put("rounds/00000003/00/plan.json", b"")
    late.train(2)
    assert (late.missed, late.session.outer.round) == (1, 2)
    late.sync()
    assert late.hash == others[0].hash


@only("mesh")
def test_an_average_that_was_not_kept_is_missed_also_a_round_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who are still connected do not look for it before the next round."""
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 3, min_islands=2, grace=5.0, snapshot_every=100)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    islands = run_islands(3, lambda island: meeting.island(island).train(4))
    store.fails = lambda name, *args: name == "put" and args[0].startswith("payloads/00000003/mean-")
    run_islands(3, lambda island: islands[island].train(2))
    _, outcome = islands[0].session.rounds.archive.last or (None, None)
    assert outcome is not None
    islands[outcome.by].session.rounds.wait_for_uploads()
    islands[outcome.by].die()
    left = [member for member in islands if member.number != outcome.by]
    assert all(member.session.rounds.goes_on for member in left)
    assert "the average of round 3 is not in the store: the store is down" in caplog.text
    run_islands(2, lambda which: left[which].train(4))
    assert [member.session.outer.round for member in left] == [5, 5]
    written = {path.split("/")[1] for path, _ in left[0].session.store.list("snapshots")}
    assert "00000004" in written, "whoever needs the average of round 3 goes on from there"


def test_islands_go_on_while_the_store_is_away_and_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 2)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    store.is_down = True
    run_islands(2, lambda island: islands[island].train(4))
    assert [member.missed for member in islands] == [2, 2]
    store.is_down = False
    run_islands(2, lambda island: islands[island].train(4))
    assert {member.session.outer.round for member in islands} == {3}
    assert islands[0].hash == islands[1].hash
    assert islands[0].reports[1].weight == 3.0  # the steps of the missed rounds count


def test_a_store_that_is_away_is_asked_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that does not come takes half a minute, in which nobody trains."""
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 1)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    member = meeting.island(0).train(2)
    store.is_down = True
    member.train(4)
    assert (member.missed, store.num_in_vain) == (2, 2)


def test_an_island_leaves_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    from hf_diloco.rounds import elastic

    caplog.set_level("INFO", "hf_diloco")
    meeting = Meeting(tmp_path, 1)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    member = meeting.island(0).train(3)
    store.is_down = True
    member.leave(finished=False)
    assert "left without announcing it: the store is down" in caplog.messages
    is_offered = "left without offering the last 1 steps: the store is down" in caplog.messages
    assert is_offered == (engine == "bucket"), "where islands exchange directly, it would have to stay for that"


@only("bucket")
def test_a_store_that_goes_away_while_values_are_read_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 2)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    store.fails = lambda name, *_: name == "get_range"
    run_islands(2, lambda island: islands[island].train(2))
    assert [(member.missed, member.session.outer.round) for member in islands] == [(1, 1)] * 2
    store.fails = lambda *_: False
    run_islands(2, lambda island: islands[island].train_to(3))
    assert [member.missed for member in islands] == [1, 1], "what was planned counts, and so do the steps since"
    assert {tuple(report.participants) for member in islands for report in member.reports} == {(0, 1)}
    assert islands[0].hash == islands[1].hash


def test_who_has_caught_up_and_does_not_see_the_others_trains_a_whole_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 2, sync_every=6, min_islands=1, grace=0.1)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    first, late = run_islands(2, lambda island: meeting.island(island).train(6))
    first.train_to(late.session.outer.round + 1)
    first.train(4)
    late.step()
    store.fails = lambda name, *args: (name, *args[:1]) == ("list", "heartbeats")
    late.sync()
    assert (late.hash, late.session.outer.steps_left) == (first.hash, 6)


def test_a_plan_whose_offer_is_gone_costs_an_attempt(tmp_path: Path) -> None:
    """Nobody can carry it out, late or in time."""
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island).train(4))
    _, log = open_run(ObjectStore(meeting.url), b"")
    gone = Participant(offer="rounds/00000003/00/offers/00001-000001-000000.json", island=1, weight=1.0, norm=1.0)
    log.create("rounds/00000003/00/plan.json", PlanRecord(by=1, state=islands[0].hash, participants=[gone]))
    run_islands(2, lambda island: islands[island].train(2))
    assert [report.participants for report in islands[0].reports] == [[0, 1]] * 3
    assert islands[0].hash == islands[1].hash
    assert "rounds/00000003/01/plan.json" in log.list("rounds/00000003/01")


def test_who_leaves_when_the_next_round_has_taken_place_offers_nothing(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, min_islands=1, grace=0.1)
    first, late = run_islands(2, lambda island: meeting.island(island).train(2))
    number = late.session.outer.round + 1
    first.train_to(number)
    late.train(1).leave(finished=False)
    paths = [path for path, _ in ObjectStore(meeting.url).list(f"rounds/{number:08d}")]
    assert ["/00000-000001-" in path for path in paths if "/offers/" in path] == [True], "island 0's"


@pytest.mark.parametrize(("exchange_timeout", "expected"), [(4.0, 4.0), (600.0, 30.0)])
def test_the_store_has_no_longer_than_an_exchange(tmp_path: Path, exchange_timeout: float, expected: float) -> None:
    session = ElasticSession(Meeting(tmp_path).config(0, exchange_timeout=exchange_timeout), IslandGroup())
    assert session.store.timeout == expected


def test_nobody_seems_dead_because_the_store_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_clock: FastClock
) -> None:
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 2)
    store = BrokenStore(ObjectStore(meeting.url))
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: store)
    islands = run_islands(2, lambda island: meeting.island(island))
    living = islands[0].session.members
    assert living is not None
    assert living.alive().keys() == {0, 1}
    store.is_down = True
    islands[1].die()
    fast_clock.sleep(1.5 * LEASE_SECONDS)
    store.is_down = False
    assert living.alive().keys() == {0, 1}, "its sign of life may be on its way"
    begun = fast_clock.now()
    while living.alive().keys() != {0}:
        assert fast_clock.now() - begun < 2 * LEASE_SECONDS
        fast_clock.sleep(0.5)


@only("bucket")
def test_a_damaged_object_is_left_out_of_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_diloco.rounds import elastic

    meeting = Meeting(tmp_path, 2, min_islands=1, grace=5.0)
    store = ObjectStore(meeting.url)

    class Damaging:
        def __init__(self) -> None:
            self.is_on = False

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def put(self, path: str, data: Any, pace: Any = None, is_lasting: bool = True) -> None:
            data = bytes(data)
            if self.is_on and path.startswith("payloads/"):
                self.is_on = False
                data = bytes([data[0] ^ 1]) + data[1:]
            store.put(path, data)

    damaging = Damaging()
    monkeypatch.setattr(elastic, "ObjectStore", lambda url, timeout, gone_after=None: damaging)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    damaging.is_on = True
    run_islands(2, lambda island: islands[island].train(2))
    assert islands[0].hash == islands[1].hash
    assert {member.session.outer.round for member in islands} == {2}
    assert [report.participants for report in islands[0].reports] == [[0, 1], [0, 1]]  # put anew for the next attempt


def test_a_second_process_of_an_island_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1)
    meeting.island(0)
    with pytest.raises(DuplicateIslandError, match=r"another process runs as island 0 .*end that process first"):
        meeting.island(0)


def test_two_islands_that_write_to_one_folder_are_refused(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, join_timeout=0.5, min_islands=1)
    Member(meeting.config(0), tmp_path / "same")
    with pytest.raises(RendezvousError, match=r"islands 0 and 1 both write to .*/same .*give each its own output_dir"):
        Member(meeting.config(1), tmp_path / "same")
    meeting.island(1)


def test_another_setting_is_refused_with_both_values(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, join_timeout=0.5, min_islands=1)
    meeting.island(0)
    with pytest.raises(FingerprintError, match=r"outer_lr differs .*island 0: 0\.7; island 1: 0\.5"):
        meeting.island(1, outer_lr=0.5)


def test_another_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(tmp_path, 2, join_timeout=0.5, min_islands=1)
    monkeypatch.setenv("HF_DILOCO_KEY", "0123456789abcdef")
    meeting.island(0)
    monkeypatch.setenv("HF_DILOCO_KEY", "0123456789abcdeg")
    with pytest.raises(RendezvousError, match=r"begun with another key.*HF_DILOCO_KEY or key_file"):
        meeting.island(1)


@only("mesh")
def test_a_key_changes_no_bit_and_encryption_is_agreed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DILOCO_KEY", "0123456789abcdef")
    for folder, encrypt in (("encrypted", True), ("authenticated", False)):
        (tmp_path / folder).mkdir()
        # Connecting takes real time, in which the fast clock may run for minutes: none of the rounds may be missed.
        meeting = Meeting(tmp_path / folder, 2, encrypt=encrypt, sync_timeout=1000.0)
        found = run_islands(2, lambda island, meeting=meeting: meeting.island(island).train(10).leave())  # type: ignore[misc]
        for member, expected in zip(found, train_fixed(2, 10), strict=True):
            assert torch.equal(member.weights, expected)
    (tmp_path / "both").mkdir()
    meeting = Meeting(tmp_path / "both", 2, join_timeout=0.5, min_islands=1)
    meeting.island(0)
    with pytest.raises(FingerprintError, match=r"links differs .*island 0: encrypted; island 1: authenticated"):
        meeting.island(1, encrypt=False)


def test_the_run_starts_though_whoever_began_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first island was killed between its first record and its snapshot."""
    meeting = Meeting(tmp_path, 2)

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Joining, "take_state", die)
        session = ElasticSession(meeting.config(0), IslandGroup())
        model = make_model()
        with pytest.raises(Killed):
            session.join(open_shards(model, torch.optim.SGD(model.parameters(), lr=0.1), 1), tmp_path)
        assert session.members is not None
        session.members.stop_heartbeats()
    found = run_islands(2, lambda island: meeting.island(island, seed=1 + island).train_to(2))
    assert found[0].hash == found[1].hash


def test_too_few_islands_at_the_start_are_named(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 3, join_timeout=0.3)
    with pytest.raises(RendezvousError, match=r"islands \[1, 2\] have not joined within 0.3 s.*fewer than 2"):
        meeting.island(0)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    one = Meeting(tmp_path / "one", 1).island(0).train(2)
    checkpoint = one.save(tmp_path / "checkpoint")
    other = Meeting(tmp_path / "other", 2, min_islands=1, join_timeout=0.5)
    other.island(0)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint belongs to run .*resume with the rendezvous of that run"
    ):
        other.island(1, checkpoint=checkpoint)


def test_old_objects_are_cleared_up(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, snapshot_every=2, keep_rounds=1)
    member = meeting.island(0).train(24)
    member.session.close()
    store = ObjectStore(meeting.url)
    rounds = sorted({int(path.split("/")[1]) for path, _ in store.list("payloads")})
    assert rounds == [12]
    assert sorted({int(path.split("/")[1]) for path, _ in store.list("snapshots")}) == [10, 12]
    newcomer = Meeting.island(meeting, 0, seed=3) if member.leave() else None
    assert newcomer is not None
    assert newcomer.hash == member.hash


def test_rubbish_in_the_store_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Records that are too large, of another place or no records at all are reported once, and ignored."""
    meeting = Meeting(tmp_path, 2)
    islands = run_islands(2, lambda island: meeting.island(island).train(2))
    store = ObjectStore(meeting.url)
    old = next(path for path, _ in store.list("rounds/00000001") if "/offers/" in path)
    store.put("heartbeats/7/000001.json", bytes(5 << 20))
    store.put("heartbeats/8/000001.json", b"{")
    store.put("rounds/00000002/00/offers/00001-000009-000000.json", store.get(old, 1 << 20) or b"")
    run_islands(2, lambda island: islands[island].train(2))
    assert islands[0].reports[-1].participants == [0, 1]
    assert islands[0].hash == islands[1].hash
    assert sum("refused an object" in record.message for record in caplog.records) >= 3
