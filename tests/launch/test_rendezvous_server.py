"""`hf-diloco rendezvous`: islands without a bucket meet at a server, which may be killed and started again."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.chaos import run_file
from hf_diloco.cli.main import app
from hf_diloco.errors import ConfigError
from tests.processes import Process, Processes, find_free_port, run
from tests.records import events

ROUNDS, SYNC_EVERY = 12, 4
COMMAND = [sys.executable, "-m", "hf_diloco.cli"]


def start_server(processes: Processes, port: int, folder: Path, host: str = "127.0.0.1", *options: str) -> Process:
    server = processes.spawn([*COMMAND, "rendezvous", f"{host}:{port}", "--folder", folder, *options])
    server.wait_for("islands meet at", 60)
    return server


@pytest.mark.distributed
def test_islands_meet_at_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    settings = {"num_islands": 2, "max_islands": 2, "min_islands": 2, "exchange_timeout": 4.0, "exchange": "mesh"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run_file(tmp_path, ROUNDS, SYNC_EVERY, **settings)))
    islands = [tmp_path / "chaos" / f"island-{island}" for island in (0, 1)]
    port = find_free_port()
    with Processes() as processes:
        server = start_server(processes, port, tmp_path / "served")
        url = f"http://127.0.0.1:{port}/a-run"
        job = processes.spawn([*COMMAND, "launch", file, "--rendezvous", url], env={"OMP_NUM_THREADS": 1})
        deadline = time.monotonic() + 100
        while not all(len(events(island, "sync")) >= 2 for island in islands):
            assert job.popen.poll() is None, job.output
            assert time.monotonic() < deadline, job.output
            time.sleep(0.05)
        server.kill()
        server.wait(expect=None)
        start_server(processes, port, tmp_path / "served")
        output = job.wait(100).output
        status = run([*COMMAND, "status", url, "--json"]).output
    last = [events(island, "sync")[-1] for island in islands]
    assert [sync["round"] for sync in last] == [ROUNDS, ROUNDS], output
    assert last[0]["outer_hash"] == last[1]["outer_hash"]
    assert json.loads(status)["url"] == url


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """Else two islands could both be the first to write a record, and one server delete the other's uploads."""
    folder = tmp_path / "served"
    with Processes() as processes:
        server = start_server(processes, find_free_port(), folder)
        address = f"127.0.0.1:{find_free_port()}"
        refused = run([*COMMAND, "rendezvous", address, "--folder", folder], expect=None)
        assert refused.returncode != 0
        assert f"another process serves {folder}" in " ".join(refused.output.split())
        server.kill()
        server.wait(expect=None)
        start_server(processes, find_free_port(), folder)


def test_ctrl_c_ends_the_server(tmp_path: Path, own_address: str) -> None:
    with Processes() as processes:
        server = start_server(processes, find_free_port(), tmp_path / "served", own_address, "--allow-public-address")
        server.interrupt()
        assert "can read the weights, and delete what lies here" in " ".join(server.wait(60).output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["10.0.0.1", "--folder", "x"], "address '10.0.0.1': expected HOST:PORT"),
        (["127.0.0.1:0", "--folder", "x"], "expected HOST:PORT"),
        (["0.0.0.0:29400", "--folder", "x"], "expected HOST:PORT"),
        (["no-host.invalid:29400", "--folder", "x"], "host 'no-host.invalid' has no address"),
        (["8.8.8.8:29400", "--folder", "x"], "is a public address"),
        (["192.0.2.1:29400", "--folder", "x"], "is no address of this machine"),
        (["[fe80::1]:29400", "--folder", "x"], "cannot listen at [fe80::1]:29400: "),
        (["127.0.0.1:{free}", "--folder", "missing/x"], "Name a folder whose parent is there"),
        (["127.0.0.1:{taken}", "--folder", "x"], "port {taken} on 127.0.0.1 is in use"),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"free": find_free_port(), "taken": taken.getsockname()[1]}
        words = [argument.format(**ports) for argument in arguments]
        with pytest.raises(ConfigError, match=re.escape(message.format(**ports))):
            CliRunner().invoke(app, ["rendezvous", *words], catch_exceptions=False)
