"""The short forms of the benchmarks that compare how methods learn."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

VOCABULARY = 512
NAMES = {
    "islands": ["Local SGD", "DiLoCo", "SlowMo", "Overlap-Local-SGD", "SparseLoCo", "synchronous"],
    "one-island": ["AdamW", *(f"{name}, H={every}" for name in ("Lookahead", "SNOO") for every in (5, 20, 100))],
}


def bench(name: str, record: Path, *arguments: str) -> tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """What a benchmark prints, and its record."""
    command: list[str | Path] = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--quick", "--record", record]
    output = run(command, timeout=600).output
    return output, [tuple(json.loads(line)) for line in record.read_text().splitlines()]


@pytest.mark.parametrize("study", ["islands", "one-island"])
def test_methods_are_compared_and_runs_are_kept(study: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    output, runs = bench("compare_methods", record, "--study", study)
    names = NAMES[study]
    assert all(f"│ {name} " in output for name in names)
    assert len(runs) == 2 * len(names), "two seeds each"
    assert all(outcome["loss"] < math.log(VOCABULARY) for _, outcome in runs), "each has learnt something"
    sent = {what["diloco"].get("method", what["num_islands"]): outcome["bytes_sent"] for what, outcome in runs}
    assert sent[1] == 0
    assert study != "islands" or sent["sparseloco"] < sent[4] / 20
    again, kept = bench("compare_methods", record, "--study", study, "--only", names[0], names[-1])
    assert kept == runs, "nothing is run again"
    assert f"│ {names[-1]} " in again


def test_one_bit_lamb_sends_a_sixteenth_of_fp16(tmp_path: Path) -> None:
    output, runs = bench("onebit_lamb", tmp_path / "record.jsonl", "learn")
    assert "│ 1-bit LAMB " in output
    for what, outcome in runs:
        assert list(outcome["losses"].values())[-1] < math.log(VOCABULARY)
        freeze_step = what["freeze_step"] or what["steps"]
        full, compressed = outcome["sent"][1:freeze_step], outcome["sent"][freeze_step + 1 :]
        fewer = 16 if not compressed else sum(full) / len(full) / (sum(compressed) / len(compressed))
        assert 12 < fewer <= 16, "so small a model has a fifth of what it sends in headers"
    assert {what["freeze_step"] for what, _ in runs} == {None, 4}
