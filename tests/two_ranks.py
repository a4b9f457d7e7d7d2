"""Run files of one island of two ranks: a tiny model, a corpus that needs no download, and the log of a launch."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.processes import run
from tests.records import events

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_steps": 5,
}


def write_run(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Writes a run file of these settings, `training` beside `TRAINING`; and the corpus, unless `data` names one."""
    words = [f"word{number % 97} and {number * number % 89}" for number in range(400)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": " ".join(words[at : at + 20])}) + "\n" for at in range(0, 400, 5)))
    common = {
        "output": str(folder / "runs"),
        "tokenizer": {"train": {"vocab_size": 300, "max_megabytes": 0.2}},
        "data": {"source": "files", "files": [str(corpus)], "sequence_length": 16, "num_eval_sequences": 2},
        "launch": {"use_cpu": True, "threads": 1, "num_processes": 2},
        "sample": None,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**common, **settings, "training": {**TRAINING, **settings["training"]}}))
    return file


def launch(file: Path, *overrides: str, **environment: str) -> str:
    """What the launcher printed, and the island's log."""
    completed = run([sys.executable, "-m", "hf_diloco.cli", "launch", file, *overrides], timeout=300, env=environment)
    return completed.output + (file.parent / "runs" / "run" / "island-0" / "log.txt").read_text()


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "island-0" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses_of(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder / "island-0", "train")]


def forget_after(folder: Path, step: int) -> bytes:
    """Removes the run's model and all checkpoints but that of `step`. Returns the model's bytes."""
    model = (folder / "model" / "model.safetensors").read_bytes()
    for later in folder.glob("island-0/checkpoint-*"):
        if later.name != f"checkpoint-{step}":
            shutil.rmtree(later)
    shutil.rmtree(folder / "model")
    return model
