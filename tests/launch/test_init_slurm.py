"""`hf-diloco init slurm`: its job array, under Slurm itself where that is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deployed import RUN_FILE, assert_run_has_ended, progress, starts, wait_until
from tests.processes import Processes, run
from tests.slurm import IS_INSTALLED, jobs, start_slurm

STORE = "s3://bucket/run"
ACCELERATE = """\
echo accelerate "$@"
config=$3
for _ in $(seq 300); do
    [ -e "$ISLAND/stop" ] && exit 3
    [ -e "$ISLAND/finish" ] && exit 0
    sleep 0.1
done
exit 1
"""
SETTING = 'deepspeed={"zero_optimization": {"stage": 2}}'  # spaces and quotes must survive two shells


def init(folder: Path, *arguments: str | Path) -> Path:
    """Writes the files for folder/run.yaml; returns the batch script."""
    run([sys.executable, "-m", "hf_diloco.cli", "init", "slurm", folder / "run.yaml", *arguments], cwd=folder)
    (script,) = folder.glob("deploy/run/slurm/*.sbatch")
    return script


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    """The environment of a task of a job array on two nodes with four GPUs each; `srun` is the second node."""
    programs = {
        "scontrol": 'if [ "$1 $2" = "show hostnames" ]; then printf "node17\\nnode18\\n"; else echo scontrol "$@"; fi',
        "srun": 'shift 2; SLURM_NODEID=1 exec "$@"',
        "accelerate": ACCELERATE,
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text("training: {max_steps: 3}\ndiloco: {num_islands: 2}\n")
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "ISLAND": tmp_path / "runs" / "run" / "island-1",
        "SLURM_JOB_ID": 12345,
        "SLURM_ARRAY_JOB_ID": 12345,
        "SLURM_ARRAY_TASK_ID": 1,
        "SLURM_JOB_NODELIST": "node[17-18]",
        "SLURM_CPUS_PER_TASK": 32,
    }


def script_of_two_nodes(folder: Path) -> Path:
    """A script that finds this test's programs before the environment's own."""
    script = init(folder, SETTING, "--nodes-per-island", "2", "--gpus-per-island", "4", "--rendezvous", STORE)
    text = script.read_text()
    assert f"export PATH={Path(sys.executable).parent}:$PATH\n" in text
    script.write_text(text.replace(f"export PATH={Path(sys.executable).parent}:$PATH\n", ""))
    return script


def test_an_island_spans_its_nodes(tmp_path: Path, job: dict[str, object]) -> None:
    script = script_of_two_nodes(tmp_path)
    with Processes() as processes:
        task = processes.spawn(["bash", script], env=job)
        task.wait_for("accelerate launch")
        (tmp_path / "runs" / "run" / "island-1" / "finish").touch()
        output = task.wait(60).output
    config = script.parent / "accelerate.yaml"
    assert (
        f"launch --config_file {config} --main_process_ip node17 --main_process_port 32345 --machine_rank 1 "
        f'-m hf_diloco.apps.lm {tmp_path / "run.yaml"} {SETTING} name="run"' in output
    )
    assert "scontrol requeue" not in output
    values = yaml.safe_load(config.read_text())
    assert (values["num_machines"], values["num_processes"]) == (2, 8)
    assert values["distributed_type"] == "DEEPSPEED"


@pytest.mark.parametrize(
    ("number", "goes_back"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)], ids=["time is up", "scancel"]
)
def test_an_island_that_is_stopped(
    tmp_path: Path, job: dict[str, object], number: signal.Signals, goes_back: bool
) -> None:
    script = script_of_two_nodes(tmp_path)
    with Processes() as processes:
        task = processes.spawn(["bash", script], env=job)
        task.wait_for("accelerate launch")
        task.popen.send_signal(number)
        output = task.wait(60, expect=3).output
    assert ("scontrol requeue 12345_1" in output) is goes_back


def test_shellcheck_accepts_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "run.yaml").write_text("training: {max_steps: 3}\ndiloco: {num_islands: 2}\n")
    script = init(folder, SETTING, "--rendezvous", STORE)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None, "install the extra `test`"
    completed = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
    assert not completed.stdout


def test_a_task_outside_an_array_says_what_is_missing(tmp_path: Path, job: dict[str, object]) -> None:
    script = script_of_two_nodes(tmp_path)
    completed = run(["bash", script], env=job | {"SLURM_ARRAY_TASK_ID": None}, expect=None)
    assert completed.returncode
    assert "sbatch --array=ISLAND" in completed.output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_INSTALLED, reason="Slurm is not installed (apt install slurmctld slurmd slurm-client)")
def test_slurm_runs_islands_and_requeues_one_whose_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN_FILE))
    islands = [tmp_path / "runs" / "run" / f"island-{number}" for number in range(2)]
    script = init(tmp_path, "--rendezvous", f"file://{tmp_path}/store")
    with Processes() as processes:
        slurm = start_slurm(tmp_path / "slurm", processes)
        submitted = processes.spawn(["sbatch", "--parsable", script], env=slurm).wait().output.strip()
        wait_until(lambda: all(int(str(progress(one)["round"])) >= 2 for one in islands), "no second round")
        run(["scancel", "--batch", "--signal=USR1", f"{submitted}_1"], env=slurm)  # as --signal=B:USR1@300 sends it
        wait_until(lambda: jobs(slurm).get("1") == "PENDING", "island 1 is not back in the queue")
        assert jobs(slurm)["0"] == "RUNNING"
        run(["scontrol", "update", f"JobId={submitted}_1", "StartTime=now"], env=slurm)
        wait_until(lambda: not jobs(slurm), "the array does not end")
    log = (script.parent / "island-1.log").read_text()
    assert starts(islands[1]) == ["anew", "resumed"], log
    assert_run_has_ended(*islands)
