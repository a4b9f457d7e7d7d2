"""A new model that is too large for every rank to hold it is made in parts under ZeRO-3, and a small one whole."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.torchrun import torchrun
from tests.processes import ROOT, run

PROGRAM = ROOT / "tests" / "programs" / "built_in_parts.py"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"document {number} of a few words" for number in range(200)))
    values = {
        "output": str(tmp_path),
        "model": {"config": {"model_type": "llama", "tie_word_embeddings": True, **shape}},
        "tokenizer": {"train": {"vocab_size": 300}},
        "data": {"source": "files", "files": ["corpus.txt"], "sequence_length": 16, "num_eval_sequences": 2},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2},
        "deepspeed": str(ROOT / "configs" / "deepspeed" / "zero3.json"),
        "diloco": {"sync_every": 1},
        "sample": None,
        "launch": {"use_cpu": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


@pytest.mark.distributed
@pytest.mark.parametrize(("least", "in_parts"), [(0, True), (10**9, False)])
def test_what_is_large_is_made_in_parts(run_file: Path, least: int, in_parts: bool) -> None:
    output = run([sys.executable, PROGRAM, str(least), run_file], cwd=run_file.parent).output
    assert f"in parts: {in_parts} " in output
    assert "evaluation loss of the outer weights: " in output


@pytest.mark.distributed
@pytest.mark.slow
def test_parts_of_two_ranks_are_the_whole_model(run_file: Path) -> None:
    """A new one is that of one rank, bit for bit; one that is read from files is what every other stage has."""

    def weights(num_ranks: int, name: str, *overrides: str, in_parts: bool = True) -> set[str]:
        command = torchrun(num_ranks, PROGRAM, "0", run_file, "--name", name, *overrides)
        output = run(command, timeout=120, cwd=run_file.parent).output
        found: list[str] = re.findall(rf"in parts: {in_parts} weights: (\w+)", output)
        assert len(found) == num_ranks
        return set(found)

    assert weights(2, "two") == weights(1, "one")
    model = [f"model.path={run_file.parent / 'two' / 'model'}", "tokenizer.train=null"]
    whole = f"deepspeed={ROOT / 'configs' / 'deepspeed' / 'zero2.json'}"
    read = weights(2, "read", *model)
    assert read == weights(2, "whole", *model, whole, in_parts=False)
    assert len(read) == 1
