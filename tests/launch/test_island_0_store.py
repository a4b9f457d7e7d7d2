"""Islands that come and go over tcp://: island 0 keeps the store where they meet."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos import run_file
from tests.processes import Process, Processes, find_free_port

ROUNDS, SYNC_EVERY = 14, 4
COMMAND = [sys.executable, "-m", "hf_diloco.cli"]
SETTINGS = {"num_islands": 2, "max_islands": None, "exchange_timeout": 4.0}


def syncs_of(folder: Path) -> list[dict[str, Any]]:
    """All rounds that an island has reported; none before its first."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "sync"]


def wait_until(is_true: Callable[[], bool], *watched: Process) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert all(one.popen.poll() is None for one in watched), "\n".join(one.output for one in watched)
        assert time.monotonic() < deadline, "\n".join(one.output for one in watched)
        time.sleep(0.05)


class Run:
    """A run of two islands, each launched by itself."""

    def __init__(self, folder: Path, processes: Processes, **settings: Any) -> None:
        self._file = folder / "run.yaml"
        self._file.write_text(yaml.safe_dump(run_file(folder, ROUNDS, SYNC_EVERY, **{**SETTINGS, **settings})))
        self._rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
        self._processes = processes
        self.folders = [folder / "chaos" / f"island-{island}" for island in (0, 1)]
        self.jobs = [self.launch(island) for island in (0, 1)]
        wait_until(lambda: all(len(syncs_of(one)) >= 4 for one in self.folders), *self.jobs)

    def launch(self, island: int, *more: str) -> Process:
        command = [*COMMAND, "launch", self._file, "--island", island, "--rendezvous", self._rendezvous, *more]
        return self._processes.spawn([str(word) for word in command], env={"OMP_NUM_THREADS": 1})

    def kill(self, island: int) -> None:
        """Returns when its trainer, too, has ended."""
        self.jobs[island].kill()
        self.jobs[island].wait(expect=None)
        wait_until(lambda: not _is_locked(self.folders[island] / "log.txt"))


@pytest.mark.distributed
def test_island_0_is_killed_and_comes_back_with_what_it_kept(tmp_path: Path) -> None:
    with Processes() as processes:
        run = Run(tmp_path, processes, max_islands=3, min_islands=2)
        run.kill(0)
        before = syncs_of(run.folders[1])[-1]["round"]
        run.jobs[0] = run.launch(0, "--resume", "auto")
        output = "\n".join(job.wait(140).output for job in run.jobs)
    mine, other = ({sync["round"]: sync["outer_hash"] for sync in syncs_of(folder)} for folder in run.folders)
    common = (
        mine.keys() & other.keys()
    )  # island 1 may have trained on without a round meanwhile, and have ended before
    assert max(common) > before, output
    assert {number: mine[number] for number in common} == {number: other[number] for number in common}
    assert "islands meet here, at tcp://127.0.0.1" in output


@pytest.mark.distributed
def test_island_0_goes_on_without_the_other(tmp_path: Path) -> None:
    with Processes() as processes:
        run = Run(tmp_path, processes, min_islands=1, exchange="bucket", grace=20.0)
        run.kill(1)
        output = run.jobs[0].wait(140).output
    last = syncs_of(run.folders[0])[-1]
    assert (last["round"], last["participants"]) == (ROUNDS, [0]), output


def _is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
