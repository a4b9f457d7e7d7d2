"""A small BERT with a 1-bit optimizer, on two ranks under DDP: its checkpoints hold every rank's errors."""

from __future__ import annotations

import json
import math
import re
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
        "objective": "masked",
        "config": {
            "model_type": "bert",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
    },
    "tokenizer": {"train": {"vocab_size": 300, "max_megabytes": 0.2}},
    "data": {"source": "files", "sequence_length": 16, "num_eval_sequences": 2},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_steps": 5,
    },
    "optimizer": {"name": "onebit_lamb", "freeze_step": 3},
    "launch": {"use_cpu": True, "threads": 1, "num_processes": 2},
    "sample": None,
    "diloco": {"num_islands": 1, "sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
}


def launch(file: Path, *overrides: str) -> str:
    completed = run([sys.executable, "-m", "hf_diloco.cli", "launch", file, *overrides], timeout=300)
    return completed.output + (file.parent / "runs" / "run" / "island-0" / "log.txt").read_text()


def write_run(tmp_path: Path) -> Path:
    words = [f"word{number % 97} and {number * number % 89}" for number in range(400)]
    documents = [" ".join(words[begin : begin + 20]) for begin in range(0, 400, 5)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    settings = {**RUN, "output": str(tmp_path / "runs"), "data": {**RUN["data"], "files": [str(corpus)]}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def losses(folder: Path) -> list[float]:
    lines = (folder / "island-0" / "metrics.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "train"]


@pytest.mark.slow
def test_gradients_of_the_warm_up_may_travel_in_fp16(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    launch(file)
    launch(file, "--name", "half", "optimizer.warmup_payload=fp16")
    whole, half = (losses(tmp_path / "runs" / name) for name in ("run", "half"))
    assert half[0] == whole[0], "nothing has travelled yet"
    assert half != whole
    assert half == pytest.approx(whole, rel=1e-3)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    said = launch(file)
    assert "step 3: the second moments are frozen; the momentum travels in 1 bit" in said
    folder = tmp_path / "runs" / "run"
    events = [json.loads(line) for line in (folder / "island-0" / "metrics.jsonl").read_text().splitlines()]
    first = next(event["loss"] for event in events if event["event"] == "train")
    sent = [int(event["onebit/bytes_sent"]) for event in events if "onebit/bytes_sent" in event]
    assert len(sent) == 8 - 3, "every step after the freeze"
    size = events[0]["num_parameters"]
    assert sent == [2 * 2 * (4 + math.ceil(size / 2 / 8))] * 5, "two ranks, each a packet to the other in two stages"
    assert 4.5 < first < 6.5, "not ln(300), but a multiple: by ranks, or by accumulated batches"
    model = (folder / "model" / "model.safetensors").read_bytes()
    checkpoint = folder / "island-0" / "checkpoint-5"
    names = [f"onebit_errors_{rank}_of_2.safetensors" for rank in range(2)]
    assert all((checkpoint / name).stat().st_size > 1000 for name in names)
    listed = "".join(path.read_text() for path in checkpoint.rglob("*.json"))
    assert all(name in listed for name in names), "the errors belong to what makes a checkpoint whole"
    for later in folder.glob("island-0/checkpoint-*"):
        if later != checkpoint:
            shutil.rmtree(later)
    shutil.rmtree(folder / "model")
    said = launch(file)
    assert not re.search("errors begin at zero", said)
    assert (folder / "model" / "model.safetensors").read_bytes() == model
