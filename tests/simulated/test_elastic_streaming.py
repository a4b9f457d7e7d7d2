"""Streaming among islands that meet in an object store: against the equations, and where islands come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco.errors import FingerprintError, StoreError
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.store.objects import ObjectStore
from tests.clocks import wait_until
from tests.islands import run_islands, try_islands
from tests.meetings import ENGINES, FEDAVG, Meeting
from tests.streaming_meetings import Streamer, Streams, train_all
from tests.streaming_reference import NUM_STEPS, expected_weights

pytestmark = pytest.mark.usefixtures("fast_clock")

FOUR: dict[str, Any] = {"sync_every": 8, "num_fragments": 4}
BEHIND: dict[str, Any] = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.25}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_given = any("engine" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if not is_given:
        metafunc.parametrize("engine", ["bucket", "mesh"], indirect=True)


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "engine", ENGINES[request.param])


@pytest.mark.parametrize("num_islands", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 3])
@pytest.mark.parametrize(
    "config",
    [FOUR, {"sync_every": 7, "num_fragments": 3}, {**FOUR, **BEHIND}, {"sync_every": 8, **BEHIND}],
    ids=["fragments", "uneven", "behind", "whole model behind"],
)
def test_a_run_in_which_nothing_happens_is_the_equations_bit_for_bit(
    tmp_path: Path, config: dict[str, Any], num_islands: int
) -> None:
    meeting = Streams(tmp_path, num_islands, **config)
    found = train_all(meeting.join_all(), NUM_STEPS, NUM_STEPS)
    for member, expected in zip(found, expected_weights(num_islands, config), strict=True):
        assert torch.equal(member.weights, expected)
        assert not member.missed
        assert [report.round for report in member.reports] == list(range(1, member.session.outer.round + 1))
        num_fragments = config.get("num_fragments", 1)
        assert [report.fragment for report in member.reports] == [
            (report.round - 1) % num_fragments for report in member.reports
        ]
        assert member.session.outer.round == count_rounds(member.session.config, NUM_STEPS)


def test_delays_longer_than_from_fragment_to_fragment(tmp_path: Path) -> None:
    """Several are under way at a time."""
    config = {**FOUR, "fragment_sync_delay": 7}
    meeting = Streams(tmp_path, **config)
    found = train_all(meeting.join_all(), NUM_STEPS, NUM_STEPS)
    for member, expected in zip(found, expected_weights(2, config), strict=True):
        assert torch.equal(member.weights, expected)


@pytest.mark.parametrize("after", [6, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [FOUR, {**FOUR, **BEHIND}], ids=["fragments", "behind"])
def test_a_run_goes_on_from_the_middle_of_a_round_bit_for_bit(
    tmp_path: Path, config: dict[str, Any], after: int
) -> None:
    """All islands are killed, and start again."""
    meeting = Streams(tmp_path, **config)
    first = train_all(meeting.join_all(), after, NUM_STEPS)
    checkpoints = [member.save(tmp_path / f"checkpoint-{member.number}") for member in first]
    for member in first:
        member.die()
    again = train_all(meeting.join_all(checkpoints), NUM_STEPS - after, NUM_STEPS)
    for member, expected in zip(again, expected_weights(2, config), strict=True):
        assert torch.equal(member.weights, expected)


@pytest.mark.parametrize("config", [FOUR, {**FOUR, **BEHIND}], ids=["fragments", "behind"])
def test_a_killed_island_stalls_nobody_and_one_that_resumes_catches_up(tmp_path: Path, config: dict[str, Any]) -> None:
    meeting = Streams(tmp_path, 3, min_islands=2, grace=5.0, **config)
    islands = train_all(meeting.join_all(), 9)
    checkpoint = islands[1].save(tmp_path / "checkpoint-9")
    islands[1].die()
    run_islands(2, lambda which: islands[2 * which].stream(10).drain())
    assert islands[0].hash == islands[2].hash
    assert islands[0].session.outer.round > 6
    again = meeting.join(1, checkpoint)
    assert again.hash == islands[0].hash, "it has carried out what it was away for"
    everyone = [islands[0], again, islands[2]]
    target = islands[0].session.outer.round + 6
    run_islands(3, lambda which: everyone[which].stream_to(target))
    hashes: dict[int, set[str]] = {}
    for member in everyone:
        for report in member.reports:
            hashes.setdefault(report.round, set()).add(report.outer_hash)
    assert all(len(found) <= 1 for found in hashes.values())
    assert any(1 in report.participants for report in again.reports)


@pytest.mark.parametrize("config", [FOUR, {**FOUR, **BEHIND}], ids=["fragments", "behind"])
def test_an_island_that_joins_takes_over_all_fragments(tmp_path: Path, config: dict[str, Any]) -> None:
    meeting = Streams(tmp_path, 2, max_islands=3, grace=0.5, snapshot_every=3, **config)
    islands = train_all(meeting.join_all(), 13)
    late = meeting.join(2)
    assert late.hash == islands[0].hash
    for fragment, other in zip(late.session.outer.fragments, islands[0].session.outer.fragments, strict=True):
        assert torch.equal(fragment.method.parameters, other.method.parameters)
        momenta = [part.method.state_dict()["momentum"] for part in (fragment, other)]
        assert torch.equal(*momenta)
    everyone = [*islands, late]
    target = islands[0].session.outer.round + 6
    run_islands(3, lambda which: everyone[which].stream_to(target))
    assert any(report.participants == [0, 1, 2] for report in late.reports)


def steps_until_due(member: Streamer) -> list[int]:
    """Of each fragment's next round, in their order."""
    outer = member.session.outer
    fragments = [outer.fragment_of(outer.num_begun + 1 + distance) for distance in range(len(outer.fragments))]
    return [fragment.due_at - fragment.steps for fragment in fragments]


