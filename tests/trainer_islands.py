"""Two islands that train with `tests/programs/trainer_island.py`, in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.torchrun import torchrun
from tests.processes import ROOT, Env, Process, Processes, find_free_port

PROGRAM = ROOT / "tests" / "programs" / "trainer_island.py"


def tcp() -> str:
    """A rendezvous of this machine."""
    return f"tcp://127.0.0.1:{find_free_port()}"


def environment(island: int, rendezvous: str) -> dict[str, object]:
    """What tells one of two islands who it is."""
    return {
        "HF_DILOCO_ISLAND": island,
        "HF_DILOCO_NUM_ISLANDS": 2,
        "HF_DILOCO_RENDEZVOUS": rendezvous,
        "MASTER_PORT": find_free_port(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ROOT,
    }


def start(
    processes: Processes,
    folder: Path,
    island: int,
    rendezvous: str,
    num_ranks: int | None = None,
    env: Env | None = None,
    **settings: Any,
) -> Process:
    """Starts an island with settings of the program: one process, or some ranks under torchrun."""
    whole = {
        "output_dir": str(folder / f"island-{island}"),
        "result": str(folder / f"result-{island}.json"),
        "data_seed": island,
        **settings,
        "diloco": {"sync_every": 2, "join_timeout": 120, **settings.get("diloco", {})},
    }
    program = [str(PROGRAM), json.dumps(whole)]
    command = torchrun(num_ranks, *program) if num_ranks else [sys.executable, *program]
    return processes.spawn(command, env={**environment(island, rendezvous), **(env or {})})


def trained_weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What each of the islands in a folder has trained."""
    return [torch.load(folder / f"result-{island}.json.pt", weights_only=True) for island in range(2)]


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert first
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
