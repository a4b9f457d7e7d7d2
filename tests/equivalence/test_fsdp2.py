"""FSDP2 inside the islands: what must be equal to what, through the real command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.resuming import assert_resumed_is_uninterrupted
from tests.equivalence.runs import (
    LAUNCH,
    Runs,
    assert_identical,
    assert_islands_agree,
    events,
    merge,
    relative_difference,
    two_ranks,
)
from tests.processes import ROOT, Processes, find_free_port

pytestmark = pytest.mark.distributed

ROUNDING = 1e-6  # of the weights' length
COMPARABLE = {"adam_epsilon": 1e-4}
"""Else Adam makes steps as long as any of gradients that are little more than rounding errors."""
STREAMING = {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


def sharded(runs: Runs, kind: str, num_ranks: int = 2, name: str = "", **changes: Any) -> Path:
    """Two islands of some ranks."""
    return runs.launch(f"{kind}-{num_ranks}{name}", **merge(two_ranks(kind, num_ranks), changes))


@pytest.mark.parametrize(
    ("other", "num_ranks"),
    [
        ("ddp", 2),
        *(pytest.param(f"zero{stage}", 2, marks=pytest.mark.slow) for stage in (1, 2, 3)),
        *(pytest.param(other, 3, marks=pytest.mark.slow) for other in ("ddp", "zero1", "zero2", "zero3")),
    ],
)
def test_fsdp2_is_ddp_and_zero(runs: Runs, other: str, num_ranks: int) -> None:
    expected, fsdp = (sharded(runs, kind, num_ranks, "-compared", training=COMPARABLE) for kind in (other, "fsdp2"))
    assert f"FSDP2, {num_ranks} ranks" in events(fsdp, "start")[0]["shards"]
    assert_islands_agree(fsdp)
    assert relative_difference(expected, fsdp) < ROUNDING


@pytest.mark.slow
def test_replicas_of_shards_are_ddp(runs: Runs) -> None:
    """Two replicas of two shards."""
    ddp, hsdp = (sharded(runs, kind, 4, "-compared", training=COMPARABLE) for kind in ("ddp", "hsdp"))
    assert "FSDP2 with 2 replicas, 4 ranks" in events(hsdp, "start")[0]["shards"]
    assert_islands_agree(hsdp)
    assert relative_difference(ddp, hsdp) < ROUNDING


@pytest.mark.slow
def test_streaming_under_fsdp2_is_streaming_under_ddp(runs: Runs) -> None:
    settings: dict[str, Any] = {"name": "-streaming", "diloco": STREAMING, "training": COMPARABLE}
    ddp, fsdp = (sharded(runs, kind, **settings) for kind in ("ddp", "fsdp2"))
    assert [record["fragment"] for record in events(fsdp, "sync")] == [0, 1, 0, 1, 0]
    assert_islands_agree(fsdp)
    assert relative_difference(ddp, fsdp) < ROUNDING


@pytest.mark.slow
def test_two_islands_with_equal_data_are_one_island(runs: Runs) -> None:
    same = {"shares": "same"}
    one = sharded(runs, "fsdp2", name="-one", data=same, diloco={"num_islands": 1})
    assert_identical(one, sharded(runs, "fsdp2", name="-same", data=same))


@pytest.mark.slow
def test_accelerate_launch_with_a_file_is_the_block_of_the_run_file(runs: Runs) -> None:
    file = ROOT / "configs" / "accelerate" / "fsdp2_8.yaml"
    where = ["--num_processes", "2", "--main_process_port", str(find_free_port())]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *where]
    launched = runs.command("accelerate", command, training={"per_device_train_batch_size": 2})
    assert "FSDP2, 2 ranks" in events(launched, "start")[0]["shards"]
    assert_identical(sharded(runs, "fsdp2", name="-alone", diloco={"num_islands": 1}), launched)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "state_dict"),
    [
        ("fsdp2", 2, "SHARDED_STATE_DICT"),
        pytest.param("fsdp2", 2, "FULL_STATE_DICT", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "SHARDED_STATE_DICT", marks=pytest.mark.slow),
    ],
)
def test_resumed_is_uninterrupted(runs: Runs, kind: str, num_ranks: int, state_dict: str) -> None:
    """Stopped at step 6, in the middle of a round; with evaluations of the outer weights, which are those of all
    islands, and leave training as it is."""
    training = {
        **COMPARABLE,
        **{"save_strategy": "steps", "save_steps": 6, "save_total_limit": 3},
        **{"eval_strategy": "steps", "eval_steps": 3},
    }
    changes = merge(two_ranks(kind, num_ranks), {"fsdp": {"state_dict_type": state_dict}, "training": training})
    whole, _ = assert_resumed_is_uninterrupted(runs, f"{kind}-{state_dict}", 6, **changes)
    first, second = ([(e["step"], e["weights"], e["eval_loss"]) for e in events(whole, "eval", i)] for i in range(2))
    assert [evaluation[:2] for evaluation in first[:2]] == [(3, "outer"), (6, "outer")]
    assert first[0][2] != first[1][2]
    assert first == second
    assert_identical(sharded(runs, kind, num_ranks, "-compared", training=COMPARABLE), whole)


def test_mixed_islands_agree_after_every_round(runs: Runs) -> None:
    """FSDP2 on two ranks, ZeRO-3 on two, and one rank that shards nothing: equal outer parameters, bit for bit."""
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    islands = [("fsdp2", 2, 2), ("zero3", 2, 2), ("ddp", 1, 4)]
    with Processes() as processes:
        started = []
        for number, (kind, num_ranks, batch) in enumerate(islands):
            changes = {
                "name": "mixed",
                "training": {"per_device_train_batch_size": batch},
                "diloco": {"num_islands": 3, "rendezvous": rendezvous},
            }
            path = runs.write(f"mixed-{number}", merge(two_ranks(kind, num_ranks), changes))
            started.append(processes.spawn([*LAUNCH, path, "--island", str(number)]))
        for process in started:
            process.wait(timeout=240)
    mixed = runs.folder / "mixed"
    shards = [events(mixed, "start", number)[0]["shards"] for number in range(3)]
    assert [text.partition(",")[0] for text in shards] == ["FSDP2", "ZeRO-3", "plain"]
    assert len(events(mixed, "sync")) == 2
    assert_islands_agree(mixed, num_islands=3)
