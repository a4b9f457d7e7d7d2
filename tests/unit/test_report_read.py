"""Reading run folders: torn lines, resumed sections, missing parts, wrong folders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.errors import ConfigError
from hf_diloco.report import load_run, summarise
from hf_diloco.report.records import End, Eval, Start, Sync, Train, parse_line
from hf_diloco.trainer.record import Record
from tests.report_runs import end, evaluation, start, sync, train, whole_record, write_island, write_run


def test_reads_what_was_written(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "demo"))
    assert (run.name, [island.island for island in run.islands]) == ("demo", [0, 1])
    first = run.islands[0]
    assert [(r.step, r.loss) for r in first.of(Train)] == [(1, 3.0), (3, 2.5)]
    assert [(r.step, r.round, r.outer_hash) for r in first.of(Sync)] == [(2, 1, "hash-1"), (4, 2, "hash-2")]
    assert len(first.of(Start)) == len(first.of(End)) == 1
    assert first.num_bad_lines == 0


def test_islands_are_sorted_by_number_not_by_name(tmp_path: Path) -> None:
    for island in (10, 2, 0):
        write_island(tmp_path, island, [start(island, num_islands=11)])
    assert [island.island for island in load_run(tmp_path).islands] == [0, 2, 10]


def test_a_record_made_by_the_writer_itself(tmp_path: Path) -> None:
    writer = Record(tmp_path / "island-0")
    writer.write("start", 0, island=0, num_islands=1)
    writer.write("train", 1, loss=math.nan)
    writer.write("train", 2, learning_rate=0.1)
    writer.close()
    losses = [record.loss for record in load_run(tmp_path).islands[0].of(Train)]
    assert losses[0] is not None
    assert math.isnan(losses[0])  # not finite, which JSON cannot hold
    assert losses[1] is None  # not recorded


def test_the_record_of_a_script_that_writes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    launched = tmp_path / "launched" / "island-0"
    launched.mkdir(parents=True)
    own = write_island(tmp_path / "own", 0, [start(launched_in=str(launched)), train(1, 3.0), end()])
    (launched / "progress.json").write_text(json.dumps({"state": "done", "record": str(own)}))
    assert [record.loss for record in load_run(tmp_path / "launched").islands[0].of(Train)] == [3.0]


@pytest.mark.parametrize("launched_in", [None, "/runs/other/island-0"])
def test_a_record_that_says_nothing_of_the_folder_that_names_it_is_not_followed(
    tmp_path: Path, launched_in: str | None
) -> None:
    """A run folder that comes from another machine may name any path of this one."""
    launched = tmp_path / "launched" / "island-0"
    launched.mkdir(parents=True)
    own = write_island(tmp_path / "own", 0, [start(launched_in=launched_in), train(1, 3.0), end()])
    (launched / "progress.json").write_text(json.dumps({"state": "done", "record": str(own)}))
    assert load_run(tmp_path / "launched").islands[0].sections == ()


@pytest.mark.parametrize("record", [__file__, "\0"])
def test_a_record_of_another_machine_whose_place_cannot_be_read_here(tmp_path: Path, record: str) -> None:
    write_island(tmp_path, 1, [start(1)])
    (tmp_path / "island-0").mkdir()
    (tmp_path / "island-0" / "progress.json").write_text(json.dumps({"state": "done", "record": record}))
    assert [len(island.sections) for island in load_run(tmp_path).islands] == [0, 1]


def test_of_one_step_outer_and_inner_weights_may_be_evaluated(tmp_path: Path) -> None:
    write_island(tmp_path, 0, [start(), evaluation(4, 2.0), end(), evaluation(4, 1.0, weights="inner")])
    report = summarise(load_run(tmp_path))
    assert (report.eval_loss, report.eval_step) == (2.0, 4)
    assert not any("of its own weights" in warning for warning in report.warnings)


def test_a_number_of_islands_that_cannot_be_is_an_unreadable_line(tmp_path: Path) -> None:
    write_island(tmp_path, 0, [start(), train(1, 3.0), start(num_islands=10**9), train(2, 2.0), end()])
    run = load_run(tmp_path)
    assert run.islands[0].num_bad_lines == 1
    assert summarise(run).num_islands == start()["num_islands"]


@pytest.mark.parametrize("newline", ["", "\n"])
def test_a_torn_last_line_is_left_out(tmp_path: Path, newline: str) -> None:
    write_island(tmp_path, 0, [start(), train(1, 3.0)], tail='{"event": "train", "step": 2, "lo' + newline)
    island = load_run(tmp_path).islands[0]
    assert [record.step for record in island.of(Train)] == [1]
    assert island.num_bad_lines == 0


def test_a_line_torn_before_a_resume_is_left_out(tmp_path: Path) -> None:
    folder = write_island(tmp_path, 0, [start(), train(1, 3.0)], tail='{"event": "tra')
    writer = Record(folder)  # continues on a line of its own
    writer.write("start", 1, island=0)
    writer.close()
    island = load_run(tmp_path).islands[0]
    assert len(island.sections) == 2
    assert island.num_bad_lines == 0


def test_unreadable_lines_elsewhere_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps(start()), "garbage", json.dumps(train(1, 3.0)), '{"event": "sync", "step": 2}', "[1]", "", "x"]
    write_island(tmp_path, 0, [], tail="\n".join(lines))
    island = load_run(tmp_path).islands[0]
    assert island.num_bad_lines == 3  # garbage, a sync without its round, [1]; the last may be torn
    assert len(island.of(Train)) == 1


def test_the_last_of_an_event_and_step_wins(tmp_path: Path) -> None:
    first = [start(), train(1, 9.0), train(2, 8.0), sync(1, 2, outer_hash="old"), evaluation(2, 7.0), train(3, 6.0)]
    second = [start(step=1), train(2, 5.0), sync(1, 2, outer_hash="new"), evaluation(2, 4.0), train(3, 3.0), end()]
    island = load_run(write_island(tmp_path, 0, first + second).parent).islands[0]
    assert [(r.step, r.loss) for r in island.of(Train)] == [(1, 9.0), (2, 5.0), (3, 3.0)]
    assert [r.outer_hash for r in island.of(Sync)] == ["new"]
    assert [r.eval_loss for r in island.of(Eval)] == [4.0]


def test_a_resume_supersedes_later_steps_that_it_never_reached(tmp_path: Path) -> None:
    first = [start(), train(1, 9.0), sync(1, 2), train(3, 7.0), sync(2, 4), train(5, 6.0), end(5)]
    second = [start(step=2), train(3, 1.0)]
    island = load_run(write_island(tmp_path, 0, first + second).parent).islands[0]
    assert [(r.step, r.loss) for r in island.of(Train)] == [(1, 9.0), (3, 1.0)]
    assert [r.round for r in island.of(Sync)] == [1]
    assert island.of(End) == []


def test_two_logs_of_one_step_complete_each_other(tmp_path: Path) -> None:
    twice = [start(), train(2, 3.0), {"event": "train", "step": 2, "diloco/round": 1.0}]
    island = load_run(write_island(tmp_path, 0, twice).parent).islands[0]
    assert [record.loss for record in island.of(Train)] == [3.0]


def test_events_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    records = [start() | {"new": [1]}, {"event": "snapshot", "step": 1}, train(1, 3.0), end()]
    island = load_run(write_island(tmp_path, 0, records).parent).islands[0]
    assert island.num_bad_lines == 0
    assert len(island.sections[0].records) == 3


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "[" * 100_000, '{"sample": 1e999}'])
def test_other_files_may_be_missing_or_broken(tmp_path: Path, content: str) -> None:
    write_run(tmp_path)
    for name in ("run.json", "island-0/summary.json", "island-0/progress.json"):
        (tmp_path / name).write_text(content)
    run = load_run(tmp_path)
    assert not run.settings or run.settings == {"sample": math.inf}
    assert summarise(run).sample is None


def test_the_folder_of_one_island_is_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "demo")
    (tmp_path / "demo" / "run.json").write_text('{"seed": 1}')
    run = load_run(tmp_path / "demo" / "island-1")
    assert (run.name, [island.island for island in run.islands], run.settings) == ("demo/island-1", [1], {"seed": 1})


def test_the_output_folder_of_a_plain_trainer_is_a_run(tmp_path: Path) -> None:
    folder = write_island(tmp_path, 3, [start(1)]).rename(tmp_path / "out")
    run = load_run(folder)
    assert (run.name, [island.island for island in run.islands]) == ("out", [1])


def test_the_final_model_is_found(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert load_run(tmp_path).model is None
    (tmp_path / "model").mkdir()
    assert load_run(tmp_path).model == tmp_path / "model"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run folder at .*missing: give the folder .* runs/NAME"):
        load_run(tmp_path / "missing")


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(ConfigError, match="no run folder at"):
        load_run(tmp_path / "run.yaml")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(ConfigError, match=r"is not a run folder: it holds neither island-0.* runs/NAME"):
        load_run(tmp_path)


def test_the_folder_above_the_runs_names_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name)
    with pytest.raises(ConfigError, match=r"holds 2: give one of them \(\S*/a, \S*/b\)"):
        load_run(tmp_path)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="has not begun to train; try again"):
        load_run(tmp_path)


def test_an_unreadable_record(tmp_path: Path) -> None:
    (tmp_path / "island-0" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot read .*metrics.jsonl"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'{"step": 1}',
        b'{"event": "train"}',
        b'{"event": "train", "step": -1}',
        b'{"event": "train", "step": 1, "loss": "low"}',
        b'{"event": "sync", "step": 1, "round": 0}',
        b'{"event": "sync", "step": 1, "round": 1, "seconds_waiting": NaN}',
        b'{"event": "train", "step": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe",
    ],
)
def test_lines_that_are_no_records(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a metrics record"):
        parse_line(line)


# Robustness: whatever lies in the folder, the report is made, and its JSON is JSON.

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
)
_RECORDS = st.sampled_from([start(), train(1, 3.0), evaluation(2, 3.0), sync(1, 2), sync(2, 4), end()])


@st.composite
def _distorted(draw: st.DrawFn) -> dict[str, Any]:
    record = dict(draw(_RECORDS))
    for key in draw(st.lists(st.sampled_from(sorted(record)), max_size=3)):
        record[key] = draw(_VALUES)
    return record


def _report_of(content: bytes, folder: Path) -> dict[str, Any]:
    target = folder / "island-0" / "metrics.jsonl"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(content)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = summarise(load_run(folder)).model_dump_json()
    return dict(json.loads(text, parse_constant=no_constant))


@given(content=st.binary(max_size=200))
def test_any_bytes(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert _report_of(content, tmp_path_factory.mktemp("run"))["eval_loss"] is None


@settings(max_examples=200)
@given(records=st.lists(_distorted(), max_size=8))
def test_any_values(records: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    content = "\n".join(map(json.dumps, records)).encode()
    report = _report_of(content, tmp_path_factory.mktemp("run"))
    assert report["covers"] == [0]
    for shares in filter(None, [report["shares"]]):
        assert math.isclose(sum(part for part in shares.values() if part is not None), 1, abs_tol=1e-6)


@given(data=st.data())
def test_a_record_cut_anywhere_is_a_shorter_record(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = "".join(json.dumps(record) + "\n" for record in whole_record()).encode()
    cut = data.draw(st.integers(0, len(whole)))
    _report_of(whole[:cut], folder)
    island = load_run(folder).islands[0]
    num_lines = whole[: cut + 1].count(b"\n")  # a line that lacks only its newline is whole
    assert sum(len(section.records) for section in island.sections) == num_lines
    assert island.num_bad_lines == 0
