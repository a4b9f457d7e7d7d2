"""Muon in a run of two ranks: this package's under DDP, DeepSpeed's own under ZeRO-1, 2 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.two_ranks import SHAPE, events_of, forget_after, launch, losses_of, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

RUN: dict[str, Any] = {
    "model": {"config": {"model_type": "llama", **SHAPE}},
    "training": {"max_steps": 9, "max_grad_norm": 0},
    "diloco": {"num_islands": 1, "sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.6},
}
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""DeepSpeed would compile Muon's iteration, for minutes on two cores."""
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


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (None, 1, 3))])
def test_a_resumed_run_is_an_uninterrupted_one(stage: int | None, tmp_path: Path) -> None:
    file = write_run(tmp_path, {**RUN, **engine(stage)})
    launch(file, **UNCOMPILED)
    folder = tmp_path / "runs" / "run"
    assert events_of(folder)[0]["shards"].startswith("DDP" if stage is None else f"ZeRO-{stage}")
    losses = losses_of(folder)
    assert losses[-1] < losses[0] - 0.3
    model = forget_after(folder, step=5)
    launch(file, **UNCOMPILED)
    assert (folder / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_clipping_what_muon_made_of_the_gradients_warns(tmp_path: Path) -> None:
    file = write_run(tmp_path, {**RUN, **engine(2), "training": {"max_steps": 3, "max_grad_norm": 1.0}})
    assert "gradient_clipping=1: DeepSpeed clips what Muon has made of the gradients" in launch(file, **UNCOMPILED)
