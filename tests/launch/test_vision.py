"""Image classifiers through the command line: nodes as processes, asked to stop, killed; as threads of one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from hf_diloco.apps.vision.runfile import ImageDataBlock
from hf_diloco.apps.vision.sources import open_source
from tests import records
from tests.processes import ROOT, Command, Process, Processes, find_free_port, run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

PATIENCE = 400  # seconds for one launch
LAUNCH = (sys.executable, "-m", "hf_diloco.cli", "launch")
RUN: dict[str, Any] = {
    "name": "tiny",
    "model": {"config": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8}},
    "data": {"shares": "dirichlet", "image_size": 8, "augment": {"random_crop": 1}},
    "training": {
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.05,
        "logging_steps": 4,
        "save_steps": 1000,
    },
    "gossip": {"topology": "ring", "num_nodes": 3, "join_timeout": 120, "exchange_timeout": 30},
    "launch": {"use_cpu": True, "threads": 1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RUN, "output": str(tmp_path / "runs")}))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_equal(one: Path, other: Path) -> None:
    """Two runs have made the same model, bit for bit."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def events(folder: Path, node: int, event: str) -> list[dict[str, Any]]:
    return records.events(folder / f"island-{node}", event)


def wait_for_step(launched: Process, folder: Path, step: int, num_nodes: int = 3) -> None:
    def has_taken_it(node: int) -> bool:
        return any(event["step"] >= step for event in events(folder, node, "train"))

    wait_for(launched, lambda: all(has_taken_it(node) for node in range(num_nodes)))


def wait_for(process: Process, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.popen.poll() is None, process.output
        assert time.monotonic() < deadline, process.output
        time.sleep(0.05)


@pytest.mark.parametrize(
    "method", ["decentlam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pmsgd", "dmsgd"))]
)
def test_processes_and_threads_make_the_same_model(method: str, file: Path) -> None:
    """The exchange of DmSGD, combine-then-adapt, goes on behind forward and backward where nodes are processes."""
    settings = [f"gossip.method={method}", *(["gossip.options={combine_first: true}"] if method == "dmsgd" else [])]
    run([*LAUNCH, file, *settings, "--name", "processes"], timeout=PATIENCE)
    simulated: Command = [*LAUNCH, file, *settings, "--simulate", "3", "--name", "threads"]
    completed = run(simulated, timeout=PATIENCE)
    assert "the mean of 3 nodes: accuracy" in completed.output
    runs = file.parent / "runs"
    assert_equal(runs / "processes", runs / "threads")
    for node in range(3):
        losses = [[event["loss"] for event in events(runs / name, node, "train")] for name in ("processes", "threads")]
        assert losses[0] == losses[1]
        sent = [sum(event["bytes_sent"] for event in events(runs / n, node, "mix")) for n in ("processes", "threads")]
        assert sent[0] == pytest.approx(sent[1], rel=0.02)
        hidden = [
            sum(event["seconds_hidden"] for event in events(runs / n, node, "mix")) for n in ("processes", "threads")
        ]
        assert hidden[1] == 0
        assert (hidden[0] > 0) == (method == "dmsgd")
    report = run([sys.executable, "-m", "hf_diloco.cli", "report", runs / "processes"])
    assert f"{method} on ring" in report.output
    assert "warning" not in report.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "average"),
    [
        ("decentlam", "true"),
        ("decentlam", "false"),
        ("momentum-consensus", "true"),
    ],
)
def test_slow_momentum_in_processes_and_threads(method: str, average: str, file: Path) -> None:
    """The last step is an outer one: with the average all nodes end with equal bits.

    The exchange of momentum consensus goes on behind forward and backward where nodes are processes.
    """
    settings = [f"gossip.slowmo={{sync_every: 4, outer_momentum: 0.5, average: {average}}}", "gossip.num_nodes=4"]
    settings += [f"gossip.method={method}"]
    run([*LAUNCH, file, *settings, "--name", "processes"], timeout=PATIENCE)
    simulated: Command = [*LAUNCH, file, *settings, "--simulate", "4", "--name", "threads"]
    run(simulated, timeout=PATIENCE)
    runs = file.parent / "runs"
    assert_equal(runs / "processes", runs / "threads")
    for name in ("processes", "threads"):
        distance = events(runs / name, 0, "eval")[-1]["consensus_distance"]
        assert (distance < 1e-6) == (average == "true")