def test_fragments_take_turns_where_a_new_run_goes_on_from_another_islands_checkpoint(tmp_path: Path) -> None:
    before = Streams(tmp_path / "before", 2, **FOUR)
    islands = before.join_all()
    older = train_all(islands, 13)[0].save(tmp_path / "older")
    newer = train_all(islands, 8)[1].save(tmp_path / "newer")
    after = Streams(tmp_path / "after", 2, **FOUR)
    has_begun = partial(ObjectStore(after.url).get, "run.json", 1 << 20)

    def go_on(island: int) -> Streamer:
        if island == 1:
            wait_until(has_begun, "the new run")
        return after.join(island, newer if island else older)

    first, second = run_islands(2, go_on)
    assert second.hash == first.hash
    assert steps_until_due(second) == [2, 4, 6, 8]


def test_fragments_take_turns_after_rounds_were_missed_before_a_checkpoint(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, sync_timeout=1.0, **FOUR)
    islands = train_all(meeting.join_all(), 13)
    islands[1].die()
    lonely = islands[0].stream(7)
    assert lonely.missed
    checkpoint = lonely.save(tmp_path / "checkpoint")
    lonely.die()
    again = run_islands(2, lambda island: meeting.join(0, checkpoint) if not island else meeting.join(1))[0]
    assert steps_until_due(again) == [0, 2, 4, 6]


@pytest.mark.parametrize("config", [FOUR, {**FOUR, **BEHIND}], ids=["fragments", "behind"])
def test_progress_that_missed_a_round_comes_to_a_later_one(tmp_path: Path, config: dict[str, Any]) -> None:
    """With the average of the pseudo-gradients as the outer step, nothing of it is lost."""
    meeting = Streams(tmp_path, 2, min_islands=1, grace=0.0, sync_timeout=1.0, **{**config, **FEDAVG})
    first, late = meeting.join_all()
    first.stream(8).drain()  # all four fragments, by itself
    assert [report.participants for report in first.reports] == [[0]] * 4
    late.stream(2)
    before = {part: late.progress_of(part) for part in range(4)}
    late.drain().advance()
    for part, progress in before.items():
        assert torch.allclose(late.progress_of(part), progress, atol=1e-6)
    assert late.session.outer.round >= 1


