"""Slurm of this machine's own: a controller and one node, in a folder, for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import time
from pathlib import Path

from tests.clocks import LONG
from tests.processes import Processes, find_free_port, run

IS_INSTALLED = all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "srun"))
_NUM_CPUS = 8  # that jobs may ask for; this machine may have fewer


def start_slurm(folder: Path, processes: Processes) -> dict[str, object]:
    """Starts both daemons, and returns the environment in which Slurm's programs find them."""
    host = socket.gethostname().partition(".")[0]
    user = pwd.getpwuid(os.getuid()).pw_name
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser={user}\nSlurmdUser={user}\n"
        f"SlurmctldPort={find_free_port()}\nSlurmdPort={find_free_port()}\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
        "AuthType=auth/none\nCredType=cred/none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nMpiDefault=none\nReturnToService=2\n"
        "KillWait=5\nSlurmdParameters=config_overrides\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={_NUM_CPUS} State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment: dict[str, object] = {"SLURM_CONF": config}
    processes.spawn(["slurmctld", "-D", "-c"], env=environment)
    processes.spawn(["slurmd", "-D", "-f", config], env=environment)
    deadline = time.monotonic() + LONG
    while "idle" not in run(["sinfo", "--noheader", "--format=%t"], env=environment, expect=None).output:
        assert time.monotonic() < deadline, "Slurm's node does not come up"
        time.sleep(0.2)
    return environment


def jobs(environment: dict[str, object]) -> dict[str, str]:
    """The state of each task of the arrays in the queue, by its number, as RUNNING."""
    lines = run(["squeue", "--noheader", "--array", "--format=%K %T"], env=environment).output.splitlines()
    return dict(line.split() for line in lines)
