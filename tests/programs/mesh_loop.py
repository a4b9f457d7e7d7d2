"""One island that trains a tiny Llama in a hand-written Accelerate loop.

Settings, as JSON: config (DiLoCoConfig fields), folder, steps (optimizer steps in all), accumulation, save_at (an
optimizer step), resume_from (a folder), result (file).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional
from torch.utils.data import DataLoader

from hf_diloco import DiLoCoConfig, OuterLoop
from hf_diloco.rounds.measures import SyncReport
from tests.programs.trainer_island import Tokens, make_model

BATCH = 4
LEARNING_RATE = 3e-3


def compute_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over all tokens but the first of each sequence."""
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(settings: dict[str, Any], trackers: list[Any] | None = None) -> tuple[dict[str, Any], list[SyncReport]]:
    """Returns the model's weights and the reports of the rounds."""
    accumulation = settings.get("accumulation", 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, log_with=trackers)
    accelerator.init_trackers("test")
    model = make_model(lora=False, tied=True, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    loader = DataLoader(Tokens(0), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    resume_from = settings.get("resume_from")
    step = 0
    if resume_from:
        accelerator.load_state(resume_from)
        step = json.loads((Path(resume_from) / "diloco" / "outer.json").read_text())["global_step"]
        loader = accelerator.skip_first_batches(loader, step * accumulation)
    reports = []
    config = DiLoCoConfig(**settings["config"])
    with OuterLoop(
        accelerator, model, optimizer, config, output_dir=settings["folder"], resume_from=resume_from
    ) as outer:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model(input_ids=batch["input_ids"]), batch["labels"]))
                optimizer.step()
                optimizer.zero_grad()
                if report := outer.step(weight=len(batch["labels"])):
                    reports.append(report)
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step == settings.get("save_at"):
                folder = str(Path(settings["folder"]) / f"checkpoint-{step}")
                accelerator.save_state(folder)
                outer.save_state(folder)
            if step == settings["steps"]:
                break
    weights = {name: one.detach().clone() for name, one in accelerator.unwrap_model(model).named_parameters()}
    return weights, reports


def main() -> None:
    settings = json.loads(sys.argv[1])
    weights, reports = train(settings)
    torch.save((weights, [report.outer_hash for report in reports]), settings["result"])


if __name__ == "__main__":
    main()
