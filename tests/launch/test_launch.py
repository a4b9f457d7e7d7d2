"""`hf-diloco launch` with real training on two islands: to the end, interrupted, an island killed, and resumed."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hf_diloco.status.models import RunStatus
from tests import records
from tests.processes import Process, Processes, run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # two launches in a test, on few and busy cores

PATIENCE = 400  # seconds for one launch

PROGRAM = (sys.executable, "-m", "hf_diloco.cli", "launch")
ZERO2 = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
RUN: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"train": {"vocab_size": 400, "max_megabytes": 0.2}},
    "data": {"sequence_length": 32, "num_eval_sequences": 8},
    "training": {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 1000,
    },
    "launch": {"use_cpu": True, "threads": 1},
    "sample": {"prompt": "The", "num_tokens": 5},
    "diloco": {"num_islands": 2, "sync_every": 4, "outer_momentum": 0.0, "join_timeout": 120, "sync_timeout": 60},
}


class Launches:
    """Starts `hf-diloco launch` on one run file in a folder of its own."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.processes = processes
        self.run = folder / "runs" / "tiny"
        self._file = folder / "tiny.yaml"
        self._file.write_text(yaml.safe_dump({**RUN, "output": str(folder / "runs")}))

    def start(self, max_steps: int, *arguments: str, deepspeed: bool = True, num_processes: int = 1) -> Process:
        settings = [
            f"training.max_steps={max_steps}",
            f"deepspeed={json.dumps(ZERO2) if deepspeed else 'null'}",
            f"launch.num_processes={num_processes}",
        ]
        return self.processes.spawn([*PROGRAM, self._file, *settings, *arguments])

    def island(self, number: int) -> Path:
        return self.run / f"island-{number}"

    def checkpoints(self, number: int) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.island(number).glob("checkpoint-*"))

    def events(self, number: int, event: str) -> list[dict[str, Any]]:
        return records.events(self.island(number), event)

    def assert_finished(self, max_steps: int, num_islands: int = 2) -> None:
        """The last section of all islands' records ends at `max_steps`, with equal outer parameters."""
        for number in range(num_islands):
            assert self.events(number, "end")[-1]["step"] == max_steps
            assert json.loads((self.island(number) / "summary.json").read_text())["eval_loss"] > 0
        assert len({self.events(number, "sync")[-1]["outer_hash"] for number in range(num_islands)}) == 1
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        left = [(process.pid, process.cmdline()) for process in self.processes.alive()]
        assert not left, left


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    with Processes() as processes:
        yield Launches(tmp_path, processes)


@pytest.mark.parametrize(
    ("deepspeed", "num_processes", "num_islands"),
    [  # each takes another way through accelerate
        pytest.param(True, 1, 2, marks=pytest.mark.slow),
        (False, 2, 2),
        (True, 2, 1),
        pytest.param(False, 1, 1, marks=pytest.mark.slow),
    ],
    ids=["ZeRO-2 x 1 rank, 2 islands", "DDP x 2 ranks, 2 islands", "ZeRO-2 x 2 ranks, 1 island", "1 rank, 1 island"],
)
def test_a_run_from_start_to_table(launches: Launches, deepspeed: bool, num_processes: int, num_islands: int) -> None:
    launched = launches.start(8, "--num-islands", str(num_islands), deepspeed=deepspeed, num_processes=num_processes)
    output = launched.wait(timeout=PATIENCE).output
    launches.assert_finished(8, num_islands)
    assert f"launcher │ island {num_islands - 1} finished" in output
    for row in ("evaluation loss", "tokens/s", "bytes exchanged", "per-step sync", "it writes"):
        assert row in output
    assert str(launches.run / "model") in re.sub(r"\s", "", output)
    assert launches.events(0, "start")[0]["num_ranks"] == num_processes
    assert ("ZeRO-2" in launches.events(0, "start")[0]["shards"]) == deepspeed
    assert not re.search(r"Traceback|Warning:|WARNING", output), "noise in the output"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert f"on {num_islands} island" in (launches.run / "model" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(launches.run / "model")
    tokens = AutoTokenizer.from_pretrained(launches.run / "model")("The", return_tensors="pt")
    assert model(input_ids=tokens["input_ids"]).logits.isfinite().all()


def test_ctrl_c_and_resume(launches: Launches) -> None:
    launched = launches.start(400)
    records.wait_for_step(launched, launches.run, 0, 1, step=6)
    told = run([*PROGRAM[:-1], "status", launches.run, "--json"], timeout=60).output
    seen = RunStatus.model_validate_json(told)
    assert [(island.island, island.presence, island.num_ranks) for island in seen.islands] == [
        (0, "alive", 1),
        (1, "alive", 1),
    ]
    assert seen.round >= 1
    launched.interrupt()
    output = launched.wait(timeout=60, expect=3).output
    assert launches.checkpoints(0)
    assert launches.checkpoints(1)
    assert "to continue from the last checkpoint: hf-diloco launch" in output
    launches.assert_nothing_left()

    reached = launches.checkpoints(0)[-1]
    launches.start(reached + 12).wait(timeout=PATIENCE)
    launches.assert_finished(reached + 12)
    starts = launches.events(0, "start")
    assert [start["resumed"] for start in starts] == [False, True]
    assert 0 < starts[1]["step"] <= reached


def kill_in_island_1(launched: Process, module: str) -> None:
    """SIGKILL for the one process of island 1 that runs `python -m module`."""
    (victim,) = (
        process
        for process in psutil.Process(launched.pid).children(recursive=True)
        if process.environ().get("HF_DILOCO_ISLAND") == "1"
        and [word for word in process.cmdline()[1:] if word != "-u"][:2] == ["-m", module]
    )
    victim.kill()


def test_a_killed_rank_and_resume(launches: Launches) -> None:
    launched = launches.start(400, "training.save_steps=4", deepspeed=False)
    records.wait_for_step(launched, launches.run, 0, 1, step=10)
    kill_in_island_1(launched, "hf_diloco.apps.lm")
    output = launched.wait(timeout=120, expect=1).output
    assert "error: island 1 failed (SIGKILL)" in output
    assert str(launches.island(1) / "log.txt") in output
    assert launches.events(0, "save")[-1]["step"] == launches.events(0, "end")[-1]["step"], "the survivor saved"
    launches.assert_nothing_left()

    reached = launches.checkpoints(0)[-1]
    launches.start(reached + 12, "training.save_steps=4", deepspeed=False).wait(timeout=PATIENCE)
    launches.assert_finished(reached + 12)
    assert launches.events(1, "start")[-1]["step"] > 0


def test_a_killed_accelerate_leaves_no_orphan(launches: Launches) -> None:
    launched = launches.start(400)
    records.wait_for_step(launched, launches.run, 0, 1, step=6)
    kill_in_island_1(launched, "hf_diloco.apps.common.island_store")
    output = launched.wait(timeout=120, expect=1).output
    assert "error: island 1 failed (SIGKILL)" in output
    assert launches.checkpoints(0)
    assert launches.checkpoints(1), "its rank was asked to end, not killed"
    launches.assert_nothing_left()


def test_a_killed_launcher_leaves_checkpoints_and_no_process(launches: Launches) -> None:
    launched = launches.start(400, deepspeed=False)
    records.wait_for_step(launched, launches.run, 0, 1, step=6)
    launched.kill()
    deadline = time.monotonic() + 40
    while launches.processes.alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    launches.assert_nothing_left()
    assert launches.checkpoints(0)
    assert launches.checkpoints(1)
