"""Nodes of a graph through the Trainer: agreement on the end, evaluation of the mean, checkpoints, refusals."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_diloco.apps.common.load import kind_of, read_run_file
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.cli.plan import LaunchOptions
from hf_diloco.cli.run import run_simulation
from hf_diloco.errors import CheckpointError, ConfigError, FingerprintError, UnsupportedError
from hf_diloco.gossip.checkpoint import whole_checkpoints
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.node import CommonEnd, NodeNeighbours
from hf_diloco.gossip.threads import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.gossip import METHODS, make_optimizer
from hf_diloco.methods.topology import Topology, from_weights, make_topology
from hf_diloco.report import load_run, summarise, write_html
from hf_diloco.report.rows import overview
from hf_diloco.trainer.gossip_callback import GossipCallback
from tests.islands import run_islands
from tests.processes import ROOT
from tests.small_model import Linear
from tests.tiny_nodes import events, run_of, simulate, weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> VisionRun:
    """A whole run of three nodes."""
    folder = tmp_path_factory.mktemp("whole")
    run = run_of(folder)
    assert run_simulation(LaunchOptions(folder / "tiny.yaml"), 3) == 0
    return run


# The common end


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["ring", "grid", "star", "exponential", "one-peer-exponential", "full"]),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 11)), min_size=1, max_size=3),
)
def test_all_nodes_end_after_the_same_step(name: str, num_nodes: int, wishes: list[tuple[int, int]]) -> None:
    steps = last_steps(make_topology(name, num_nodes), 1, wishes)
    assert len(steps) == 1
    first = min(when for when, _ in wishes)
    assert first <= steps.pop() <= first + 2 * num_nodes


@pytest.mark.parametrize("who", range(4))
def test_all_nodes_end_after_the_same_step_on_a_graph_of_their_own(who: int) -> None:
    """A line whose links take turns, in the order that carries a wish of node 0 slowest."""
    weights = np.stack([np.eye(4)] * 3)
    for step, (one, other) in enumerate([(2, 3), (1, 2), (0, 1)]):
        weights[step][np.ix_([one, other], [one, other])] = 0.5
    assert len(last_steps(from_weights(weights), 1, [(0, who)])) == 1


@pytest.mark.parametrize(("name", "num_nodes", "local_steps"), [("ring", 4, 2), ("star", 6, 1), ("full", 4, 3)])
def test_nodes_whose_pairs_are_drawn_end_after_the_same_step(name: str, num_nodes: int, local_steps: int) -> None:
    """They meet fewer others, and less often, than the graph has it."""
    node, parameter = MemoryGraph(make_topology(name, num_nodes)).node(0), torch.nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer("swarm-sgd", [parameter], node, 0.1, blocking=True, local_steps=local_steps)
    for when in range(0, 200, 7):
        (last,) = last_steps(*optimizer.exchanges, [(when, when % num_nodes)])
        assert last >= when


def last_steps(topology: Topology, steps_each: int, wishes: list[tuple[int, int]]) -> set[int]:
    """The steps with which the first nodes end, and the others at the same moment, if they do."""
    num_nodes = topology.num_nodes
    ends = [CommonEnd(topology, steps_each) for _ in range(num_nodes)]
    for step in range(2000):
        for when, who in wishes:
            if when == step:
                ends[who % num_nodes].wish()
        number, rest = divmod(step, steps_each)
        if rest == steps_each - 1:
            values = torch.tensor([end.value(number) for end in ends], dtype=torch.float64)
            mixed = torch.from_numpy(topology.weights(number).copy()) @ values
            for end, value in zip(ends, mixed, strict=True):
                end.note(value)
        have_come = [end.has_come(step + 1) for end in ends]
        if any(have_come):
            return {step if has_come else -1 for has_come in have_come}
    pytest.fail("nobody has ended")


def test_nobody_ends_unasked() -> None:
    end = CommonEnd(make_topology("ring", 4))
    for step in range(50):
        assert end.value(step) == 0
        end.note(torch.zeros(()))
        assert not end.has_come(step + 1)


# A whole run


def test_the_model_is_the_mean_of_the_nodes(finished: VisionRun) -> None:
    saved = weights(finished.folder / "model")
    nodes = [weights(finished.folder / f"island-{node}" / "checkpoint-8") for node in range(3)]
    assert any(not torch.equal(nodes[0][name], nodes[1][name]) for name in saved)
    for name, value in saved.items():
        if value.is_floating_point():
            mean = torch.stack([node[name].double() for node in nodes]).mean(0)
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)


def test_what_is_evaluated_is_the_saved_model(finished: VisionRun) -> None:
    from hf_diloco.apps.vision.build import build_images

    model = AutoModelForImageClassification.from_pretrained(finished.folder / "model").eval()
    if not getattr(AutoImageProcessor, "is_dummy", False):  # a version of transformers that needs torchvision for it
        AutoImageProcessor.from_pretrained(finished.folder / "model")
    data = build_images(finished.data, finished.model, 0, 3, finished.seed)
    batch = data.evaluation.batch(torch.arange(50).numpy())
    with torch.no_grad():
        output = model(**batch)
    accuracy = float((output.logits.argmax(-1) == batch["labels"]).float().mean())
    for node in range(3):
        (last,) = events(finished, node, "eval")
        assert last["weights"] == "outer"
        assert last["eval_accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert last["eval_loss"] == pytest.approx(float(output.loss), rel=1e-5)
        assert 0 < last["consensus_distance"] < 1


def test_bytes_are_those_of_the_method(finished: VisionRun) -> None:
    num_parameters = events(finished, 0, "start")[0]["num_parameters"]
    buffers = sum(
        value.numel()
        for name, value in weights(finished.folder / "model").items()
        if name.endswith(("running_mean", "running_var"))
    )
    steps = 8 * 2 * 4 * (num_parameters + 1)  # two neighbours, fp32, and the value that goes with each exchange
    # The mean: parameters, statistics and who has some, their distance, four metrics, their weight and a digest of
    # their names, twice where the model is saved.
    averaged = sum(2 * 2 * 4 * size // 3 for size in (num_parameters, buffers + 1, 1)) * 2
    for node in range(3):
        sent = sum(mix["bytes_sent"] for mix in events(finished, node, "mix"))
        assert 0 <= sent - steps - averaged // 2 <= 200
        assert events(finished, node, "end")[0]["bytes_sent"] == sent


def test_bytes_are_those_of_the_payload(tmp_path: Path) -> None:
    """Two exchanges are exact: the first, and the one after the checkpoint in the middle."""
    run = run_of(tmp_path, "gossip.payload=int8", "gossip.eval_weights=local", "training.logging_steps=1")
    assert simulate(run) == 0
    num_parameters = events(run, 0, "start")[0]["num_parameters"]
    code, exact = 260 * -(-num_parameters // 256), 4 * num_parameters
    for node in range(3):
        sent = [mix["bytes_sent"] for mix in events(run, node, "mix")][:7]
        assert sent == [2 * ((exact if step in (0, 4) else code) + 4) for step in range(7)]
    report = summarise(load_run(run.folder))
    assert report.payload == "int8"
    assert ("method", "decentlam on ring, int8 payload") in overview(report)


def test_node_0_alone_shows_what_it_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(run_of(tmp_path, "training.max_steps=2", "training.save_steps=2")) == 0
    shown = "".join(capsys.readouterr())
    assert shown.count("'train_runtime'") <= 1, shown


def test_a_resume_keeps_all_bytes_until_its_checkpoint(tmp_path: Path) -> None:
    """The log has lines of steps 4 and 8, and there are checkpoints of 3 and 6."""
    run = run_of(tmp_path, "training.save_steps=3", "gossip.eval_weights=local")
    assert simulate(run) == 0
    *mixes, of_the_mean = events(run, 0, "mix")
    assert [(mix["step"], mix["num_steps"]) for mix in mixes] == [(3, 3), (4, 1), (6, 2), (8, 2)]
    a_step = 8 * (events(run, 0, "start")[0]["num_parameters"] + 1)
    assert [mix["bytes_sent"] // a_step for mix in mixes] == [3, 1, 2, 2]
    assert of_the_mean["step"] == 8


def test_a_run_does_not_end_before_the_checkpoint_that_it_resumes_from(tmp_path: Path) -> None:
    assert simulate(run_of(tmp_path)) == 0
    with pytest.raises(ConfigError, match=r"max_steps is 4, and the checkpoint to resume from is of step 8"):
        simulate(run_of(tmp_path, "training.max_steps=4"))


def test_the_report_is_of_nodes(finished: VisionRun) -> None:
    report = summarise(load_run(finished.folder))
    assert (report.method, report.topology, report.num_islands, report.steps) == ("decentlam", "ring", 3, 8)
    assert report.eval_accuracy is not None
    assert report.bytes_sent == sum(mix["bytes_sent"] for n in range(3) for mix in events(finished, n, "mix"))
    assert not report.warnings


def test_the_page_is_of_nodes(finished: VisionRun, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_html(load_run(finished.folder), page)
    text = page.read_text()
    for title in ("Accuracy", "Consensus", "Traffic between nodes", "decentlam on ring"):
        assert title in text
    assert text.count("<svg") >= 4
    assert "Perplexity" not in text


@pytest.mark.parametrize(
    ("method", "payload"),
    [
        pytest.param("decentlam", "fp32", marks=pytest.mark.slow),
        pytest.param("pmsgd", "fp32", marks=pytest.mark.slow),
        pytest.param("d2", "fp32", marks=pytest.mark.slow),
        ("swarm-sgd", "fp32"),
        pytest.param("decentlam", "int4", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_one_that_never_stopped(method: str, payload: str, tmp_path: Path) -> None:
    settings = {"swarm-sgd": ["gossip.options={local_steps: 2, blocking: true}"]}.get(method, [])
    settings = [f"gossip.method={method}", f"gossip.payload={payload}", *settings, "data.augment.random_crop=1"]
    run = run_of(tmp_path, *settings)
    assert simulate(run) == 0
    expected = weights(run.folder / "model")
    shutil.rmtree(run.folder / "model")
    for node in range(3):  # as if all had been killed between two checkpoints
        index = run.folder / f"island-{node}" / "checkpoint-8" / "gossip.json"
        index.unlink()
    assert set(whole_checkpoints(run.folder / "island-0")) == {4}
    assert simulate(run) == 0
    assert events(run, 0, "start")[-1]["step"] == 4
    found = weights(run.folder / "model")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_wish_to_end_is_followed_by_all_and_gone_on_from(tmp_path: Path) -> None:
    whole = run_of(tmp_path, "name=whole", "training.max_steps=30", "training.save_steps=100")
    assert simulate(whole) == 0
    part = run_of(tmp_path, "name=part", "training.max_steps=30", "training.save_steps=100")
    watcher = threading.Thread(target=_stop_when, args=(part, 3))
    watcher.start()
    assert simulate(part) == 3
    watcher.join()
    steps = [set(whole_checkpoints(part.folder / f"island-{node}")) for node in range(3)]
    assert steps[0] == steps[1] == steps[2]
    (step,) = steps[0]
    assert step % 3 == 0
    assert step < 30
    assert simulate(part) == 0
    expected, found = weights(whole.folder / "model"), weights(part.folder / "model")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def _stop_when(run: VisionRun, step: int) -> None:
    """Asks node 1 alone to stop, at a step."""
    folder = run.folder / "island-1"
    for _ in range(3000):
        with_progress = folder / "metrics.jsonl"
        if with_progress.exists() and any(event["step"] >= step for event in events(run, 1, "train")):
            break
        threading.Event().wait(0.01)
    (folder / "stop").touch()


def test_nodes_that_wait_for_nobody_take_turns_and_end_when_asked(tmp_path: Path) -> None:
    run = run_of(tmp_path, "gossip.method=swarm-sgd", "training.max_steps=100000", "training.save_steps=100000")

    def stop_all() -> None:
        _stop_when(run, 8)
        for node in (0, 2):
            (run.folder / f"island-{node}" / "stop").touch()

    watcher = threading.Thread(target=stop_all)
    watcher.start()
    assert simulate(run) == 3
    watcher.join()
    for node in range(3):
        (end,) = events(run, node, "end")
        assert end["step"] < 100_000
        assert end["bytes_received"] > 0, "others published meanwhile, and all is counted"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("decentlam", "momentum-consensus", "swarm-sgd") else pytest.mark.slow)
        for name in METHODS
    ],
)
def test_every_method_goes_through_the_trainer(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, f"gossip.method={name}", "training.max_steps=4", "training.max_grad_norm=1")
    assert simulate(run) == 0
    accuracies = {events(run, node, "eval")[0]["eval_accuracy"] for node in range(3)}
    assert len(accuracies) == 1


# Run files

CONFIGS = sorted((ROOT / "configs" / "vision").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_run_files(path: Path) -> None:
    from hf_diloco.apps.common.arguments import check_training

    run = read_run_file(VisionRun, path)
    run.check()
    check_training(run.training)
    assert run.gossip.num_nodes > 1
    assert kind_of(path) is VisionRun


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"quickstart", "fashion_mnist_ring8", "imagenet_resnet50"}


def test_the_learning_rate_grows_with_the_batch(tmp_path: Path) -> None:
    run = run_of(tmp_path, "schedule.lr_for_batch=96", "training.max_steps=2", "training.lr_scheduler_type=constant")
    assert simulate(run) == 0
    state = json.loads((run.folder / "island-0" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["max_steps"] == 2
    optimizer = torch.load(run.folder / "island-0" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.05 * 8 * 3 / 96)


def test_the_learning_rate_drops_at_steps(tmp_path: Path) -> None:
    settings = ["schedule.drop_at=[4, 6]", "schedule.drop_by=0.5", "training.warmup_steps=2"]
    run = run_of(tmp_path, *settings, "training.logging_steps=1")
    assert simulate(run) == 0
    rates = [event["learning_rate"] for event in events(run, 0, "train")]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125])
    with pytest.raises(ConfigError, match="leave one out"):
        run_of(tmp_path, "schedule.drop_at=[4]", "training.lr_scheduler_type=cosine")


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("deepspeed={zero_optimization: {stage: 2}}", "set deepspeed to null", id="deepspeed"),
        ("training.fp16=true", "bf16"),
        ("training.optim=adamw_torch", "nodes step with gossip.method"),
        ("gossip.options={weight_decay: 0.1}", "set it in TrainingArguments"),
        ("schedule.drop_by=0.5", "drop_by has no effect without drop_at"),
        ("gossip.rendezvous=s3://bucket/run", "too slow"),
        ("gossip.node=7", "numbered from 0 to 2"),
        ("gossip.momentum=1", "less than 1"),
        ("gossip.methods=dsgd", "did you mean method"),
        ("data.source=idx", "path is missing"),
        ("gossip.options={momentum: 0.5}", "momentum is a setting of its own: write momentum: 0.5 beside options"),
        ("gossip.options={slowmo: 1}", "slowmo is a setting of its own"),
        ("gossip.options={lr: 1}", r"lr has no effect here: .*training\.learning_rate"),
    ],
)
def test_wrong_settings_are_refused_when_read(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gossip.method=decentlamb"], "did you mean decentlam"),
        (["gossip.topology=rings"], "did you mean ring"),
        (["gossip.method=dsgd", "gossip.momentum=0.9"], "null leaves out what a run file sets"),
        (["gossip.options={omega: 1}"], "options.omega: .* no such setting"),
        (["gossip.options={params: 1}"], "options.params: .* no such setting"),
        (["gossip.method=momentum-consensus", "gossip.options={omega: 2}"], "options.omega=2: give a share"),
        (["gossip.topology=exponential", "gossip.num_nodes=8"], "qg-dmsgd|QG-DmSGD"),
        (["gossip.topology=hypercube"], "3"),
    ],
)
def test_wrong_methods_are_refused_before_anything_starts(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, *overrides).check()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.gradient_checkpointing=true", "ResNetForImageClassification cannot compute activations again"),
        ("training.neftune_noise_alpha=5", "ResNetForImageClassification has no embeddings of its input"),
    ],
)
def test_what_the_model_cannot_do(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(run_of(tmp_path, override))


def test_too_few_examples_for_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smallest share has 80 examples, fewer than the 100"):
        simulate(run_of(tmp_path, "training.per_device_train_batch_size=100"))


def test_several_nodes_need_a_place() -> None:
    with pytest.raises(ConfigError, match="3 nodes need a place to meet"):
        GossipConfig(num_nodes=3)


def test_other_weights_at_the_beginning_are_refused(tmp_path: Path) -> None:
    def change(node: int, callback: GossipCallback, model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(float(node))

    with pytest.raises(FingerprintError, match="initial weights"):
        train_two(tmp_path, change)


def test_an_optimizer_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="make_optimizer"):
        train_two(tmp_path, lambda *_: None, gives_optimizer=False)


def test_nodes_that_save_at_other_steps_are_refused(tmp_path: Path) -> None:
    """With a payload: after it has saved, each is exact once."""
    with pytest.raises(FingerprintError, match="when checkpoints are saved"):
        train_two(tmp_path, lambda *_: None, payload="int8", save_steps=[1, 2])
    for strategy in ("best", "epoch"):
        with pytest.raises(ConfigError, match=f"save_strategy={strategy} with payload=int8"):
            train_two(tmp_path, lambda *_: None, payload="int8", save_strategy=strategy, metric_for_best_model="loss")
    train_two(tmp_path, lambda *_: None, payload="fp32", save_steps=[1, 2])


def test_the_last_checkpoint_must_not_go_early(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_total_limit=1"):
        train_two(tmp_path, lambda *_: None, save_total_limit=1)


def train_two(
    folder: Path,
    change: Callable[..., None],
    gives_optimizer: bool = True,
    method: str = "decentlam",
    payload: Any = "fp32",
    save_steps: Sequence[int] = (500, 500),
    **arguments: Any,
) -> list[Linear]:
    """Two nodes as a user's own script would have them; returns their models, raises what a node met first."""
    from transformers import Trainer, TrainingArguments

    topology = make_topology("ring", 2)
    graph, turns = MemoryGraph(topology), Turns()

    def train(number: int) -> Linear:
        node = NodeNeighbours(with_payload(graph.node(number), payload), topology, number, IslandGroup(), turns)
        try:
            with turns.mine():
                torch.manual_seed(0)
                model = Linear()
                args = TrainingArguments(
                    str(folder / str(number)),
                    max_steps=3,
                    use_cpu=True,
                    report_to="none",
                    save_steps=save_steps[number],
                    **{"max_grad_norm": 0, **arguments},
                )
                meeting = {"num_nodes": 2, "node": number, "rendezvous": "tcp://127.0.0.1:1"}
                config = GossipConfig(method=method, payload=payload, **meeting)
                callback = GossipCallback(config, neighbours=node)
                change(number, callback, model)
                optimizer = callback.make_optimizer(model, args) if gives_optimizer else None
                data = [{"x": torch.full((4,), float(i + number)), "y": torch.ones(1)} for i in range(8)]
                Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback]).train()
                return model
        except BaseException:
            node.close()
            raise

    return run_islands(2, train)


