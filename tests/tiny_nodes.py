"""Runs of three nodes of a graph that train a tiny residual network, as threads of the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.vision.runfile import VisionRun
from tests import records

TINY = {
    "model": {"config": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8}},
    "data": {"max_train_examples": 240, "max_eval_examples": 50, "shares": "dirichlet", "image_size": 8},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.05,
        "weight_decay": 1e-4,
        "logging_steps": 4,
        "save_steps": 4,
    },
    "gossip": {"method": "decentlam", "topology": "ring", "num_nodes": 3},
    "launch": {"use_cpu": True},
}


def run_of(folder: Path, *overrides: str) -> VisionRun:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "output": str(folder / "runs")}))
    return read_run_file(VisionRun, path, overrides)


def simulate(run: VisionRun) -> int:
    from hf_diloco.apps.vision.train import simulate_nodes

    return simulate_nodes(run, run.gossip.num_nodes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def events(run: VisionRun, node: int, event: str) -> list[dict[str, Any]]:
    return records.events(run.folder / f"island-{node}", event)
