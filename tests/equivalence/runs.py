"""Tiny real runs through the command line, each made once a test session and compared by several tests."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests import records
from tests.processes import ROOT, find_free_port, run

LAUNCH = [sys.executable, "-m", "hf_diloco.cli", "launch"]

BASE: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    "tokenizer": {"train": {"vocab_size": 320}},
    "data": {"source": "files", "sequence_length": 32, "num_eval_sequences": 8},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 3.0e-3,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
    },
    "sample": None,
    "diloco": {"num_islands": 2, "sync_every": 4},
}

ZERO: dict[str, Any] = {
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def zero(stage: int) -> dict[str, Any]:
    """A DeepSpeed configuration that shards even a tiny model."""
    return {
        **ZERO,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 100_000,
        },
    }


SHARDINGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": {}},
    "hsdp": {"fsdp": {"num_replicas": 2}},
    **{f"zero{stage}": {"deepspeed": zero(stage)} for stage in range(4)},
}
"""What a run file says of the ways in which an island's ranks share the model."""


def two_ranks(kind: str, num_ranks: int = 2) -> dict[str, Any]:
    """Islands of two ranks, or more, that share the model as `kind` of `SHARDINGS`."""
    launch = {"num_processes": num_ranks, "threads": 1}
    return {"training": {"per_device_train_batch_size": 2}, "launch": launch, **SHARDINGS[kind]}


def make_corpus(folder: Path) -> Path:
    """Real English text: some of the topics of Python's own documentation, one document a line."""
    path = folder / "corpus.jsonl"
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())[:24]]
    documents = [text[start : start + 300] for text in topics for start in range(0, min(len(text), 3000), 300)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested `changes`; a block named `only:KEY` replaces KEY as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


class Runs:
    """Runs by name, in one folder, over one corpus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = make_corpus(folder)
        self._done: dict[str, Path] = {}

    def write(self, name: str, changes: dict[str, Any]) -> Path:
        """Writes the run file of `name`; whole at once, as a process started before may be about to read it."""
        settings = merge(BASE, {"name": name, "output": str(self.folder), "data": {"files": [str(self.corpus)]}})
        path = self.folder / f"{name}.yaml"
        (new := path.with_suffix(".new")).write_text(yaml.safe_dump(merge(settings, changes)))
        return new.replace(path)

    def launch(self, name: str, **changes: Any) -> Path:
        """The run folder of a finished run of all its islands by `hf-diloco launch`; made on first use."""
        if name not in self._done:
            run([*LAUNCH, self.write(name, changes)], timeout=240)
            self._done[name] = self.folder / name
        return self._done[name]

    def stop(self, whole: Path, name: str) -> None:
        """Makes a run folder as that of `whole` was left when it was stopped before its last checkpoint, of step 8."""
        broken = self.folder / name
        shutil.copytree(whole, broken)
        shutil.rmtree(broken / "model")
        for island in range(2):
            shutil.rmtree(broken / f"island-{island}" / "checkpoint-8", ignore_errors=True)
            (broken / f"island-{island}" / "metrics.jsonl").unlink()

    def command(self, name: str, command: list[str], **changes: Any) -> Path:
        """The run folder of a one-island run by another launcher: `command` is put before train_lm.py."""
        if name not in self._done:
            path = self.write(name, merge({"diloco": {"num_islands": 1}}, changes))
            env = {"OMP_NUM_THREADS": "1", "MASTER_PORT": find_free_port()}
            run([*command, ROOT / "train_lm.py", path], env=env, timeout=240)
            self._done[name] = self.folder / name
        return self._done[name]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final model's weights."""
    return load_file(folder / "model" / "model.safetensors")


def events(folder: Path, kind: str, island: int = 0) -> list[dict[str, Any]]:
    """The records of one kind in an island's metrics.jsonl."""
    return records.events(folder / f"island-{island}", kind)


def losses(folder: Path, island: int = 0) -> list[float]:
    """The training losses of an island, step by step."""
    return [record["loss"] for record in events(folder, "train", island)]


def largest_difference(first: Path, second: Path) -> float:
    """Between two runs' final weights."""
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def relative_difference(first: Path, second: Path) -> float:
    """The length of the difference between two runs' final weights, as a part of their own length."""
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return float((difference / sum(float(one.double().square().sum()) for one in a.values())) ** 0.5)


def assert_identical(first: Path, second: Path) -> None:
    """Final weights and all training losses of island 0 are equal bit for bit."""
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(first) == losses(second)


def assert_islands_agree(folder: Path, num_islands: int = 2) -> None:
    """Every island's outer parameters had the same digest after every round, and there was a round."""
    hashes = [[(r["round"], r["outer_hash"]) for r in events(folder, "sync", i)] for i in range(num_islands)]
    assert hashes[0]
    assert all(other == hashes[0] for other in hashes)
