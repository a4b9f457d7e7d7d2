"""A new model that is too large for every rank to hold it is made in parts under ZeRO-3, and a small one whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, run

PROGRAM = ROOT / "tests" / "programs" / "built_in_parts.py"


@pytest.mark.distributed
@pytest.mark.parametrize(("least", "in_parts"), [(0, True), (10**9, False)])
def test_what_is_large_is_made_in_parts(tmp_path: Path, least: int, in_parts: bool) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"document {number} of a few words" for number in range(200)))
    values = {
        "output": str(tmp_path),
        "model": {"config": {"model_type": "llama", **shape}},
        "tokenizer": {"train": {"vocab_size": 300}},
        "data": {"source": "files", "files": ["corpus.txt"], "sequence_length": 16, "num_eval_sequences": 2},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2},
        "deepspeed": str(ROOT / "configs" / "deepspeed" / "zero3.json"),
        "diloco": {"sync_every": 1},
        "sample": None,
        "launch": {"use_cpu": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    output = run([sys.executable, PROGRAM, str(least), tmp_path / "run.yaml"], cwd=tmp_path).output
    assert f"in parts: {in_parts}\n" in output
    assert "evaluation loss of the outer weights: " in output
