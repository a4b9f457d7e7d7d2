"""FSDP2 in hand-written loops, through Accelerate's plugin and by hand: two islands of two ranks."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.torchrun import torchrun
from tests.processes import ROOT, Processes, run
from tests.s3 import S3Server
from tests.store_servers import serving
from tests.trainer_islands import assert_equal, start, tcp, trained_weights

pytestmark = pytest.mark.distributed

VARIANTS: dict[str, dict[str, Any]] = {
    "accelerate": {"by": "accelerate"},
    "accelerate bf16 checkpointing": {"by": "accelerate", "bf16": True, "checkpointing": True},
    "accelerate offload": {"by": "accelerate", "offload": True},
    "accelerate lora": {"by": "accelerate", "lora": True},
    "hand": {"by": "hand"},
    "hand bf16": {"by": "hand", "bf16": True},
    "hand replicas streaming": {
        "by": "hand",
        "mesh": [2, 2],
        "diloco": {"sync_every": 4, "num_fragments": 2},
    },
    "hand replicas offload": {"by": "hand", "mesh": [2, 2], "offload": True},
}
PAYLOADS = ("fp32", "bf16", "fp16", "int8", "int4", "fp4", "topk", "sign")
OUTSIDE_BRIEF = tuple(pytest.param(one, marks=pytest.mark.slow) for one in PAYLOADS if one != "int4")

SHARDED = "SHARDED_STATE_DICT"
RANK_FILES = {"rank-00000.safetensors", "rank-00001.safetensors"}

Result = tuple[dict[str, torch.Tensor], list[str]]


def run_islands(
    folder: Path, where: str, diloco: dict[str, Any] | None = None, resume: Path | None = None, **settings: Any
) -> list[Result]:
    """What both islands end with: weights, and the hash of the outer parameters after each round.

    They resume from what the run in the folder `resume` has saved after step 3.
    """
    folder.mkdir(exist_ok=True)
    with Processes() as processes:
        started = []
        for island in range(2):
            config = {"island": island, "num_islands": 2, "sync_every": 2, "rendezvous": where, **(diloco or {})}
            place = {"folder": str(folder / f"island-{island}"), "result": str(folder / f"{island}.pt")}
            if resume:
                place["resume_from"] = str(resume / f"island-{island}" / "checkpoint-3")
            whole = json.dumps({"steps": 6, "config": config, **place, **settings})
            num_ranks = math.prod(settings.get("mesh", [2]))
            started.append(processes.spawn(torchrun(num_ranks, "-m", "tests.programs.fsdp2_loop", whole)))
        for process in started:
            process.wait(timeout=280)
    return [torch.load(folder / f"{island}.pt", weights_only=True) for island in range(2)]


start_trainer = partial(start, num_ranks=2, max_steps=6, save_steps=2)
"""Starts an island of two ranks that trains with the Trainer and its `fsdp_config`."""


def run_trainers(folder: Path, **settings: Any) -> list[dict[str, torch.Tensor]]:
    """The trained weights of both islands."""
    rendezvous = tcp()
    with Processes() as processes:
        started = [start_trainer(processes, folder, island, rendezvous, **settings) for island in range(2)]
        for process in started:
            process.wait(timeout=280)
    return trained_weights(folder)


def assert_agree(results: list[Result]) -> None:
    (mine, hashes), (others, other_hashes) = results
    assert len(hashes) == 3
    assert hashes == other_hashes
    assert_equal(mine, others)


@pytest.mark.parametrize(
    "variant", [pytest.param(one, marks=() if "bf16" in one else pytest.mark.slow) for one in VARIANTS]
)
def test_islands_agree_in_a_loop(tmp_path: Path, variant: str) -> None:
    results = run_islands(tmp_path, tcp(), **VARIANTS[variant])
    assert_agree(results)
    assert all("lora" in name for name in results[0][0]) is ("lora" in variant)


@pytest.mark.slow
def test_by_hand_is_by_accelerate(tmp_path: Path) -> None:
    """The units of what is gathered at a time differ, and no value."""
    hand, accelerate = (run_islands(tmp_path / by, tcp(), by=by)[0] for by in ("hand", "accelerate"))
    for name, weights in hand[0].items():
        torch.testing.assert_close(weights, accelerate[0][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("payload", ["int4", *OUTSIDE_BRIEF])
def test_every_payload_in_a_store(tmp_path: Path, payload: str) -> None:
    where = (tmp_path / "store").as_uri()
    assert_agree(run_islands(tmp_path, where, {"payload": payload, "min_islands": 2}, by="accelerate"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[2], [2, 2]], ids=["shards", "replicas"])
def test_resumed_in_a_loop_is_uninterrupted(tmp_path: Path, mesh: list[int]) -> None:
    """From a checkpoint of step 3, in the middle of a round, of int4 with its residual."""
    settings: dict[str, Any] = {"diloco": {"payload": "int4"}, "by": "accelerate", "mesh": mesh}
    whole = run_islands(tmp_path / "whole", tcp(), save_at=3, **settings)
    resumed = run_islands(tmp_path / "resumed", tcp(), resume=tmp_path / "whole", **settings)
    for (weights, hashes), (again, later) in zip(whole, resumed, strict=True):
        assert later == hashes[1:]
        assert_equal(weights, again)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [([1], [2]), ([2], [1]), ([2], [2, 2])], ids=str)
def test_resumed_by_hand_on_another_number_of_ranks(tmp_path: Path, before: list[int], after: list[int]) -> None:
    """The inner state in torch's distributed checkpoint; the whole run, within rounding."""
    whole = run_islands(tmp_path / "whole", tcp(), by="hand", mesh=before, save_at=3)
    resumed = run_islands(tmp_path / "resumed", tcp(), resume=tmp_path / "whole", by="hand", mesh=after)
    (again, hashes), (others, other_hashes) = resumed
    assert len(hashes) == 2
    assert hashes == other_hashes
    assert_equal(again, others)
    for name, weights in whole[0][0].items():
        assert float((again[name] - weights).norm()) < 1e-6 * float(weights.norm()), name


