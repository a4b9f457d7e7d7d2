"""`hf-diloco checkpoint`: what ranks of every kind have saved, looked into and made a model without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.equivalence.runs import Runs, weights, zero
from tests.processes import run

pytestmark = pytest.mark.distributed

CHECKPOINT = [sys.executable, "-m", "hf_diloco.cli", "checkpoint"]
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (1, "plain", {}),
    "ddp": (2, "plain", {}),
    "fsdp2": (2, "FSDP2", {"fsdp": {}}),
    **{f"zero{stage}": (2, "ZeRO", {"deepspeed": zero(stage)}) for stage in (1, 2, 3)},
}
IN_SHORT = ("fsdp2",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_SHORT else pytest.mark.slow) for kind in KINDS]
)
def test_the_exported_model_is_the_outer_parameters(tmp_path: Path, kind: str) -> None:
    """The last checkpoint is of a round's end, where the final model is the outer parameters."""
    num_ranks, trained_with, sharding = KINDS[kind]
    runs = Runs(tmp_path)
    folder = runs.launch(
        "run",
        **sharding,
        launch={"num_processes": num_ranks, "threads": 1},
        training={"per_device_train_batch_size": 4 // num_ranks, "save_strategy": "steps", "save_steps": 8},
        diloco={"num_fragments": 2} if kind == "zero2" else {},
    )
    facts = json.loads(run([*CHECKPOINT, "inspect", folder, "--json"]).output)
    assert facts["checkpoint"] == str(folder / "island-0" / "checkpoint-8")
    assert (facts["step"], facts["steps_since_round"], facts["ranks"]) == (8, 0, num_ranks)
    assert (facts["trained_with"], facts["method"], facts["sync_every"]) == (trained_with, "diloco", 4)
    assert facts["outer_state_bytes"] > 8 * facts["trainable_parameters"]
    run([*CHECKPOINT, "export", folder, tmp_path / "model"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    final = weights(folder)
    found = model.state_dict()
    assert final
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], final[name]) for name in final)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("A word")["input_ids"] == AutoTokenizer.from_pretrained(folder / "model")("A word")["input_ids"]
    again = run([*CHECKPOINT, "export", folder, tmp_path / "model"], expect=2)
    assert "exists already: name another folder, or remove it" in again.output
