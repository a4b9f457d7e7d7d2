"""A small BERT with a 1-bit optimizer, on two ranks under DDP: its checkpoints hold every rank's errors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.two_ranks import SHAPE, events_of, forget_after, launch, losses_of, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

RUN: dict[str, Any] = {
    "model": {"objective": "masked", "config": {"model_type": "bert", "max_position_embeddings": 64, **SHAPE}},
    "training": {"max_steps": 8, "gradient_accumulation_steps": 2},
    "optimizer": {"name": "onebit_lamb", "freeze_step": 3},
    "diloco": {"num_islands": 1, "sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
}


@pytest.mark.slow
def test_gradients_of_the_warm_up_may_travel_in_fp16(tmp_path: Path) -> None:
    file = write_run(tmp_path, RUN)
    launch(file)
    launch(file, "--name", "half", "optimizer.warmup_payload=fp16")
    whole, half = (losses_of(tmp_path / "runs" / name) for name in ("run", "half"))
    assert half[0] == whole[0], "nothing has travelled yet"
    assert half != whole
    assert half == pytest.approx(whole, rel=1e-3)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers loads the optimizer to cpu:0"
)
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    file = write_run(tmp_path, RUN)
    said = launch(file)
    assert "step 3: the second moments are frozen; the momentum travels in 1 bit" in said
    folder = tmp_path / "runs" / "run"
    events = events_of(folder)
    first = losses_of(folder)[0]
    sent = [int(event["onebit/bytes_sent"]) for event in events if "onebit/bytes_sent" in event]
    assert len(sent) == 8 - 3, "every step after the freeze"
    size = events[0]["num_parameters"]
    assert sent == [2 * 2 * (4 + math.ceil(size / 2 / 8))] * 5, "two ranks, each a packet to the other in two stages"
    assert 4.5 < first < 6.5, "not ln(300), but a multiple: by ranks, or by accumulated batches"
    checkpoint = folder / "island-0" / "checkpoint-5"
    names = [f"onebit_errors_{rank}_of_2.safetensors" for rank in range(2)]
    assert all((checkpoint / name).stat().st_size > 1000 for name in names)
    listed = "".join(path.read_text() for path in checkpoint.rglob("*.json"))
    assert all(name in listed for name in names), "the errors belong to what makes a checkpoint whole"
    model = forget_after(folder, step=5)
    said = launch(file)
    assert not re.search("errors begin at zero", said)
    assert (folder / "model" / "model.safetensors").read_bytes() == model
