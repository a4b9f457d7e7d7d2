"""Runs of many rounds: what an island remembers, asks and leaves behind is that of its last rounds."""

from __future__ import annotations

import gc
import os
import types
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.membership import unanimity
from hf_diloco.utils.clock import Clock
from tests.fixed_runs import Run
from tests.islands import run_islands
from tests.meetings import ENGINES, Meeting, Member
from tests.small_model import make_model

_OF_ALL = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.FrameType,
    types.CodeType,
    Clock,
)
STREAMING = {"num_fragments": 2, "fragment_sync_delay": 1}


def count_objects(root: object) -> int:
    """All that can be reached from an object and is no part of the program."""
    seen, rest = {id(root)}, [root]
    while rest:
        for one in gc.get_referents(rest.pop()):
            if id(one) not in seen and not isinstance(one, _OF_ALL):
                seen.add(id(one))
                rest.append(one)
    return len(seen)


def growth(before: list[int], after: list[int]) -> int:
    return max(late - early for early, late in zip(before, after, strict=True))


@pytest.mark.usefixtures("fast_clock")
@pytest.mark.parametrize(("engine", "settings"), [("bucket", {}), ("mesh", {}), ("bucket", STREAMING)])
def test_islands_that_come_and_go_remember_the_last_rounds_only(
    tmp_path: Path, engine: str, settings: dict[str, Any]
) -> None:
    meeting = Meeting(tmp_path, sync_every=1 if not settings else 2, **ENGINES[engine], **settings)
    islands = run_islands(2, meeting.island)

    def train(number_of_rounds: int) -> list[int]:
        run_islands(2, lambda island: train_to(islands[island], number_of_rounds))
        return [count_objects(island.session) for island in islands]

    assert growth(train(20), train(120)) < 75


def train_to(island: Member, round_number: int) -> None:
    while island.session.outer.round < round_number:
        island.step()
        if island.session.is_due():
            island.session.advance()


@pytest.mark.usefixtures("fast_clock")
def test_clearing_up_a_folder_looks_at_as_many_files_however_long_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(tmp_path, sync_every=1, snapshot_every=2)
    meeting.url = f"file://{tmp_path}/store"
    islands = run_islands(2, meeting.island)
    looks: list[object] = []
    stat = os.stat

    def look(path: Any, **more: Any) -> os.stat_result:
        looks.append(path)
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", look)

    def train(number_of_rounds: int) -> int:
        run_islands(2, lambda island: train_to(islands[island], number_of_rounds))
        islands[0].session.rounds.archive.snapshots.wait()
        looks.clear()
        islands[0].session.rounds.archive.snapshots.clear_up(keep_rounds=2)
        return looks.count("plan.json")

    assert train(10) == train(30) < 10


def test_islands_that_wait_for_all_remember_the_last_rounds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanimity, "KEPT_ATTEMPTS", 4)
    run = Run(tmp_path, 2, sync_every=1)
    models = [make_model() for _ in range(2)]
    sessions = run_islands(2, lambda island: run.join(island, models[island]))

    def train(island: int) -> None:
        session = sessions[island]
        for _ in range(50):
            session.outer.count_step(weight=4.0)
            session.sync()

    def count() -> list[int]:
        run_islands(2, train)
        return [count_objects(session) for session in sessions]

    assert growth(count(), count()) < 30
