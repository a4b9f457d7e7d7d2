"""Muon in a run of two ranks: this package's under DDP, DeepSpeed's own under ZeRO-1, 2 and 3."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

RUN: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    },
    "tokenizer": {"train": {"vocab_size": 300, "max_megabytes": 0.2}},
    "data": {"source": "files", "sequence_length": 16, "num_eval_sequences": 2},
    "training": {
        "max_steps": 9,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_steps": 5,
    },
    "launch": {"use_cpu": True, "threads": 1, "num_processes": 2},
    "sample": None,
    "diloco": {"num_islands": 1, "sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.6},
}
PARAMS = {"lr": "auto", "muon_lr": 0.02, "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}


def engine(stage: int | None) -> dict[str, Any]:
    if stage is None:
        return {"optimizer": {"name": "muon", "muon_lr": 0.02}}
    zero = {"stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": zero,
    }
    return {"deepspeed": config}


def launch(file: Path, *overrides: str) -> str:
    # DeepSpeed would compile Muon's iteration, for minutes on two cores
    run(
        [sys.executable, "-m", "hf_diloco.cli", "launch", file, *overrides],
        timeout=300,
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    return (file.parent / "runs" / "run" / "island-0" / "log.txt").read_text()


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (None, 1, 3))])
def test_a_resumed_run_is_an_uninterrupted_one(stage: int | None, tmp_path: Path) -> None:
    words = [f"word{number % 97} and {number * number % 89}" for number in range(400)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": " ".join(words[at : at + 20])}) + "\n" for at in range(0, 400, 5)))
    settings = {**RUN, **engine(stage), "output": str(tmp_path / "runs")}
    settings["data"] = {**RUN["data"], "files": [str(corpus)]}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    launch(file)
    folder = tmp_path / "runs" / "run"
    model = (folder / "model" / "model.safetensors").read_bytes()
    events = [json.loads(line) for line in (folder / "island-0" / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["shards"].startswith("DDP" if stage is None else f"ZeRO-{stage}")
    losses = [event["loss"] for event in events if event["event"] == "train"]
    assert losses[-1] < losses[0] - 0.3
    for later in folder.glob("island-0/checkpoint-*"):
        if later.name != "checkpoint-5":
            shutil.rmtree(later)
    shutil.rmtree(folder / "model")
    launch(file)
    assert (folder / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_clipping_what_muon_made_of_the_gradients_warns(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    training = {**RUN["training"], "max_steps": 3, "max_grad_norm": 1.0}
    data = {**RUN["data"], "source": "embedded"}
    file.write_text(
        yaml.safe_dump({**RUN, **engine(2), "data": data, "training": training, "output": str(tmp_path / "runs")})
    )
    assert "gradient_clipping=1: DeepSpeed clips what Muon has made of the gradients" in launch(file)
