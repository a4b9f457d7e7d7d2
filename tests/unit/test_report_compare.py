"""Several runs on one page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_diloco.cli.main import app
from hf_diloco.errors import ConfigError
from hf_diloco.report.compare import Candidate, load_candidates, plots, row, write_comparison
from tests.processes import run
from tests.report_runs import EVAL_LOSS, end, evaluation, start, sync, train, whole_record, write_island, write_run

PROGRAM = [sys.executable, "-m", "hf_diloco.cli", "compare"]


def of(folder: Path, other: Path) -> Candidate:
    return load_candidates([folder, other])[0]


def test_where_a_step_is_on_each_axis(tmp_path: Path) -> None:
    found = of(write_run(tmp_path / "first"), write_run(tmp_path / "second"))
    assert [found.at_seen(step) for step in (0, 2, 4)] == [0, 400, 800]  # two islands, 100 tokens a step
    assert [found.at_bytes(step) for step in (0, 1, 2, 3, 4)] == [0, 0, 8000, 8000, 16000]
    assert [found.at_time(step) for step in (0, 1, 2)] == [0, 1, 2]
    assert found.training == [(1, 3.5), (3, 3.0)]
    assert found.evaluations == [(4, EVAL_LOSS)]


def test_an_island_that_ended_early_trains_on_no_more(tmp_path: Path) -> None:
    write_island(tmp_path / "one", 0, whole_record(0))
    write_island(tmp_path / "one", 1, [start(1), sync(1, 2), end(2)])
    found = of(tmp_path / "one", write_run(tmp_path / "two"))
    assert [found.at_seen(step) for step in (2, 4)] == [400, 600]
    assert found.num_seen == 600


def test_pauses_and_steps_that_were_thrown_away_take_no_time(tmp_path: Path) -> None:
    first = [start(), train(1, 3.0, 1005.0), sync(1, 2, time=1010.0), train(3, 2.9, 1020.0)]
    resumed = [start(step=2, time=5000.0), train(3, 2.5, 5004.0), end(4)]
    resumed[-1]["time"] = 5010.0
    write_island(tmp_path / "one", 0, [*first, *resumed])
    found = of(tmp_path / "one", write_run(tmp_path / "two"))
    assert [found.at_time(step) for step in (1, 2, 3, 4)] == [5, 10, 14, 20]


def test_the_page(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    second = tmp_path / "<second>"
    for island in (0, 1):
        records = [start(island, outer_method="slowmo"), evaluation(2, 2.5), sync(1, 2), evaluation(4, 2.25), end()]
        write_island(second, island, records)
    page = write_comparison(load_candidates([first, second]), tmp_path / "page.html").read_text()
    assert re.findall("<h2>(Loss[^<]+)</h2>", page) == ["Loss by tokens", "Loss by time", "Loss by bytes sent"]
    assert page.count("<svg") == 3
    assert "<second>" not in page
    assert "&lt;second&gt;" in page
    assert "slowmo" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    write_island(unknown, 0, [start(tokens_per_step=None), train(1, 3.0), sync(1, 2, bytes_sent=None)])
    by_tokens, by_time, by_bytes = plots(load_candidates([write_run(tmp_path / "known"), unknown]))
    assert "Not recorded: unknown." in by_tokens.caption
    assert "Not recorded: unknown." in by_bytes.caption
    assert "Not recorded" not in by_time.caption
    no_start = tmp_path / "no start"
    write_island(no_start, 0, [train(1, 3.0), {"event": "train", "time": 1002.0, "step": 2}, sync(1, 2)])
    by_tokens, by_time, by_bytes = plots(load_candidates([tmp_path / "known", no_start]))
    assert "Not recorded: no start." in by_tokens.caption
    assert "Not recorded: no start." in by_time.caption
    assert "Not recorded" not in by_bytes.caption
    nothing = tmp_path / "nothing", tmp_path / "empty"
    for folder in nothing:
        write_island(folder, 0, [])
    assert [plot.svg for plot in plots(load_candidates(nothing))] == [None] * 3


@pytest.mark.parametrize(("times", "is_log"), [(2, False), (1000, True)])
def test_traffic_that_differs_widely_is_on_a_logarithmic_axis(times: int, is_log: bool, tmp_path: Path) -> None:
    """Or the line of the thrifty run would be a point at the left end."""
    for name, sent in (("thrifty", 1000), ("plain", times * 1000)):
        write_island(tmp_path / name, 0, [start(), sync(1, 2, bytes_sent=sent), evaluation(2, 2.0), end()])
    by_bytes = plots(load_candidates([tmp_path / "thrifty", tmp_path / "plain"]))[2]
    assert by_bytes.svg is not None
    assert (">10.0 kB<" in by_bytes.svg and ">100 kB<" in by_bytes.svg) == is_log


def test_nodes_are_compared_by_images(tmp_path: Path) -> None:
    for name in ("ring", "star"):
        write_island(tmp_path / name, 0, [start(method="dsgd", topology=name, num_islands=1), train(2, 1.0), end()])
    found = load_candidates([tmp_path / "ring", tmp_path / "star"])
    assert plots(found)[0].title == "Loss by images"
    assert row(found[1])[:4] == ("star", "dsgd on star", "1", "4")
    assert row(found[1])[5] == "16 images"


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_candidates([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert [entry.name for entry in found] == ["a/run", "b/run"]


def test_bad_input(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="two run folders or more"):
        load_candidates([folder])
    with pytest.raises(ConfigError, match="named twice"):
        load_candidates([folder, folder / ".." / "run"])


def test_the_command(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("first", "second")]
    output = run([*PROGRAM, *folders, "--html", tmp_path / "page.html"], env={"COLUMNS": 60}).output
    assert re.search(r"^second +— +2 +4 +2\.0794 +800 +10 s +80 +16\.0 kB +", output, re.MULTILINE)
    assert (tmp_path / "page.html").is_file()


def test_names_of_folders_are_no_commands_to_the_terminal(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name)) for name in ("first", "\x1b[2Jsecond")]
    assert re.search(r"^\?\[2Jsecond ", CliRunner().invoke(app, ["compare", *folders]).output, re.MULTILINE)


def test_the_command_for_programs(tmp_path: Path) -> None:
    """Its notes do not stand between the figures."""
    folders = [write_run(tmp_path / name / "run") for name in ("first", "second")]
    command = ["compare", *map(str, folders), "--json", "--html", str(tmp_path / "page.html")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert [Path(entry["name"]).parent.name for entry in found] == ["first", "second"]
    for entry in found:
        assert entry["eval_loss"] == EVAL_LOSS
        assert (entry["seconds_training"], entry["num_tokens"], entry["bytes_sent"]) == (10.0, 800, 16000)
    assert "page.html" in done.stderr


def test_a_run_that_diverged_is_json_too(tmp_path: Path) -> None:
    """Which has no NaN."""
    write_island(tmp_path / "one", 0, [start(), train(1, None), evaluation(2, None), end(2)])
    command = ["compare", str(tmp_path / "one"), str(write_run(tmp_path / "two")), "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found[0]["islands"][0]["train_loss"] is None