def test_a_store_that_does_not_answer_lets_training_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Streams(tmp_path, 2, **{**FOUR, **BEHIND})
    islands = train_all(meeting.join_all(), 4)
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", fail)
        patched.setattr(ObjectStore, "create", fail)
        train_all(islands, 6)
    assert all(member.missed for member in islands)
    run_islands(2, lambda island: islands[island].stream_to(8))
    assert islands[0].reports[-1].participants == [0, 1]
    assert all(report.round == number for number, report in enumerate(islands[0].reports, start=1))


def after(event: threading.Event, call: Callable[..., Any], *given: Any) -> Any:
    event.wait(30)
    return call(*given)


def fail(*_: Any, **__: Any) -> None:
    raise StoreError("the store does not answer")


def test_a_norm_is_held_against_those_of_its_own_fragment(tmp_path: Path) -> None:
    """What is usual for one is out of all reason for another, and left out."""
    settings: dict[str, Any] = {
        "sync_every": 4,
        "num_fragments": 2,
        "fragment_patterns": ["layers", "."],
        "outlier_factor": 3.0,
    }
    islands = Streams(tmp_path, 3, **settings).join_all()
    for number, length in 7 * ((0, 100.0), (1, 1.0)):
        run_islands(3, partial(lambda number, length, which: islands[which].bring(number, length), number, length))
    assert all(report.participants == [0, 1, 2] for member in islands for report in member.reports)
    run_islands(3, lambda which: islands[which].bring(0, 100.0))
    run_islands(3, lambda which: islands[which].bring(1, 100.0 if which == 2 else 1.0))
    assert islands[0].reports[-1].participants == [0, 1]
    assert len({member.hash for member in islands}) == 1


@pytest.mark.parametrize("engine", ["bucket"], indirect=True)
def test_a_round_under_way_of_which_nothing_is_left_is_passed_over(tmp_path: Path) -> None:
    """As where a machine sleeps: the others go on, and clear up."""
    settings: dict[str, Any] = {
        **FOUR,
        **BEHIND,
        "min_islands": 1,
        "grace": 1.0,
        "snapshot_every": 2,
        "keep_rounds": 1,
    }
    first, asleep = Streams(tmp_path, 2, **settings).join_all()
    awake = threading.Event()
    for engine in asleep.session.rounds.archive.engines:
        engine.average = partial(after, awake, engine.average)  # type: ignore[method-assign]
    asleep.stream(3)  # a round is under way since step 2
    first.stream(40).drain()
    assert first.reports[0].participants == [0, 1]
    awake.set()
    asleep.stream(4).drain()
    assert asleep.session.outer.round >= first.session.outer.round >= 18, "it has taken over a snapshot"
    first.stream_to(asleep.session.outer.round)
    assert first.hash == asleep.hash


def test_an_island_that_leaves_does_not_wait_for_its_round_under_way(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, **{**FOUR, **BEHIND, "sync_timeout": 600.0})
    islands = meeting.join_all()
    islands[0].stream(3)  # its round waits for the other's offer
    islands[0].leave(finished=False)
    assert islands[0].session.outer.round == 0


def test_no_round_begins_after_the_last(tmp_path: Path) -> None:
    """Of an island that has steps left, as others were faster, while the last one is under way."""
    meeting = Streams(tmp_path, 2, **{**FOUR, **BEHIND, "fragment_sync_delay": 7, "min_islands": 1, "grace": 0.0})
    meeting.num_rounds = 3
    first, late = meeting.join_all()
    late.stream(10)  # of four that are due, the last one may not begin
    assert late.session.outer.num_begun == 3
    late.drain()
    assert late.session.is_over
    first.stream(10).drain()
    assert (first.session.outer.round, first.hash) == (3, late.hash)


def test_islands_with_other_fragments_are_refused(tmp_path: Path) -> None:
    meeting = Streams(tmp_path, 2, **FOUR, join_timeout=5.0)
    found = try_islands(2, lambda island: meeting.join(island, num_fragments=4 - island))
    assert any(isinstance(error, FingerprintError) and "num_fragments" in str(error) for error in found)