@pytest.mark.slow
@pytest.mark.parametrize("slowmo", ["null", "{sync_every: 20}"])
def test_without_node_0_the_others_train_to_the_end(slowmo: str, file: Path) -> None:
    settings = ["training.max_steps=200", "training.logging_steps=10", "gossip.num_nodes=4"]
    settings += [f"gossip.slowmo={slowmo}", "--rendezvous", f"tcp://127.0.0.1:{find_free_port()}"]
    folder = file.parent / "runs" / "tiny"
    with Processes() as processes:
        launched = processes.spawn([*LAUNCH, file, *settings])
        wait_for_step(launched, folder, 20, 4)
        kill_node(processes, 0)
        launched.wait(PATIENCE, expect=1)  # an island of it has failed
        assert "node 1 failed" not in launched.output
    logs = [(folder / f"island-{node}" / "log.txt").read_text() for node in (1, 2, 3)]
    for node, log in enumerate(logs, 1):
        assert [event["step"] for event in events(folder, node, "end")] == [200]
        assert events(folder, node, "eval")[-1]["weights"] == "inner"
        assert ("this outer step is left out" in log) == (slowmo != "null")


def run_without_node_2_for_a_time(file: Path, *more: str) -> list[dict[str, Any]]:
    """Four nodes, one of which is killed, done without, and started again. Returns each node's last evaluation."""
    num_steps = 1000  # a start takes as long as a hundred of them
    settings = [f"training.max_steps={num_steps}", "training.logging_steps=10", "gossip.num_nodes=4", *more]
    settings += ["--rendezvous", f"tcp://127.0.0.1:{find_free_port()}"]
    folder = file.parent / "runs" / "tiny"
    with Processes() as processes:
        launched = processes.spawn([*LAUNCH, file, *settings])
        wait_for_step(launched, folder, 20, 4)
        kill_node(processes, 2)
        launched.wait_for("node 2 failed", PATIENCE)
        back = processes.spawn([*LAUNCH, file, *settings, "--island", "2"])
        back.wait(PATIENCE)
        launched.wait(PATIENCE, expect=1)  # an island of it has failed
        note = "the other nodes go on; the same command with --node K --rendezvous tcp://127.0.0.1:"
        assert note in launched.output
        assert not processes.alive()
    news = [event["news"] for node in (1, 3) for event in events(folder, node, "neighbour")]
    # A loss may be noticed first in an average of all, which then takes place without it.
    assert any("node 2 was lost" in text or "without node 2" in text for text in news)
    assert any("node 2 has returned" in text for text in news)
    first, second = events(folder, 2, "start")
    assert first["step"] == 0
    assert 20 < second["step"] < num_steps
    last = [events(folder, node, "eval")[-1] for node in range(4)]
    assert {event["step"] for event in last} == {num_steps}
    assert last[0]["eval_accuracy"] > 0.5
    return last


@pytest.mark.slow
def test_a_killed_node_returns_to_slow_momentum(file: Path) -> None:
    last = run_without_node_2_for_a_time(file, "gossip.slowmo={sync_every: 8}")
    assert all(event["consensus_distance"] < 1e-6 for event in last), last


@pytest.mark.slow
def test_non_blocking_swarm(file: Path) -> None:
    run([*LAUNCH, file, "gossip.method=swarm-sgd", "gossip.options={local_steps: 2}"], timeout=PATIENCE)
    folder = file.parent / "runs" / "tiny"
    for node in range(3):
        assert events(folder, node, "end")[0]["bytes_sent"] > 0
        assert 0 < events(folder, node, "eval")[0]["consensus_distance"] < 1


