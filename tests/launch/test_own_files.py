"""A user's own outer method and codec, from files of theirs, through the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos import run_file
from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import ConfigError
from tests.processes import ROOT, Processes, find_free_port, run

METHOD, CODEC = "sign_momentum.py:SignMomentum", "grid.py:Grid"
SYNC_EVERY = 2


def take_from_docs(page: str, file: Path) -> None:
    """The Python file that a page of the documentation shows."""
    text = (ROOT / "docs" / page).read_text()
    (code,) = re.findall(rf"```python\n(# {re.escape(file.name)}\n.*?)```", text, re.DOTALL)
    file.write_text(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with both files and a run file."""
    monkeypatch.chdir(tmp_path)
    take_from_docs("methods.md", tmp_path / "sign_momentum.py")
    take_from_docs("codecs.md", tmp_path / "grid.py")
    settings = {"num_islands": 2, "max_islands": None, "min_islands": None, "outer_lr": 1e-3, "payload": CODEC}
    own: dict[str, Any] = {"method": METHOD, "options": {"smoothing": 0.5}, "outer_momentum": 0.9}
    content = run_file(tmp_path, 3, SYNC_EVERY, **{**settings, **own})
    content["training"]["save_steps"] = SYNC_EVERY
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def launch(folder: Path, *more: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(folder / "run.yaml"), *more]
    return run(command, cwd=folder, expect=expect, env={"OMP_NUM_THREADS": 1}).output


def syncs(folder: Path, island: int) -> list[dict[str, Any]]:
    lines = (folder / "chaos" / f"island-{island}" / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "sync"]


@pytest.mark.distributed
def test_a_run_and_its_resumption(folder: Path) -> None:
    launch(folder, "training.max_steps=4")
    launch(folder, "--resume", "auto")
    mine, other = syncs(folder, 0), syncs(folder, 1)
    assert [sync["round"] for sync in mine] == [1, 2, 3]
    assert [sync["outer_hash"] for sync in mine] == [sync["outer_hash"] for sync in other]
    assert len({sync["outer_hash"] for sync in mine}) == 3
    assert 0 < mine[-1]["bytes_sent"] < 40_000  # a byte each of 29,536 parameters, not four


@pytest.mark.distributed
def test_islands_with_different_files_are_refused(folder: Path) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    other = folder / "other"
    other.mkdir()
    for name in ("grid.py", "sign_momentum.py"):
        (other / name).write_text((folder / name).read_text())
    (other / "sign_momentum.py").write_text((folder / "sign_momentum.py").read_text() + "# another\n")
    with Processes() as processes:
        jobs = []
        for island, home in enumerate((folder, other)):
            command = [sys.executable, "-m", "hf_diloco.cli", "launch", folder / "run.yaml"]
            place = ["--island", str(island), "--rendezvous", rendezvous]
            jobs.append(processes.spawn([*map(str, command), *place], cwd=home, env={"OMP_NUM_THREADS": 1}))
        output = " ".join("\n".join(job.wait(100, expect=1).output for job in jobs).split())
    assert len(set(re.findall(r"SignMomentum of a file with SHA-256 ([0-9a-f]{16})", output))) == 2
    assert "algorithm differs" in output


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("method", "missing.py:Method", "there is no file missing.py"),
        ("method", "sign_momentum.py:Method", "sign_momentum.py has no class Method: correct the name"),
        (
            "method",
            "grid.py:Grid",
            "Grid is no OuterMethod: let it inherit from hf_diloco.methods.outer.base.OuterMethod",
        ),
        ("method", "broken.py:Method", "broken.py cannot be run: ZeroDivisionError"),
        ("method", "half.py:Half", "Half lacks make, step"),
        ("method", "half.py:Taken", "diloco is a method of hf_diloco: give the class another name"),
        ("payload", "missing.py:Codec", "there is no file missing.py"),
        ("payload", METHOD, "SignMomentum is no Codec"),
        ("payload", "half.py:Coded", "Coded lacks decode, encode"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(setting: str, value: str, message: str, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "half.py").write_text(
        "from hf_diloco.codecs import Codec\n"
        "from hf_diloco.methods.outer import DiLoCo, OuterMethod\n"
        "class Half(OuterMethod):\n    name = summary = 'half'\n"
        "class Taken(DiLoCo):\n    pass\n"
        "class Coded(Codec):\n    name = 'coded'\n"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        DiLoCoConfig(**{setting: value})
