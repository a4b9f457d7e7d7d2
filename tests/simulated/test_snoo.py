"""An outer step on one island, without a network: Nesterov momentum on what one worker has done (SNOO)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

from hf_diloco import DiLoCoCallback
from tests.programs.mesh_loop import BATCH, LEARNING_RATE, compute_loss, train
from tests.programs.trainer_island import Tokens, make_model

STEPS, EVERY = 6, 2
SETTINGS: dict[str, Any] = {"num_islands": 1, "sync_every": EVERY, "outer_lr": "auto", "outer_momentum": "auto"}
AUTO: dict[str, Any] = {"lr": 0.7, "momentum": 0.5}  # for one island and few rounds


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """By torch alone: AdamW, and torch's own Nesterov SGD on the pseudo-gradient, which is what is left of the way."""
    model = make_model(lora=False, tied=True, seed=1)
    inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    anchor = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer = torch.optim.SGD(anchor, nesterov=True, **AUTO)
    batches = iter(DataLoader(Tokens(0), batch_size=BATCH))
    for step in range(1, STEPS + 1):
        batch = next(batches)
        inner.zero_grad()
        compute_loss(model(input_ids=batch["input_ids"]), batch["labels"]).backward()
        inner.step()
        if step % EVERY == 0:
            with torch.no_grad():
                for begin, parameter in zip(anchor, model.parameters(), strict=True):
                    begin.grad = begin - parameter
                outer.step()
                for begin, parameter in zip(anchor, model.parameters(), strict=True):
                    parameter.copy_(begin)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class InOrder(Trainer):
    """Takes the data as it comes."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(Tokens(0))


def by_callback(folder: Path) -> torch.Tensor:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = make_model(lora=False, tied=True, seed=1)
    callbacks: list[Any] = [DiLoCoCallback(**SETTINGS)]
    InOrder(model, arguments, train_dataset=Tokens(0), callbacks=callbacks, compute_loss_func=compute_loss).train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_loop(folder: Path) -> torch.Tensor:
    given = {**SETTINGS, "outer_lr": AUTO["lr"], "outer_momentum": AUTO["momentum"]}  # it does not know its last step
    weights, _ = train({"config": given, "folder": str(folder), "steps": STEPS})
    return torch.cat([weights[name].flatten() for name in weights])


@pytest.mark.parametrize("way", [by_callback, by_loop])
def test_it_is_torchs_nesterov_on_the_pseudo_gradient(way: Any, expected: torch.Tensor, tmp_path: Path) -> None:
    found = way(tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_its_record_says_that_nothing_travelled(tmp_path: Path) -> None:
    by_callback(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    syncs = [event for event in events if event["event"] == "sync"]
    assert [sync["step"] for sync in syncs] == [2, 4, 6]
    assert all(sync["bytes_sent"] == 0 for sync in syncs), "there is nobody to send to"
    assert events[0]["num_islands"] == 1
