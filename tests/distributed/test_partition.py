"""The outer state's cut over the ranks, with real engines, and islands whose shards do not line up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.matrix import CELL_NAMES, findings
from tests.distributed.torchrun import torchrun
from tests.processes import ROOT, Processes, find_free_port

NUM_ROUNDS = 3
PROGRAM = ROOT / "tests" / "programs" / "trainer_island.py"


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "name"), CELL_NAMES)
def test_gather_and_scatter(num_ranks: int, name: str) -> None:
    """Aligned, and in 1, 2, 3 and 5 lanes, in many windows: bit-exact, and never more than a window under way."""
    assert findings(num_ranks, name)["partition"] == []


@dataclass(frozen=True)
class Kind:
    """An island: its number of ranks and what `trainer_island.py` is told."""

    num_ranks: int
    settings: dict[str, Any]


DDP = {"extra": {"ddp_backend": "gloo"}}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param((Kind(2, {"zero": 2}), Kind(1, {})), id="2 ranks ZeRO-2, 1 plain"),
        pytest.param(
            (Kind(3, {"zero": 3, "bf16": True}), Kind(2, {"zero": 1, "bf16": True, "own_optimizer": True})),
            id="3 ranks ZeRO-3, 2 ranks ZeRO-1, bf16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (Kind(2, {"lora": True, **DDP}), Kind(2, {"lora": True, "zero": 3})),
            id="2 ranks DDP, 2 ranks ZeRO-3, LoRA",
        ),
    ],
)
def test_islands_with_other_shards(kinds: tuple[Kind, Kind], tmp_path: Path) -> None:
    """Real islands, made from different seeds: equal outer parameters after every round, equal weights at the end."""
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    with Processes() as processes:
        started = [
            processes.spawn(
                torchrun(kind.num_ranks, PROGRAM, json.dumps(_settings(kind, island, tmp_path))),
                env={
                    "HF_DILOCO_ISLAND": island,
                    "HF_DILOCO_NUM_ISLANDS": len(kinds),
                    "HF_DILOCO_RENDEZVOUS": rendezvous,
                },
            )
            for island, kind in enumerate(kinds)
        ]
        for process in started:
            process.wait(timeout=200)
    first, second = (_events(tmp_path / str(island)) for island in range(2))
    _check_records(first, second, kinds)
    weights = [torch.load(tmp_path / f"{island}.json.pt") for island in range(2)]
    assert _find_difference(*weights) is None


def _settings(kind: Kind, island: int, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / str(island)),
        "result": str(folder / f"{island}.json"),
        "model_seed": island + 1,
        "data_seed": island,
        "per_device_batch": 2,
        "max_steps": 2 * NUM_ROUNDS,
        "diloco": {"sync_every": 2, "join_timeout": 120, "sync_timeout": 60, "exchange_timeout": 60},
        **kind.settings,
    }


def _events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    events: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        events.setdefault(event["event"], []).append(event)
    return events


def _check_records(first: dict[str, Any], second: dict[str, Any], kinds: tuple[Kind, Kind]) -> None:
    for events, kind in zip((first, second), kinds, strict=True):
        (start,), (end,) = events["start"], events["end"]
        assert start["num_ranks"] == kind.num_ranks
        assert end["on_boundary"]
        assert end["rounds"] == NUM_ROUNDS
        # All that an island sends is its pseudo-gradient, once, however its ranks share it.
        payload = 4 * start["num_parameters"]
        assert [sync["bytes_sent"] for sync in events["sync"]] == [payload] * NUM_ROUNDS
        assert [sync["bytes_received"] for sync in events["sync"]] == [payload] * NUM_ROUNDS
    hashes = [[sync["outer_hash"] for sync in events["sync"]] for events in (first, second)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == NUM_ROUNDS  # and the parameters moved in each
    assert first["start"][0]["params_hash"] == second["start"][0]["params_hash"]
    losses = [[event["loss"] for event in events["train"]] for events in (first, second)]
    assert losses[0] != losses[1]  # the islands saw data of their own


def _find_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> str | None:
    assert first.keys() == second.keys()
    return next((name for name, values in first.items() if not torch.equal(values, second[name])), None)
