"""SlowMo's inner buffers, averaged: each moment becomes its mean over the islands wherever an island keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.torchrun import torchrun
from tests.processes import Processes, find_free_port

LAYOUTS = [
    ("plain", "plain"),  # DDP
    ("zero1 fp32 client", "zero1 fp32 client"),
    ("zero2 fp32 client", "zero2 fp32 client"),
    ("zero3 fp32 client", "zero3 fp32 client"),
    ("zero3 fp32 client", "plain"),
    ("fsdp2 fp32", "fsdp2 fp32"),
    ("fsdp2 fp32", "zero3 fp32 client"),
]
"""Of island 0 and of island 1, each of two ranks."""


@pytest.mark.distributed
def test_moments_are_averaged_over_the_islands_on_every_layout(tmp_path: Path) -> None:
    rendezvous = [f"tcp://127.0.0.1:{find_free_port()}" for _ in LAYOUTS]
    with Processes() as processes:
        started = []
        for island in range(2):
            rounds = [[cells[island], where] for cells, where in zip(LAYOUTS, rendezvous, strict=True)]
            settings = json.dumps({"island": island, "folder": str(tmp_path), "rounds": rounds})
            command = torchrun(2, "-m", "tests.programs.buffers_island", settings)
            started.append(processes.spawn(command, env={"OMP_NUM_THREADS": "1"}))
        for process in started:
            process.wait(timeout=280)
    first, second = (torch.load(tmp_path / f"{island}.pt", weights_only=True) for island in range(2))
    assert len(first) == len(LAYOUTS)
    for layout, mine, other in zip(LAYOUTS, first, second, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            before, after = (mine[0][name], other[0][name]), (mine[1][name], other[1][name])
            assert float((before[0] - before[1]).norm()) > 0.1 * float(before[0].norm()), (layout, name)
            assert torch.equal(*after), (layout, name)
            torch.testing.assert_close(after[0], (before[0] + 3 * before[1]) / 4, rtol=1e-5, atol=1e-9)
