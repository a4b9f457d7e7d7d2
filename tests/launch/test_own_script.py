"""`hf-diloco launch -- COMMAND`: islands that run a script of the user's own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.report import load_run, summarise
from hf_diloco.utils.files import STOP_FILE
from tests.processes import ROOT, Processes, run
from tests.records import wait_for_step

pytestmark = pytest.mark.distributed
LAUNCH: list[str | os.PathLike[str]] = [sys.executable, "-m", "hf_diloco.cli", "launch", "--islands", "2"]
SCRIPT = ["-m", "tests.programs.own_script"]
LOOP = ["-m", "tests.programs.own_loop"]
LOOPS_LAST = re.compile(r"stopped (\w+), round (\d+), weights (\[.*\])")
LAST = re.compile(r"I am (\d) of 2, (\d+) threads, (\d) ranks, weights (-?[\d.]+)")


def test_islands_find_each_other_and_show_where_they_are(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *SCRIPT, tmp_path / "out", "4"]
    output = processes.spawn(command).wait().output
    said = LAST.findall(output)
    assert sorted(island for island, *_ in said) == ["0", "1"]
    assert len({weights for *_, weights in said}) == 1, "4 is a multiple of sync_every"
    assert "done, step 4/4, round 2" in output
    assert f"meeting at {load_run(tmp_path / 'runs' / SCRIPT[1]).rendezvous};" in output
    assert LAST.search((tmp_path / "runs" / SCRIPT[1] / "island-1" / "log.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [["torchrun", "--nproc_per_node", "2"], ["accelerate", "launch", "--multi_gpu", "--num_processes=2"]]
)
def test_launchers_of_ranks_get_ports_of_their_own(launcher: list[str], tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", *launcher, *SCRIPT, tmp_path / "out", "4"]
    said = LAST.findall(processes.spawn(command).wait().output)
    assert [num_ranks for _, _, num_ranks, _ in said] == ["2", "2"]
    assert len({weights for *_, weights in said}) == 1


def test_ctrl_c_leaves_a_checkpoint_of_each_island(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *SCRIPT, tmp_path / "out", "100000"]
    launcher = processes.spawn(command)
    wait_for_step(launcher, tmp_path / "runs" / SCRIPT[1], 0, 1)
    launcher.interrupt()
    output = launcher.wait(expect=3).output
    assert "islands 0 and 1 finish the step and write a checkpoint" in output
    assert len(re.findall(r"launcher │ island \d stopped, at step \d+ of 100,000", output)) == 2
    for island in "01":
        assert list((tmp_path / "out" / island).glob("checkpoint-*/diloco/outer.json"))
    assert not [one for one in processes.alive() if one.pid != launcher.pid]


def test_islands_of_a_script_without_a_callback_are_said_to_train_apart(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", "-c", "print('trained')"]
    assert "warning: nothing was heard of a DiLoCoCallback" in processes.spawn(command).wait().output


def test_an_error_of_the_script_is_shown(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *SCRIPT, tmp_path / "out", "-1"]
    output = processes.spawn(command).wait(expect=1).output
    assert "ValueError: these are no steps" in output
    assert re.search(r"island-[01]/log.txt", output), "of the one that failed first"


def test_a_loop_shows_where_it_is_and_has_a_report(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *LOOP, tmp_path / "out", "8"]
    output = processes.spawn(command).wait().output
    assert "done, step 8/8, round 2" in output
    report = summarise(load_run(tmp_path / "runs" / LOOP[1]))
    assert [(one.steps, one.num_rounds, one.ended) for one in report.islands] == [(8, 2, True)] * 2
    assert (report.num_rounds_compared, report.mismatched_rounds) == (2, ())
    assert report.bytes_sent


def test_ctrl_c_has_a_loop_that_asks_save_and_go_on_from_there(tmp_path: Path, processes: Processes) -> None:
    place: list[str | os.PathLike[str]] = ["--output", tmp_path / "runs", "--", "python", *LOOP, tmp_path / "out"]
    launcher = processes.spawn([*LAUNCH, *place, "100000", "--asks"])
    wait_for_step(launcher, tmp_path / "runs" / LOOP[1], 0, 1, step=5)
    launcher.interrupt()
    output = launcher.wait(expect=3).output
    assert "islands 0 and 1 finish the step and write a checkpoint" in output
    assert len(re.findall(r"launcher │ island \d stopped, at step", output)) == 2
    stopped = LOOPS_LAST.findall(output)
    assert [was_stopped for was_stopped, *_ in stopped] == ["True", "True"]
    (round_,) = {int(number) for _, number, _ in stopped}

    output = processes.spawn([*LAUNCH, *place, str(4 * (round_ + 3)), "--asks", "--resume"]).wait().output
    assert len(re.findall(r"begins at step [1-9]", output)) == 2
    ended = LOOPS_LAST.findall(output)
    assert [(was_stopped, int(number)) for was_stopped, number, _ in ended] == [("False", round_ + 3)] * 2
    assert len({weights for *_, weights in ended}) == 1


def test_ctrl_c_ends_a_loop_that_does_not_ask_at_once(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *LOOP, tmp_path / "out", "100000"]
    launcher = processes.spawn(command)
    wait_for_step(launcher, tmp_path / "runs" / LOOP[1], 0, 1)
    launcher.interrupt()
    output = launcher.wait(expect=130).output
    assert "no script has called should_stop() yet, ending islands 0 and 1" in output


@pytest.mark.slow
def test_the_example_of_a_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """With the data that it would have seen."""
    example: list[str | os.PathLike[str]] = [sys.executable, ROOT / "examples" / "accelerate_loop.py"]
    stop = tmp_path / "launcher" / STOP_FILE
    stop.parent.mkdir()
    last = re.compile(r"outer parameters (\w+)")
    whole = tmp_path / "whole"
    whole.mkdir()
    (expected,) = last.findall(run(example, cwd=whole).output)
    stop.touch()
    stopped = run(example, cwd=tmp_path, env={ENV_FOLDER: stop.parent}).output
    assert not last.search(stopped)
    assert last.findall(run([*example, "--resume"], cwd=tmp_path).output) == [expected]