def test_a_node_of_two_ranks(file: Path) -> None:
    """Two nodes of two ranks take the same steps as two of one rank that see both ranks' examples."""
    settings = ["gossip.num_nodes=2", "data.augment.random_crop=0", "training.max_grad_norm=0"]
    run([*LAUNCH, file, *settings, "launch.num_processes=2", "--name", "ranks"], timeout=PATIENCE)
    folder = file.parent / "runs" / "ranks"
    starts = [events(folder, node, "start")[0] for node in range(2)]
    assert [start["num_ranks"] for start in starts] == [2, 2]
    assert [start["examples_per_step"] for start in starts] == [16, 16]
    assert all(len(events(folder, node, "eval")) == 1 for node in range(2))
    assert events(folder, 0, "eval")[0]["eval_accuracy"] == events(folder, 1, "eval")[0]["eval_accuracy"]


@pytest.mark.slow
def test_the_imagenet_recipe_in_small(tmp_path: Path) -> None:
    """As it is but for its sizes, on files of the hub's format: its graph, augmentation, precision, and ResNet-50."""
    for split, numbers in ("train", range(64)), ("validation", range(64, 80)):
        write_photographs(tmp_path / "data" / f"{split}-00000-of-00001.parquet", numbers)
    sizes = {
        "data.path": tmp_path,
        "data.image_size": 64,  # processors without bf16 take minutes for larger ones
        "training.max_steps": 3,
        "training.warmup_steps": 1,
        "training.per_device_train_batch_size": 2,
        "training.per_device_eval_batch_size": 8,
        "training.eval_steps": 3,
        "training.save_steps": 3,
        "training.logging_steps": 1,
        "training.dataloader_num_workers": 1,
        "gossip.num_nodes": 2,
        "launch.num_processes": 1,
        "launch.use_cpu": "true",
        "launch.threads": 1,
    }
    settings = [f"{key}={value}" for key, value in sizes.items()]
    recipe = ROOT / "configs" / "vision" / "imagenet_resnet50.yaml"
    run([*LAUNCH, recipe, *settings, "--output", tmp_path / "runs", "--name", "small"], timeout=PATIENCE)
    folder = tmp_path / "runs" / "small"
    model = AutoModelForImageClassification.from_pretrained(folder / "model")
    assert model.config.id2label[9] == "9"
    for node in range(2):
        losses = [event["loss"] for event in events(folder, node, "train")]
        assert len(losses) == 3
        assert all(1 < loss < 5 for loss in losses), "some 2.3 for ten classes"
        assert events(folder, node, "end")[0]["bytes_sent"] > 3 * 4 * model.num_parameters(), "to one neighbour"
        assert events(folder, node, "eval")[-1]["step"] == 3


def write_photographs(path: Path, numbers: Iterable[int]) -> None:
    """Digits as colour pictures of several sizes, in a parquet file with the columns of ImageNet's."""
    digits = open_source(ImageDataBlock()).train
    pictures = [digits.open(n).convert("RGB") for n in numbers]
    columns = {
        "image": [picture.resize((300 + 20 * (n % 7), 260)) for n, picture in enumerate(pictures)],
        "label": [int(digits.labels[n]) for n in numbers],
    }
    features = Features({"image": datasets.Image(), "label": ClassLabel(names=list("0123456789"))})
    path.parent.mkdir(exist_ok=True)
    Dataset.from_dict(columns, features=features).to_parquet(str(path))


