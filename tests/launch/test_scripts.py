"""The cluster scripts, with stand-ins for what only a cluster has: srun, scontrol, ssh."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, Processes, run

SCRIPTS = ROOT / "scripts"
ACCELERATE = """\
echo accelerate "$@"
config=$3
island=$(dirname "$config")
for _ in $(seq 100); do [ -e "$island/stop" ] && exit 3; [ -e "$island/finish" ] && exit 0; sleep 0.1; done
exit 1
"""
SETTING = 'deepspeed={"zero_optimization": {"stage": 2}}'  # spaces and quotes must survive two shells


def put_programs(folder: Path, **programs: str) -> dict[str, object]:
    """Writes shell programs; returns the environment that finds them."""
    folder.mkdir()
    for name, body in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}")
        program.chmod(0o755)
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, object]:
    """The environment of a Slurm job of two nodes with four GPUs each; `srun` is node 1."""
    programs = put_programs(
        tmp_path / "bin",
        scontrol='[ "$1 $2" = "show hostnames" ] && printf "node17\\nnode18\\n"',
        srun='shift; SLURM_NODEID=1 exec "$@"',
        accelerate=ACCELERATE,
    )
    (tmp_path / "run.yaml").write_text(f"training: {{max_steps: 3}}\noutput: {tmp_path}/runs\n")
    return programs | {
        "PYTHONPATH": ROOT,
        "HF_DILOCO_ISLAND": 1,
        "HF_DILOCO_NUM_ISLANDS": 2,
        "HF_DILOCO_RENDEZVOUS": "tcp://a.example:29400",
        "SLURM_JOB_ID": 12345,
        "SLURM_JOB_NODELIST": "node[17-18]",
        "SLURM_NNODES": 2,
        "SLURM_GPUS_ON_NODE": 4,
        "SLURM_CPUS_PER_TASK": 16,
    }


def test_slurm_island_spans_its_nodes(tmp_path: Path, slurm: dict[str, object]) -> None:
    island = tmp_path / "runs" / "run" / "island-1"
    with Processes() as processes:
        job = processes.spawn([SCRIPTS / "slurm_island.sh", tmp_path / "run.yaml", SETTING], env=slurm)
        job.wait_for("accelerate launch")
        (island / "finish").touch()
        output = job.wait(20).output
    config = island / "accelerate.yaml"
    assert (
        f"launch --config_file {config} --machine_rank 1 -m hf_diloco.apps.lm {tmp_path / 'run.yaml'} {SETTING}"
        in output
    )
    values = yaml.safe_load(config.read_text())
    assert (values["num_machines"], values["num_processes"], values["main_process_ip"]) == (2, 8, "node17")
    assert values["distributed_type"] == "DEEPSPEED"


def test_slurm_island_stops_with_a_checkpoint_before_its_time_is_up(tmp_path: Path, slurm: dict[str, object]) -> None:
    with Processes() as processes:
        job = processes.spawn([SCRIPTS / "slurm_island.sh", tmp_path / "run.yaml"], env=slurm)
        job.wait_for("accelerate launch")
        job.popen.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 sends it
        job.wait(20, expect=3)


def test_slurm_island_says_what_is_missing(tmp_path: Path, slurm: dict[str, object]) -> None:
    completed = run(
        [SCRIPTS / "slurm_island.sh", tmp_path / "run.yaml"], env=slurm | {"HF_DILOCO_ISLAND": None}, expect=None
    )
    assert completed.returncode
    assert "set HF_DILOCO_ISLAND to the number of this island" in completed.output


def test_two_clusters_starts_an_island_on_each(tmp_path: Path) -> None:
    environment = put_programs(
        tmp_path / "bin",
        ssh=f'echo "on $1"; cd {tmp_path}; exec bash -c "$2"',
        tmux='echo "session $4"; exec bash -c "${5%; exec bash}"',
    )
    work = tmp_path / "my work"
    (work / ".venv" / "bin").mkdir(parents=True)
    program = work / ".venv" / "bin" / "hf-diloco"
    program.write_text('#!/bin/bash\nfor word in "$@"; do echo "word $word"; done\n')
    program.chmod(0o755)
    command: list[str | Path] = [
        SCRIPTS / "two_clusters.sh",
        "run.yaml",
        f"alice@a.example:{work}",
        f"bob@b.example:{work}",
    ]
    output = run([*command, "tcp://10.8.0.1:29400", SETTING], env=environment).output
    first, second = output.split("on bob@b.example")
    for island, part in enumerate((first, second)):
        words = [line.removeprefix("word ") for line in part.splitlines() if line.startswith("word ")]
        assert f"session diloco-{island}" in part
        assert words == [
            *("launch", "run.yaml", SETTING, "--island", str(island), "--num-islands", "2"),
            *("--rendezvous", "tcp://10.8.0.1:29400"),
        ]


def test_two_clusters_usage() -> None:
    assert "usage:" in run([SCRIPTS / "two_clusters.sh"], expect=2).output