def test_a_users_own_trainer(tmp_path: Path) -> None:
    """Two nodes of DSGD that average equally are one that takes the mean gradient."""
    settings: dict[str, Any] = {
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
    }
    first, second = train_two(tmp_path, lambda *_: None, method="dsgd", **settings)
    torch.manual_seed(0)
    expected = Linear()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    inputs = [torch.stack([torch.full((4,), float(i + node)) for i in range(8)]) for node in (0, 1)]
    for _ in range(3):
        optimizer.zero_grad()
        sum(expected(x, torch.ones(8, 1))["loss"] / 2 for x in inputs).backward()
        optimizer.step()
    for model in (first, second):
        torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_those_of_a_larger_batch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.01, "lr_scheduler_type": "constant"}
    at_once = train_two(tmp_path, lambda *_: None, per_device_train_batch_size=8, **settings)
    in_parts = train_two(
        tmp_path, lambda *_: None, per_device_train_batch_size=4, gradient_accumulation_steps=2, **settings
    )
    for one, other in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(one.layer.weight, other.layer.weight, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """With a norm that all gradients exceed, only their direction counts: DSGD's step is then at most the rate."""
    settings: dict[str, Any] = {
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
    }
    torch.manual_seed(0)
    initial = Linear().layer.weight.detach()
    free = train_two(tmp_path, lambda *_: None, method="dsgd", **settings)[0].layer.weight.detach()
    clipped = train_two(tmp_path, lambda *_: None, method="dsgd", max_grad_norm=0.1, **settings)[
        0
    ].layer.weight.detach()
    assert float((clipped - initial).norm()) <= 3 * 0.01 * 0.1 + 1e-6
    assert float((free - initial).norm()) > 10 * float((clipped - initial).norm())


# Checkpoints


def test_another_nodes_checkpoint_is_refused(finished: VisionRun, tmp_path: Path) -> None:
    import shutil

    run = run_of(tmp_path, "gossip.method=dmsgd")
    shutil.copytree(finished.folder, run.folder)
    for node in range(3):
        shutil.rmtree(run.folder / f"island-{node}" / "checkpoint-8")
    with pytest.raises(CheckpointError, match="method decentlam, but it is dmsgd now"):
        simulate(run)
