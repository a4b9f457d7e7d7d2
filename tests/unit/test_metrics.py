"""The island's own record: lines that a reader can trust, whatever happened to the writer."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from hf_diloco.errors import DuplicateIslandError
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.trainer.progress import Progress
from hf_diloco.trainer.record import IslandRecord, Record
from hf_diloco.transport.base import LaneStats


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "island-0" / "metrics.jsonl"
    writer = Record(path.parent)
    before = time.time()
    writer.write("train", 7, loss=1.5)
    (event,) = read(path)  # not closed, not flushed by us
    assert {name: event[name] for name in ("event", "step", "loss")} == {"event": "train", "step": 7, "loss": 1.5}
    assert before - 1 <= event["time"] <= time.time() + 1
    writer.write("sync", 8, participants=[0, 1], cosine=None, outer_hash="ab")
    assert read(path)[1]["participants"] == [0, 1]
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(value: float, tmp_path: Path) -> None:
    Record(tmp_path).write("train", 1, loss=value, grad_norm=2.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert read(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_progress_of_a_training_that_diverged_is_json(tmp_path: Path) -> None:
    Progress(tmp_path, max_steps=4).update(state="training", loss=math.nan)
    values = json.loads((tmp_path / "progress.json").read_text(), parse_constant=pytest.fail)
    assert (values["state"], values["loss"]) == ("training", None)


def test_a_clock_that_is_set_is_no_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Record(tmp_path)
    writer.write("start", 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    writer.write("train", 1)
    begun, trained = (event["time"] for event in read(tmp_path / "metrics.jsonl"))
    assert 0 <= trained - begun < 60


def test_what_a_script_logs_takes_the_place_of_nothing(tmp_path: Path) -> None:
    Record(tmp_path).write("train", 7, **{"event": 1.0, "step": 2.0, "time": 3.0, "loss": 4.0})
    (event,) = read(tmp_path / "metrics.jsonl")
    assert (event["event"], event["step"], event["loss"]) == ("train", 7, 4.0)
    assert event["time"] > 3


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        writer = Record(tmp_path)
        writer.write("train", step)
        writer.close()
    assert [event["step"] for event in read(path)] == [1, 2]


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "train", "step": 1}\n{"event": "tra')
    Record(tmp_path).write("train", 2)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1
    assert json.loads(lines[2])["step"] == 2
    with pytest.raises(ValueError):
        json.loads(lines[1])


def test_a_folder_that_is_moved_away_is_told_once_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All later events went into the moved file, which nobody found, and no warning was given."""
    folder, moved = tmp_path / "island-0", tmp_path / "moved"
    writer = Record(folder)
    writer.write("start", 0)
    writer.write("train", 1)
    folder.rename(moved)
    for step in (2, 3):
        writer.write("train", step)
    assert [event["step"] for event in read(moved / "metrics.jsonl")] == [0, 1]
    assert [(event["event"], event["step"]) for event in read(folder / "metrics.jsonl")] == [
        *(("start", 0), ("train", 2), ("train", 3)),
    ]
    assert caplog.text.count("has been deleted, moved or replaced") == 1
    edited = tmp_path / "edited"
    edited.write_bytes((folder / "metrics.jsonl").read_bytes())
    edited.replace(folder / "metrics.jsonl")  # as editors do
    writer.write("train", 4)
    assert [event["step"] for event in read(folder / "metrics.jsonl")] == [0, 2, 3, 4]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_process_that_another_has_replaced_writes_nothing_more(tmp_path: Path, is_moved: bool) -> None:
    folder = tmp_path / "island-0"
    old = Record(folder)
    old.write("start", 0)
    old.check_alone()
    if is_moved:
        folder.rename(tmp_path / "moved")
    new = Record(folder)
    new.write("start", 5)
    old.write("train", 1)
    with pytest.raises(DuplicateIslandError, match=r"another process has begun to train in .*island-0 since"):
        old.check_alone()
    new.write("train", 6)
    new.check_alone()
    assert [event["step"] for event in read(folder / "metrics.jsonl")][-2:] == [5, 6]


def test_an_empty_file_needs_no_repair(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    Record(tmp_path).write("train", 1)
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def make_report(**values: Any) -> SyncReport:
    known: dict[str, Any] = {
        "round": 1,
        "participants": [0, 1],
        "seconds_computing": 1.0,
        "seconds_waiting": 0.25,
        "seconds_exchanging": 0.5,
        "seconds_applying": 0.1,
        "bytes_sent": 100,
        "bytes_received": 90,
        "pseudo_gradient_norm": 1.0,
        "cosine": 0.5,
        "weight": 1.0,
        "outer_hash": "ab",
    }
    return SyncReport(**{**known, **values})


def test_totals_add_up(tmp_path: Path) -> None:
    record = IslandRecord(tmp_path)
    record.sync(make_report(), 10)
    record.sync(make_report(seconds_waiting=1.0, bytes_sent=7), 20)
    for steps in (0, 3):
        outer: Any = SimpleNamespace(round=2, steps=steps, on_boundary=not steps)
        record.end(20, outer, run_is_over=False)
    *_, event, later = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert event["seconds_waiting"] == 1.25
    assert event["seconds_exchanging"] == 1.0
    assert event["bytes_sent"] == 107
    assert event["bytes_received"] == 180
    assert isinstance(event["bytes_sent"], int)
    assert event["seconds_computing"] == pytest.approx(event["seconds_total"] - 2.25)
    assert (event["rounds"], event["on_boundary"], event["steps_since_sync"]) == (2, True, 0)
    assert later["on_boundary"] is False


def test_an_average_is_measured_as_it_passes() -> None:
    own, mean = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 4.0])
    stats = LaneStats()
    for where in (slice(0, 2), slice(2, 3)):
        if where.start == 0:
            stats.begin_lane()
        stats.observe(own[where], mean[where])
    stats.begin_lane()
    stats.observe(own[:0], mean[:0])
    assert stats.dot == 14.0
    assert stats.square == 20.0
    expected = [xxhash.xxh3_128_hexdigest(mean.numpy().tobytes()), xxhash.xxh3_128_hexdigest(b"")]
    assert stats.digests == expected
