"""`make accelerator` where there is none: it says so; and everything in it runs, small, on a processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.accelerator.__main__ import MISSED, STEPS, main
from tests.processes import run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

COMMAND = [sys.executable, "-m", "benchmarks.accelerator"]
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_without_a_gpu_it_lists_its_steps_and_refuses_in_one_line(tmp_path: Path) -> None:
    listed = run([*COMMAND, "--list"], env=WITHOUT_GPU).output
    assert [line.split()[0] for line in listed.splitlines()] == list(STEPS)
    refused = run([*COMMAND, "--folder", tmp_path], env=WITHOUT_GPU, expect=2).output
    (line,) = [line for line in refused.splitlines() if "error:" in line]
    assert "no CUDA device can be used here" in line
    assert "--rehearse" in line
    assert not any(tmp_path.iterdir())


def test_what_this_python_lacks_is_named(tmp_path: Path) -> None:
    """As on a machine whose own PyTorch is used: an interpreter that sees none of the packages."""
    refused = run([sys.executable, "-S", "-m", "benchmarks.accelerator"], env=WITHOUT_GPU, expect=2).output
    assert "lacks accelerate, aiohttp," in refused
    assert "docs/accelerators.md" in refused


@pytest.mark.parametrize(
    "step", [pytest.param(name, marks=() if name == "copies" else pytest.mark.slow) for name in STEPS]
)
def test_a_step_runs_small_on_the_processor(step: str, tmp_path: Path) -> None:
    run([*COMMAND, "--rehearse", "--only", step, "--folder", tmp_path], env=WITHOUT_GPU, timeout=800)
    record = json.loads((tmp_path / f"{step}.json").read_text())
    assert record["device"] == "processor, rehearsal"
    assert record["figures"]
    assert all(figure["is_met"] for figure in record["figures"])


def test_steps_are_left_out_once_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rehearse", "--only", "copies", "gossip", "--minutes", "0", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["accelerator", *options])
    assert main() == MISSED
    copies, gossip, last = capsys.readouterr().out.splitlines()
    assert copies.startswith("copies: left out, the time of all steps is over; --only copies ")
    assert gossip.startswith("gossip: left out")
    assert last == "failed or missed: copies, gossip"
    assert not any(tmp_path.iterdir())


def test_a_missed_target_is_told() -> None:
    from benchmarks.accelerator.setting import Figure, Setting

    setting = Setting("cuda", Path())
    assert "MISSED" in Figure("a share", 0.5, at_least=0.9).describe(setting)
    assert " met" in Figure("a share", 0.95, at_least=0.9).describe(setting)
    assert not Figure("not a number", float("nan"), at_least=0.9).is_met(setting)
    assert not Figure("bytes", 1.0, at_most=0.0, is_exact=True).is_met(Setting("cpu", Path()))
