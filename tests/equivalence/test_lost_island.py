"""An island is killed: the others say so, keep a checkpoint, and all go on from the newest common round."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Completed, Processes
from tests.trainer_islands import assert_equal, environment, start, tcp, trained_weights

pytestmark = pytest.mark.distributed

SETTINGS: dict[str, Any] = {"max_steps": 8, "save_steps": 2, "diloco": {"sync_timeout": 60, "exchange_timeout": 60}}


def run_both(folder: Path, resume: bool = False, expect: int | None = 0, **settings: Any) -> list[Completed]:
    rendezvous = tcp()
    settings["resume"] = "common" if resume else None
    with Processes() as processes:
        islands = [start(processes, folder, island, rendezvous, **SETTINGS | settings) for island in range(2)]
        return [island.wait(timeout=150, expect=expect) for island in islands]


def test_an_island_that_lost_its_disk_goes_on_from_a_copy_of_anothers_checkpoint(tmp_path: Path) -> None:
    run_both(tmp_path, max_steps=4)
    lost, kept = tmp_path / "island-1", tmp_path / "island-0" / "checkpoint-4"
    shutil.rmtree(lost)
    ends = run_both(tmp_path, resume=True, expect=None)
    assert all(end.returncode and "can take a copy of another island's newest" in end.output for end in ends)
    shutil.copytree(kept, lost / kept.name)
    run_both(tmp_path, resume=True)
    assert_equal(*trained_weights(tmp_path))
    assert json.loads((lost / "checkpoint-8" / "diloco" / "outer.json").read_text())["round"] == 4


def test_a_killed_island_is_named_and_the_run_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_both(whole)
    rendezvous = tcp()
    with Processes() as processes:
        survivor = start(processes, broken, 0, rendezvous, **SETTINGS)
        start(processes, broken, 1, rendezvous, **SETTINGS, fail_at=5)
        ended = survivor.wait(timeout=150, expect=None)
    assert ended.returncode != 0
    assert "IslandLostError: island 1 lost before round 3: the connection broke" in ended.output
    assert "resumes from the newest round" in ended.output
    pending = json.loads((broken / "island-0" / "checkpoint-6" / "diloco" / "outer.json").read_text())
    assert (pending["round"], pending["steps_since_sync"]) == (2, 2), "the round that could not take place is due"
    run_both(broken, resume=True)
    for first, second in zip(trained_weights(whole), trained_weights(broken), strict=True):
        assert_equal(first, second)


def test_loops_of_which_one_was_killed_go_on_from_the_newest_round_that_both_hold(tmp_path: Path) -> None:
    """Island 1 dies before it saves step 9; island 0 keeps that, and step 6 of the round before."""

    def train(name: str, *options: str, expect: int | None = 0) -> list[str]:
        rendezvous = tcp()
        command: list[str | os.PathLike[str]] = [
            sys.executable,
            "-m",
            "tests.programs.own_loop",
            tmp_path / name,
            "14",
            "--save-every",
            "3",
            *options,
        ]
        with Processes() as processes:
            islands = [processes.spawn(command, env=environment(island, rendezvous)) for island in range(2)]
            return [island.wait(timeout=150, expect=expect).output for island in islands]

    def last_lines(outputs: list[str]) -> list[str]:
        return [re.findall("^stopped .*$", output, re.MULTILINE)[0] for output in outputs]

    whole = last_lines(train("whole"))
    survivor, _ = train("broken", "--killed", "1", "9", expect=None)
    assert "IslandLostError: island 1 lost before round 3" in survivor
    saved = [{path.name for path in (tmp_path / "broken" / island).glob("checkpoint-*")} for island in "01"]
    assert saved == [{"checkpoint-6", "checkpoint-9"}, {"checkpoint-3", "checkpoint-6"}]
    again = train("broken", "--resume")
    assert all("begins at step 6" in output for output in again)
    assert last_lines(again) == whole
