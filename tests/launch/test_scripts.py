"""The script for two clusters, with a stand-in for what only a cluster has: ssh."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.processes import ROOT, run

SCRIPTS = ROOT / "scripts"
SETTING = 'deepspeed={"zero_optimization": {"stage": 2}}'  # spaces and quotes must survive two shells


def put_programs(folder: Path, **programs: str) -> dict[str, object]:
    """Writes shell programs; returns the environment that finds them."""
    folder.mkdir()
    for name, body in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}")
        program.chmod(0o755)
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_two_clusters_starts_an_island_on_each(tmp_path: Path) -> None:
    environment = put_programs(
        tmp_path / "bin",
        ssh=f'echo "on $1"; cd {tmp_path}; exec bash -c "$2"',
        tmux='echo "$1 ${4-$2}"; [ "$1" != new-session ] || exec bash -c "${5%; exec bash}"',
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
        f"bob@b.example:~/{work.name}",
    ]
    output = run([*command, "tcp://10.8.0.1:29400", SETTING], env=environment).output
    first, second = output.split("on bob@b.example")
    for island, part in enumerate((first, second)):
        words = [line.removeprefix("word ") for line in part.splitlines() if line.startswith("word ")]
        assert f"new-session diloco-{island}\n" in part
        assert f"rename-session diloco-{island}-ended-20" in part, "the same command starts it again"
        assert words == [
            *("launch", "run.yaml", SETTING, "--island", str(island), "--num-islands", "2"),
            *("--rendezvous", "tcp://10.8.0.1:29400"),
        ]


def test_two_clusters_usage() -> None:
    assert "usage:" in run([SCRIPTS / "two_clusters.sh"], expect=2).output
