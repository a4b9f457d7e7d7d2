"""The short forms of the benchmarks that compare how methods learn."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import pretrained
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe
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


def test_a_pretrained_model_goes_on_learning_on_islands_with_different_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model, of which the first layer is taken, and two domains."""
    texts = {"arithmetic": "2 + 2 is 4, and 3 times 5 is 15", "sea": "waves break on the rocks under a grey sky"}
    (domains := tmp_path / "domains").mkdir()
    for name, text in texts.items():
        lines = [json.dumps({"text": f"{text}: {number}"}) for number in range(100)]
        (domains / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer = train_byte_level_bpe([*texts.values()] * 3, 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    record = tmp_path / "record.json"
    sizes = ["--layers=1", "--steps=6", "--sync-every=2", "--seeds=1", "--sequence-length=16", "--eval-sequences=4"]
    places = [f"--data={domains}", f"--model={tmp_path / 'model'}", f"--json={record}", "--device=cpu"]
    monkeypatch.setattr("sys.argv", ["pretrained", *places, *sizes, "--learning-rate=0.01"])
    pretrained.main()
    rows = {row["name"]: row for row in json.loads(record.read_text())}
    names = ["before", "one island (arithmetic)", "DiLoCo", "DiLoCo with LoRA", "DiLoCo, int4"]
    assert list(rows) == names
    assert [rows[name]["num_islands"] for name in names] == [0, 1, 2, 2, 2]
    (before,) = rows["before"]["losses"]
    assert all(rows[name]["losses"][0] < before for name in names[1:])
    alone, whole, adapters, int4 = (rows[name]["bytes_sent"] for name in names[1:])
    assert alone == 0
    assert 0 < adapters < whole / 2
    assert whole / 8.1 < int4 < whole / 6
