"""`hf-diloco init ray`: its jobs, on a Ray cluster of this machine's own where Ray is installed."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.clocks import LONG
from tests.deployed import RUN_FILE, STEPS, assert_run_has_ended, progress, starts, wait_until
from tests.processes import ROOT, Processes, find_free_port, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("ray") is None, reason='Ray is not installed (pip install "ray[default]")'),
]


@pytest.fixture
def cluster() -> Iterator[dict[str, object]]:
    """The environment in which Ray's programs find a cluster of one node."""
    dashboard = find_free_port()
    environment: dict[str, object] = {
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": 0,
        "RAY_worker_niceness": 0,  # Ray's own 15 would starve the islands on a busy machine
        "PYTHONPATH": ROOT,
    }
    ports = {name: find_free_port() for name in ("", "ray-client-server-", "dashboard-agent-listen-")}
    options = [f"--{name}port={port}" for name, port in ports.items()]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder, Processes() as processes:
        command = ["ray", "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
        head = processes.spawn(
            [*command, *options, f"--dashboard-port={dashboard}", f"--temp-dir={folder}"],
            env=environment | {"RAY_ADDRESS": None},  # of a cluster that is there already
        )
        head.wait_for("Ray runtime started", 3 * LONG)
        yield environment


def test_ray_runs_islands_and_one_that_was_stopped_comes_back(tmp_path: Path, cluster: dict[str, object]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN_FILE | {"output": str(tmp_path / "runs")}))
    islands = [tmp_path / "runs" / "run" / f"island-{number}" for number in range(2)]
    program = [sys.executable, "-m", "hf_diloco.cli", "init", "ray", "run.yaml"]
    run([*program, "--rendezvous", f"file://{tmp_path}/store"], cwd=tmp_path)
    submit: list[str | Path] = ["bash", tmp_path / "deploy" / "run" / "ray" / "submit.sh"]
    submitted = run(submit, env=cluster, cwd=tmp_path).output
    jobs = re.findall(r"Job '(run-\d-\S+)' submitted", submitted)
    wait_until(lambda: all(int(str(progress(one)["round"])) >= 2 for one in islands), "no second round")
    assert "was stopped" in run(["ray", "job", "stop", jobs[1]], env=cluster).output
    assert progress(islands[1])["step"] != STEPS
    (again,) = re.findall(r"Job '(run-1-\S+)' submitted", run([*submit, "1"], env=cluster).output)
    for job in (jobs[0], again):
        wait_until(lambda job=job: "succeeded" in _status(job, cluster), f"{job} does not end")  # type: ignore[misc]
    assert starts(islands[1]) == ["anew", "resumed"]
    assert_run_has_ended(*islands)


def _status(job: str, cluster: dict[str, object]) -> str:
    return run(["ray", "job", "status", job], env=cluster, expect=None).output
