"""1-bit all-reduces and optimizers between real processes: against NumPy, the bytes that travel, and resuming."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from tests.processes import Processes
from tests.programs.onebit_ranks import FREEZE, draw

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[1] / "programs" / "onebit_ranks.py"
NUM_VALUES = 64 * 100 + 100 + 100 * 32 + 32


def run(folder: Path, num_ranks: int, **settings: Any) -> tuple[list[Any], str]:
    """What each rank leaves, and what they said."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Processes() as processes:
        started = [
            processes.spawn(
                [
                    sys.executable,
                    PROGRAM,
                    json.dumps(
                        {
                            "rank": rank,
                            "num_ranks": num_ranks,
                            "store": store.port,
                            "result": str(folder / f"result-{rank}.pt"),
                            **settings,
                        }
                    ),
                ],
                env={"PYTHONPATH": "."},
            )
            for rank in range(num_ranks)
        ]
        said = "".join(process.wait().output for process in started)
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(num_ranks)], said


def compress(values: Any) -> tuple[Any, Any]:
    scale = np.float32(np.sqrt(np.mean(values.astype(np.float64) ** 2))) if values.size else np.float32(0)
    sent = np.where(values < 0, -scale, scale)
    return sent, values - sent


def expected(size: int, num_ranks: int) -> list[Any]:
    """What five calls give, by NumPy, as the paper writes it; rank 1 is left out of the fourth."""
    chunk = 8 * math.ceil(math.ceil(size / num_ranks) / 8)
    worker = [np.zeros(size, np.float32)] * num_ranks
    server = np.zeros(size, np.float32)
    results = []
    for call in range(5):
        sent = {}
        for rank in range(num_ranks):
            if (call, rank) != (3, 1):
                values = draw(call, rank, size=size).numpy()
                sent[rank], worker[rank] = compress(values + worker[rank])
        wanted = np.mean(list(sent.values()), axis=0).astype(np.float32) + server
        parts = [compress(wanted[low : low + chunk]) for low in range(0, size, chunk)]
        server = np.concatenate([part[1] for part in parts])
        results.append((np.concatenate([part[0] for part in parts]), list(worker), server))
        if call == 3:
            worker[1] = np.where(np.arange(size) == 0, np.float32(0), worker[1])
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_all_reduce_is_numpy(num_ranks: int, tmp_path: Path) -> None:
    sizes = [1, 17, 5003, 200_000]
    ranks, _ = run(tmp_path, num_ranks, sizes=sizes)
    for number, size in enumerate(sizes):
        right = expected(size, num_ranks)
        for call, (mean, workers, server) in enumerate(right):
            outcomes = [rank[number]["calls"][call] for rank in ranks]
            for num_finite, values, _ in outcomes:
                assert num_finite == num_ranks - (call == 3)
                assert torch.equal(values, outcomes[0][1])
                np.testing.assert_allclose(values.numpy(), mean, rtol=1e-5)
            if call != 3:
                for rank, (_, _, errors) in enumerate(outcomes):
                    np.testing.assert_allclose(errors["worker"].numpy(), workers[rank], rtol=1e-4, atol=1e-5)
            errors = np.concatenate([outcome[2]["server"].numpy() for outcome in outcomes])
            np.testing.assert_allclose(errors, server, rtol=1e-4, atol=1e-5)
        for rank in ranks:
            said, counted = rank[number]["said"], rank[number]["counted"]
            assert said <= counted <= 1.05 * said + 5 * 2000, (size, said, counted)


@pytest.mark.parametrize("kind", ["lamb", pytest.param("adam", marks=pytest.mark.slow)])
def test_ranks_agree_and_ddp_sends_nothing_of_its_own(kind: str, tmp_path: Path) -> None:
    [first, *others], _ = run(tmp_path, 3, trainings=[[kind, FREEZE + 4, None]])
    assert all(torch.equal(other[0]["weights"], first[0]["weights"]) for other in others)
    counted = first[0]["counted"]
    at_full_precision, compressed = min(counted[1:FREEZE]), max(counted[FREEZE:])
    assert at_full_precision > 4 * NUM_VALUES
    assert compressed < 2 * 2 * (NUM_VALUES / 3 / 8) + 3000, (
        counted
    )  # two packets of a third, both stages, and barriers


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    one, state = FREEZE + 2, str(folder)
    ranks, said = run(tmp_path, 2, trainings=[["lamb", one + 3, None], ["lamb", one, state], ["lamb", 3, state]])
    for whole, _, resumed in ranks:
        assert torch.equal(whole["weights"], resumed["weights"])
    assert "begin at zero" not in said


def test_another_number_of_ranks_begins_without_errors(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    run(tmp_path, 2, trainings=[["lamb", FREEZE + 2, str(folder)]])
    (folder / "2.pt").write_bytes((folder / "0.pt").read_bytes())
    ranks, _ = run(tmp_path, 3, trainings=[["lamb", 2, str(folder)]])
    assert all(torch.equal(rank[0]["weights"], ranks[0][0]["weights"]) for rank in ranks)
