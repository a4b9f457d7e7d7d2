"""`hf-diloco launch -- COMMAND`: islands that run a script of the user's own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Processes

pytestmark = pytest.mark.distributed
LAUNCH: list[str | os.PathLike[str]] = [sys.executable, "-m", "hf_diloco.cli", "launch", "--islands", "2"]
SCRIPT = ["-m", "tests.programs.own_script"]
LAST = re.compile(r"I am (\d) of 2, (\d+) threads, (\d) ranks, weights (-?[\d.]+)")


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


def test_islands_find_each_other_and_show_where_they_are(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *SCRIPT, tmp_path / "out", "4"]
    output = processes.spawn(command).wait().output
    said = LAST.findall(output)
    assert sorted(island for island, *_ in said) == ["0", "1"]
    assert len({weights for *_, weights in said}) == 1, "4 is a multiple of sync_every"
    assert "done, step 4/4, round 2" in output
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
    launcher.wait_for("island 0 .*training.*step")
    launcher.wait_for("island 1 .*training.*step")
    launcher.interrupt()
    output = launcher.wait().output
    assert "islands 0 and 1 finish the step and write a checkpoint" in output
    for island in "01":
        assert list((tmp_path / "out" / island).glob("checkpoint-*/diloco/outer.json"))
    assert not [one for one in processes.alive() if one.pid != launcher.pid]


def test_an_error_of_the_script_is_shown(tmp_path: Path, processes: Processes) -> None:
    command = [*LAUNCH, "--output", tmp_path / "runs", "--", "python", *SCRIPT, tmp_path / "out", "-1"]
    output = processes.spawn(command).wait(expect=1).output
    assert "ValueError: these are no steps" in output
    assert re.search(r"island-[01]/log.txt", output), "of the one that failed first"
