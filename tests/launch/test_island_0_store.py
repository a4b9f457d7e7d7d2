"""Islands that come and go over tcp://: island 0 keeps the store where they meet."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos import run_file
from tests.processes import Process, Processes, find_free_port, run as run_command
from tests.records import events
from tests.secret_files import forms_of, make_secrets

ROUNDS, SYNC_EVERY = 14, 4
COMMAND = [sys.executable, "-m", "hf_diloco.cli"]
SETTINGS = {"num_islands": 2, "max_islands": None, "exchange_timeout": 4.0}


def wait_until(is_true: Callable[[], bool], *watched: Process) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert all(one.popen.poll() is None for one in watched), "\n".join(one.output for one in watched)
        assert time.monotonic() < deadline, "\n".join(one.output for one in watched)
        time.sleep(0.05)


class Run:
    """A run of two islands, each launched by itself."""

    def __init__(self, folder: Path, processes: Processes, **settings: Any) -> None:
        self._folder = folder
        self._file = self.write("run.yaml", **settings)
        self._rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
        self._processes = processes
        self.folders = [folder / "chaos" / f"island-{island}" for island in (0, 1)]
        self.jobs: list[Process] = []

    def begin(self) -> Run:
        """Returns when both have taken some rounds."""
        self.jobs = [self.launch(island) for island in (0, 1)]
        wait_until(lambda: all(len(events(one, "sync")) >= 4 for one in self.folders), *self.jobs)
        return self

    def write(self, name: str, **settings: Any) -> Path:
        """A run file."""
        plain = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
        file = self._folder / name
        file.write_text(yaml.safe_dump(run_file(self._folder, ROUNDS, SYNC_EVERY, **{**SETTINGS, **plain})))
        return file

    def launch(self, island: int, *more: str, file: Path | None = None) -> Process:
        command = [*COMMAND, "launch", file or self._file, "--island", island, "--rendezvous", self._rendezvous, *more]
        return self._processes.spawn([str(word) for word in command], env={"OMP_NUM_THREADS": 1})

    def kill(self, island: int) -> None:
        """Returns when its trainer, too, has ended."""
        self.jobs[island].kill()
        self.jobs[island].wait(expect=None)
        wait_until(lambda: not _is_locked(self.folders[island] / "log.txt"))


@pytest.mark.distributed
def test_island_0_is_killed_and_comes_back_with_what_it_kept(tmp_path: Path) -> None:
    secrets = make_secrets(tmp_path / "secrets", 2)
    with Processes() as processes:
        run = Run(tmp_path, processes, max_islands=3, min_islands=2, **secrets).begin()
        shown = [line for process in processes.alive() for line in process.cmdline()]
        run.kill(0)
        before = events(run.folders[1], "sync")[-1]["round"]
        run.jobs[0] = run.launch(0, "--resume", "auto")
        output = "\n".join(job.wait(140).output for job in run.jobs)
    mine, other = ({sync["round"]: sync["outer_hash"] for sync in events(folder, "sync")} for folder in run.folders)
    common = (
        mine.keys() & other.keys()
    )  # island 1 may have trained on without a round meanwhile, and have ended before
    assert max(common) > before, output
    assert {number: mine[number] for number in common} == {number: other[number] for number in common}
    assert "islands meet here, at tcp://127.0.0.1" in output
    left = {str(path): path.read_bytes() for path in run.folders[0].parent.rglob("*") if path.is_file()}
    assert {"metrics.jsonl", "log.txt", "model.safetensors", "outer.json"} <= {Path(name).name for name in left}
    assert any("--island" in word for word in shown)
    left |= {"output": output.encode(), "command lines": "\n".join(shown).encode()}
    secret = [form for island in (0, 1) for form in forms_of(secrets, island)]
    assert not [name for name, data in left.items() if any(form in data for form in secret)]


@pytest.mark.distributed
def test_island_0_goes_on_without_the_other(tmp_path: Path) -> None:
    with Processes() as processes:
        run = Run(tmp_path, processes, min_islands=1, exchange="bucket", grace=20.0).begin()
        run.kill(1)
        output = run.jobs[0].wait(140).output
    last = events(run.folders[0], "sync")[-1]
    assert (last["round"], last["participants"]) == (ROUNDS, [0]), output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stranger", "max_islands", "is_revoked"),
    [(1, None, False), (2, 3, False), (1, None, True)],
    ids=["fixed", "come and go", "fixed, revoked"],
)
def test_an_island_whose_identity_is_not_listed_is_told_and_the_others_finish(
    tmp_path: Path, stranger: int, max_islands: int | None, is_revoked: bool
) -> None:
    """It holds the run's key. By the command line alone: keys are made there, and every island is launched."""
    keys = [*COMMAND, "keys", "make"]
    run_command([*keys, "--shared", str(tmp_path / "run.key")])
    files = [tmp_path / f"island-{name}.pem" for name in ("0", "1", "other")]
    public = [run_command([*keys, str(file)]).output.split()[-1] for file in files]
    secrets = {"key_file": tmp_path / "run.key", "max_islands": max_islands, "min_islands": max_islands and 2}
    listed: dict[int, Any] = dict(enumerate(public[:2]))
    if is_revoked:
        listed[stranger] = [public[1], f"{public[2]} until 1"]
    with Processes() as processes:
        identities = {"identity_file": tmp_path / "island-{island}.pem", "identities": listed}
        run = Run(tmp_path, processes, **identities, **secrets, exchange_timeout=60.0)  # none of the two is lost
        run.jobs.append(run.launch(0))
        run.jobs[0].wait_for("tcp://127.0.0.1")
        its_own = {"identity_file": files[2], "identities": {**listed, stranger: public[2]}}
        refused = run.launch(stranger, file=run.write("other.yaml", **its_own, **secrets)).wait(expect=1).output
        run.jobs.append(run.launch(1))
        output = "\n".join(job.wait(140).output for job in run.jobs)
    (said,) = [line for line in refused.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: island {stranger} failed (exit code 1): island ")
    assert public[2] in said
    assert f"(identities.{stranger})" in said
    assert ("it was replaced" if is_revoked else "on all islands") in said
    assert "Traceback" not in refused
    hashes = [events(folder, "sync")[-1]["outer_hash"] for folder in run.folders]
    assert hashes[0] == hashes[1], output
    assert [len(events(folder, "sync")) for folder in run.folders] == [ROUNDS, ROUNDS], output


def _is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