def test_the_trainer_with_bf16_and_a_disk_that_is_full_once(tmp_path: Path) -> None:
    """At step 4 no rank can write its part: training goes on, and the next checkpoint is whole."""
    settings = {
        "bf16": True,
        "full_disk_at": 4,
        "fsdp": {"activation_checkpointing": True, "state_dict_type": SHARDED},
    }
    assert_equal(*run_trainers(tmp_path, **settings))
    for island in range(2):
        folder = tmp_path / f"island-{island}"
        assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
        assert {path.name for path in (folder / "checkpoint-6" / "diloco").glob("rank-*")} == RANK_FILES


@pytest.mark.slow
def test_a_whole_checkpoint_and_a_disk_that_is_full_once(tmp_path: Path) -> None:
    """One rank writes what is gathered, while the other waits."""
    settings = {"lora": True, "full_disk_at": 4, "fsdp": {"state_dict_type": "FULL_STATE_DICT"}}
    first, second = run_trainers(tmp_path, **settings)
    assert_equal(first, second)
    assert all("lora" in name for name in first)


@contextmanager
def meeting_place(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A rendezvous where islands come and go, and the variables with which they find it."""
    if kind == "s3":
        with S3Server() as server:
            yield f"{server.url}/run", server.environment()
    elif kind == "http":
        with serving(folder / "served") as address:
            yield f"{address}/run", {}
    else:
        yield tcp() if kind == "tcp" else (folder / "store").as_uri(), {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "s3", "http", "tcp"])
def test_killed_and_back(tmp_path: Path, kind: str) -> None:
    """Both ranks of island 1 are killed at step 3; it comes back, and both end with equal weights."""
    settings: dict[str, Any] = {
        "fsdp": {"state_dict_type": SHARDED},
        "diloco": {"min_islands": 2, "max_islands": 3},
    }
    with meeting_place(kind, tmp_path) as (where, env), Processes() as processes:
        start_one = partial(start_trainer, processes, tmp_path, rendezvous=where, env=env, **settings)
        survivor = start_one(island=0)
        start_one(island=1, fail_at=3).wait(timeout=280, expect=None)
        back = start_one(island=1, resume="common")
        back.wait(timeout=280)
        survivor.wait(timeout=280)
    assert_equal(*trained_weights(tmp_path))


@pytest.mark.slow
def test_a_rank_reads_and_writes_its_part_of_the_model() -> None:
    """Counted where torch copies, of 4M parameters on two ranks."""
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "sharded.py"), "--values", "4194304", "--turns", "1"]
    output = run(benchmark, timeout=200).output
    (fsdp2,) = re.findall(r"^FSDP2 +4,194,304 .*", output, re.MULTILINE)
    assert "reads 8,388,608 bytes (0.500 of the model) and writes 8,388,608 (0.500)" in fsdp2