@pytest.mark.slow
def test_asked_to_stop_all_save_the_same_step_and_go_on(file: Path) -> None:
    settings = ["training.max_steps=200", "training.logging_steps=10"]
    runs = file.parent / "runs"
    run([*LAUNCH, file, *settings, "--name", "whole"], timeout=PATIENCE)
    with Processes() as processes:
        launched = processes.spawn([*LAUNCH, file, *settings, "--name", "part"])
        wait_for_step(launched, runs / "part", 20)
        launched.popen.send_signal(signal.SIGTERM)
        launched.wait(PATIENCE, expect=3)
        assert not processes.alive()
    saved = [sorted(path.name for path in (runs / "part" / f"island-{n}").glob("checkpoint-*")) for n in range(3)]
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) == 1
    run([*LAUNCH, file, *settings, "--name", "part"], timeout=PATIENCE)
    assert events(runs / "part", 0, "start")[-1]["resumed"]
    assert_equal(runs / "whole", runs / "part")


@pytest.mark.slow
def test_a_killed_node_is_done_without_and_returns(file: Path) -> None:
    last = run_without_node_2_for_a_time(file)
    assert len({event["eval_accuracy"] for event in last}) == 1, "the mean is over all four"


@pytest.mark.slow
def test_a_killed_node_returns_where_nobody_waits(file: Path) -> None:
    """The others go on until it has taken further steps, however long that takes."""
    settings = ["gossip.method=swarm-sgd", "gossip.num_nodes=4", "training.max_steps=1000000"]
    settings += ["training.save_steps=1000000", "training.logging_steps=10"]
    settings += ["--rendezvous", f"tcp://127.0.0.1:{find_free_port()}"]
    folder = file.parent / "runs" / "tiny"
    with Processes() as processes:
        launched = processes.spawn([*LAUNCH, file, *settings])
        wait_for_step(launched, folder, 20, 4)
        kill_node(processes, 2)
        launched.wait_for("node 2 failed", PATIENCE)
        back = processes.spawn([*LAUNCH, file, *settings, "--island", "2"])
        wait_for(back, lambda: len(events(folder, 2, "start")) == 2)
        entered = events(folder, 2, "start")[1]["step"]
        wait_for(back, lambda: events(folder, 2, "train")[-1]["step"] >= entered + 50)
        for process in (back, launched):
            process.popen.send_signal(signal.SIGTERM)
        back.wait(PATIENCE, expect=3)
        launched.wait(PATIENCE, expect=1)  # an island of it has failed
        assert not processes.alive()
    assert entered > 20
    for node in (1, 3):
        news = " ".join(event["news"] for event in events(folder, node, "neighbour"))
        assert news.index("node 2 was lost") < news.index("node 2 has returned")
    end = events(folder, 2, "end")[-1]
    assert end["step"] >= entered + 50
    assert end["bytes_sent"] > 0
    assert end["bytes_received"] > 0


@pytest.mark.slow
def test_a_node_that_does_not_return_is_done_without(file: Path) -> None:
    settings = ["training.max_steps=150", "training.logging_steps=10", "gossip.num_nodes=4"]
    folder = file.parent / "runs" / "tiny"
    with Processes() as processes:
        launched = processes.spawn([*LAUNCH, file, *settings])
        wait_for_step(launched, folder, 20, 4)
        kill_node(processes, 2)
        launched.wait(PATIENCE, expect=1)
        assert not processes.alive()
    for node in (0, 1, 3):
        assert events(folder, node, "end")[0]["step"] == 150
    last = [events(folder, node, "eval")[-1] for node in (0, 1, 3)]
    assert {event["weights"] for event in last} == {"outer"}
    assert len({event["eval_accuracy"] for event in last}) == 1
    report = run([sys.executable, "-m", "hf_diloco.cli", "report", folder])
    assert "node 2 was lost" in " ".join(report.output.split())


def kill_node(processes: Processes, number: int) -> None:
    """Ends all of a node's processes at once, as if its machine had lost power."""
    found = []
    for process in processes.alive():
        try:
            if process.environ().get("HF_DILOCO_ISLAND") == str(number) and process.environ().get("RANK", "0") == "0":
                found.append(process)
        except psutil.Error:
            continue
    assert found
    for process in found:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
