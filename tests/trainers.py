"""Trainers of a tiny Llama in the test process, and an island 1 beside theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner import open_shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from tests.islands import Beside
from tests.programs.trainer_island import Tokens, make_model

MAX_STEPS = 6
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def make_trainer(folder: Path, *callbacks: Any, **changes: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=4, disable_tqdm=True, **changes
    )
    model = make_model(lora=False, tied=True, seed=1)
    return Trainer(model, args, train_dataset=Tokens(0), eval_dataset=Tokens(1, size=8), callbacks=list(callbacks))


def make_saving_trainer(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        **SAVING,
        **arguments,
    }
    return Trainer(
        make_model(lora=False, tied=True, seed=1),
        TrainingArguments(output_dir=str(folder), **chosen),
        train_dataset=Tokens(0),
        callbacks=list(callbacks),
    )


def weights_of(trainer: Trainer) -> torch.Tensor:
    assert trainer.model is not None
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


@contextmanager
def second_island(port: int, folder: Path, rounds: int, **config: Any) -> Iterator[dict[str, Any]]:
    """An island 1 that trains nothing: it takes part in some rounds and then leaves. Yields island 0's settings."""
    common = {"num_islands": 2, "rendezvous": f"tcp://127.0.0.1:{port}", "sync_timeout": 20, **config}

    def island_main() -> None:
        session = FixedSession(DiLoCoConfig(island=1, **common), IslandGroup())
        session.join(open_shards(make_model(lora=False, tied=True, seed=2), None), folder / "second")
        for _ in range(rounds):
            session.outer.current.steps = session.config.sync_every
            session.sync()
        session.leave(finished=False)

    with Beside(island_main) as failures:
        yield {"island": 0, **common}
    assert not failures, failures
