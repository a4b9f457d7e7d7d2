"""A hand-written loop of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_diloco import DiLoCoConfig, OuterLoop


def make_loop(folder: Path, **config: Any) -> tuple[OuterLoop, torch.nn.Linear]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = {name: config.pop(name) for name in ("resume_from", "num_steps") if name in config}
    return OuterLoop(accelerator, model, optimizer, DiLoCoConfig(**config), output_dir=folder, **given), model
