"""The outer state's cut over the ranks, with real engines, and islands whose shards do not line up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.matrix import CELL_NAMES, findings
from tests.processes import Processes
from tests.records import events
from tests.trainer_islands import assert_equal, start, tcp, trained_weights

NUM_ROUNDS = 3


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
    rendezvous = tcp()
    common: dict[str, Any] = {"per_device_batch": 2, "max_steps": 2 * NUM_ROUNDS}
    with Processes() as processes:
        started = [
            start(
                *(processes, tmp_path, island, rendezvous, kind.num_ranks),
                **{**common, "model_seed": island + 1, **kind.settings},
            )
            for island, kind in enumerate(kinds)
        ]
        for process in started:
            process.wait(timeout=200)
    folders = [tmp_path / f"island-{island}" for island in range(2)]
    starts = [events(folder, "start") for folder in folders]
    syncs = [events(folder, "sync") for folder in folders]
    for folder, kind, (started_with,), rounds in zip(folders, kinds, starts, syncs, strict=True):
        (end,) = events(folder, "end")
        assert (started_with["num_ranks"], end["on_boundary"], end["rounds"]) == (kind.num_ranks, True, NUM_ROUNDS)
        # All that an island sends is its pseudo-gradient, once, however its ranks share it.
        payload = 4 * started_with["num_parameters"]
        assert [(sync["bytes_sent"], sync["bytes_received"]) for sync in rounds] == [(payload, payload)] * NUM_ROUNDS
    hashes, others = ([sync["outer_hash"] for sync in rounds] for rounds in syncs)
    assert hashes == others
    assert len(set(hashes)) == NUM_ROUNDS  # and the parameters moved in each
    assert starts[0][0]["params_hash"] == starts[1][0]["params_hash"]
    losses = [[event["loss"] for event in events(folder, "train")] for folder in folders]
    assert losses[0] != losses[1]  # the islands saw data of their own
    assert_equal(*trained_weights(tmp_path))
