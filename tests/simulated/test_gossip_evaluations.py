"""Evaluations by a `GossipCallback`, and what nodes are refused that would wait for each other in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hf_diloco import GossipCallback
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import ConfigError, FingerprintError, RendezvousError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.threads import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts, compare_facts
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.topology import PeriodicTopology, make_topology
from hf_diloco.report.progress import read_progress
from hf_diloco.trainer.gossip_start import make_fingerprint
from hf_diloco.trainer.gossip_steps import check_eval_sizes, gossip_facts
from hf_diloco.trainer.views import MeanView
from hf_diloco.transport.base import Traffic
from tests.islands import run_islands
from tests.records import events
from tests.small_model import Linear

NUM_NODES, SIZES = 4, (4, 12, 8, 4)  # examples that each node evaluates


def data(low: float, size: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((4,), low + i), "y": torch.ones(1)} for i in range(size)]


def trainer_of(
    folder: Path, callback: GossipCallback, model: Linear, low: float, evaluation: Any = None, **arguments: Any
) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=4, use_cpu=True, report_to="none", label_names=["y"], learning_rate=0.001, **arguments
    )
    return Trainer(
        model,
        args,
        train_dataset=data(low),
        eval_dataset=evaluation,
        optimizers=(callback.make_optimizer(model, args), None),
        callbacks=[callback],
    )


def train_nodes(
    folder_of: Callable[[int], Path],
    evaluation_of: Callable[[int], Any],
    sizes: Sequence[int | dict[str, int] | None] = (None,) * NUM_NODES,
    when: dict[str, Any] | None = None,
    kind: type[Trainer] = Trainer,
    other: TrainerCallback | None = None,
    **settings: Any,
) -> list[Trainer]:
    """Nodes of a ring, each a thread; those that have something to evaluate do so, by default at every second step."""
    when = {"eval_strategy": "steps", "eval_steps": 2} if when is None else when
    topology = make_topology("ring", NUM_NODES)
    graph, turns, building = MemoryGraph(topology), Turns(), threading.Lock()

    def train(number: int) -> Trainer:
        node = NodeNeighbours(graph.node(number), topology, number, IslandGroup(), turns)
        config = GossipConfig(
            method="dmsgd", num_nodes=NUM_NODES, node=number, rendezvous="tcp://127.0.0.1:1", **settings
        )
        evaluation = evaluation_of(number)
        try:
            with turns.mine():
                with building:
                    torch.manual_seed(0)
                    model = Linear()
                callback = GossipCallback(config, neighbours=node, num_eval_examples=sizes[number])
                arguments = when if evaluation else {}
                trainer = trainer_of(folder_of(number), callback, model, float(number), evaluation, **arguments)
                trainer.__class__ = kind
                if other is not None:
                    trainer.add_callback(other)
                trainer.train()
        except BaseException:
            node.close()
            raise
        return trainer

    return run_islands(NUM_NODES, train)


def weight_of(trainer: Trainer) -> torch.Tensor:
    assert isinstance(trainer.model, Linear)
    return trainer.model.layer.weight.detach()


def test_the_launcher_of_a_script_shows_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = tmp_path / "launched"
    launched.mkdir()
    monkeypatch.setenv(ENV_FOLDER, str(launched))
    callback = GossipCallback(method="dsgd", num_nodes=1)
    trainer_of(tmp_path / "own", callback, Linear(), 0.0).train()
    shown = read_progress(launched / "progress.json")
    assert (shown.state, shown.noun, shown.unit) == ("done", "node", "examples")
    assert shown.tokens_per_second


def test_each_of_several_data_sets_is_evaluated_with_the_mean_and_recorded(tmp_path: Path) -> None:
    sizes = [{"a": size, "b": 16 - size} for size in SIZES]

    def part(name: str, number: int) -> list[dict[str, torch.Tensor]]:
        return data({"a": 0.0, "b": 5.0}[name] + number, sizes[number][name])

    def both(number: int) -> dict[str, Any]:
        return {name: part(name, number) for name in "ab"}

    trainers = train_nodes(lambda number: tmp_path / str(number), both, sizes=sizes)
    of_b = [one["b"] for one in sizes]
    train_nodes(lambda number: tmp_path / "b" / str(number), lambda number: part("b", number), sizes=of_b)
    alone = [event["eval_loss"] for event in events(tmp_path / "b" / "0", "eval")]
    assert [event["eval_b_loss"] for event in events(tmp_path / "0", "eval")[1::2]] == alone
    first, *others = (events(tmp_path / str(number), "eval") for number in range(NUM_NODES))
    assert [event["step"] for event in first] == [2, 2, 4, 4]
    for place, name in enumerate("abab"):
        assert (first[place]["weights"], first[place]["consensus_distance"] > 0) == ("outer", True)
        for other in others:
            assert other[place][f"eval_{name}_loss"] == first[place][f"eval_{name}_loss"], "of all nodes' examples"
    logged = [entry["gossip/consensus_distance"] for entry in trainers[0].state.log_history if "eval_b_loss" in entry]
    assert logged == [event["consensus_distance"] for event in first[1::2]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (8, "give a number for each of a, b, by name"),
        ({"a": 8}, "give a number for each of a, b, by name"),
        ({"b": 8, "a": 8}, None),
    ],
)
def test_the_size_of_each_data_set_must_be_given(
    sizes: int | dict[str, int], message: str | None, tmp_path: Path
) -> None:
    callback = GossipCallback(method="dsgd", num_nodes=1, num_eval_examples=sizes)
    trainer = trainer_of(tmp_path, callback, Linear(), 0.0, {"a": data(0.0), "b": data(0.0)}, eval_on_start=True)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        trainer.train()


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_learning_rate_that_follows_evaluations_follows_those_of_all_nodes(schedule: str, tmp_path: Path) -> None:
    callback = GossipCallback(method="dsgd", num_nodes=1)
    chosen: dict[str, Any] = {"eval_strategy": "epoch", "lr_scheduler_type": schedule}
    trainer = trainer_of(tmp_path, callback, Linear(), 0.0, data(0.0), **chosen)
    trainer.train()  # a node alone has one rate
    with pytest.raises(ConfigError, match=r"follows evaluations \(\w+\), and each node would train at a rate of its"):
        check_eval_sizes(None, trainer, num_nodes=2)
    assert check_eval_sizes(8, trainer, num_nodes=2)


class MeasuresItsOwn(Trainer):
    """As one whose metrics are of the classes that its examples have."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, **kwargs)
        number = int(Path(str(self.args.output_dir)).name)
        assert output.metrics is not None
        output.metrics.update({f"eval_class_{number}": float(number)} if number else {})
        return output


def test_metrics_that_not_all_nodes_have_are_each_nodes_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_nodes(lambda number: tmp_path / str(number), lambda _: data(0.0), sizes=SIZES, kind=MeasuresItsOwn)
    for number in range(1, NUM_NODES):
        assert [event[f"eval_class_{number}"] for event in events(tmp_path / str(number), "eval")] == [number] * 2
    assert "nodes measure different things: this one's eval_loss are of its own data" in caplog.text


def test_statistics_that_are_not_finite_or_of_before_a_node_was_lost_are_no_part_of_the_mean() -> None:
    """One bad batch leaves those of batch normalisation so for good; a node that is back takes the others'."""
    topology = make_topology("ring", NUM_NODES)
    graph = MemoryGraph(topology)

    def look(number: int) -> list[float]:
        node, model = NodeNeighbours(graph.node(number), topology, number, IslandGroup()), torch.nn.BatchNorm1d(1)
        optimizer = make_optimizer("dsgd", model.parameters(), node, 0.1)
        view = MeanView(optimizer, node, model, averages_buffers=True, lacks_statistics=number == 1)
        statistic = model.running_mean
        assert statistic is not None
        statistic.fill_(torch.nan if number == 2 else number)
        values = []
        for _ in range(2):
            with view.shown():
                values.append(float(statistic))
            values.append(float(statistic))
        return values

    first, own, second, own_after = zip(*run_islands(NUM_NODES, look), strict=True)
    assert first == second == (1.5,) * NUM_NODES
    assert str(own) == str(own_after) == "(0.0, 1.5, nan, 3.0)"


def test_a_model_may_be_evaluated_before_it_is_trained(tmp_path: Path) -> None:
    callback = GossipCallback(method="dsgd", num_nodes=1)
    trainer = trainer_of(tmp_path, callback, Linear(), 0.0, data(0.0))
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train()
    assert trainer.state.global_step == 4
    assert events(tmp_path, "eval") == []


class Loses(TrainerCallback):
    """Somebody does not come to the mean of the last evaluation."""

    def __init__(self) -> None:
        self.news: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and "eval_loss" in kwargs["logs"]:
            self.news.append("the average of all nodes is over node 0 from now on, without node 1")


def test_what_the_last_evaluation_has_shown_of_the_others_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loses = Loses()
    monkeypatch.setattr(NodeNeighbours, "take_events", lambda _: [loses.news.pop() for _ in list(loses.news)])
    callback = GossipCallback(method="dsgd", num_nodes=1)
    trainer = trainer_of(tmp_path, callback, Linear(), 0.0, data(0.0), eval_strategy="steps", eval_steps=2)
    trainer.add_callback(loses)
    trainer.train()
    assert [event["step"] for event in events(tmp_path, "neighbour")] == [4]


class Quiet(Trainer):
    """Evaluates in a way of its own, and calls no callback."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        return {"eval_loss": 1.0}


@pytest.mark.parametrize(("kind", "evaluation"), [(Quiet, data(0.0)), (Trainer, {})], ids=["quiet", "nothing"])
def test_training_goes_on_from_its_own_weights_after_an_evaluation_that_calls_no_callback(
    kind: type[Trainer], evaluation: Any, tmp_path: Path
) -> None:
    def train(name: str, kind: type[Trainer], evaluation: Any, when: dict[str, Any] | None) -> list[torch.Tensor]:
        trainers = train_nodes(
            lambda number: tmp_path / name / str(number), lambda _: evaluation, when=when, kind=kind
        )
        return list(map(weight_of, trainers))

    with_evaluations, without = train("a", kind, evaluation, None), train("b", Trainer, data(0.0), {})
    assert all(map(torch.equal, with_evaluations, without))


class Asks(TrainerCallback):
    """Has the Trainer evaluate after step 2, and not after step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = state.global_step == 2


@pytest.mark.parametrize("when", [{}, {"eval_strategy": "steps", "eval_steps": 4}], ids=["never", "at 4"])
def test_an_evaluation_that_another_callback_asks_for_is_of_the_mean(when: dict[str, Any], tmp_path: Path) -> None:
    trainers = train_nodes(lambda number: tmp_path / str(number), lambda _: data(0.0), when=when, other=Asks())
    for number in range(NUM_NODES):
        evaluated = [(event["step"], event["weights"]) for event in events(tmp_path / str(number), "eval")]
        assert evaluated == [(2, "outer")]
    assert not torch.equal(weight_of(trainers[0]), weight_of(trainers[1])), "each goes on from its own"


def test_nodes_that_do_not_all_evaluate_their_mean_are_refused(tmp_path: Path) -> None:
    """Who evaluates would wait for the others, and they for it."""
    with pytest.raises(FingerprintError, match=r"when nodes evaluate .*node 0: every 2 steps, after 0, node 1: never"):
        train_nodes(lambda number: tmp_path / str(number), lambda number: None if number else data(0.0))


def test_nodes_of_which_some_evaluate_before_they_train_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match=r"evaluate .*node 0: never, and at the start, node 1: never"):
        train_nodes(
            lambda number: tmp_path / str(number),
            lambda number: None if number else data(0.0),
            when={"eval_on_start": True},
        )


def test_nodes_of_which_some_weigh_what_they_evaluate_are_refused(tmp_path: Path) -> None:
    """Who weighs its metrics would wait for the others' metrics, and they for its weights."""
    with pytest.raises(FingerprintError, match=r"num_eval_examples is given differs \(node 0: True, node 1: False"):
        train_nodes(lambda number: tmp_path / str(number), lambda _: data(0.0), sizes=(4, None, None, None))


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"payload": "int8"}, {"payload": "int4"}),
        ({"slowmo": None}, {"slowmo": {}}),
        ({"slowmo": {}}, {"slowmo": {"sync_every": 12}}),
        ({"buffers": "average"}, {"buffers": "local"}),
        ({"eval_weights": "average"}, {"eval_weights": "local"}),
        ({"topology_seed": 0}, {"topology_seed": 1}),  # of which the first step is equal
    ],
)
def test_nodes_with_other_settings_are_refused(settings: dict[str, Any], others: dict[str, Any]) -> None:
    """They would exchange vectors of other sizes, or with others than who exchanges with them."""
    facts = []
    for given in (settings, others):
        config = GossipConfig(topology="random-matching", **given)
        facts.append(make_fingerprint(config, make_topology(config.topology, 4, config.topology_seed), Linear()))
    (name,) = settings
    with pytest.raises(FingerprintError, match=rf"{name} differs \(node 0: "):
        compare_facts(facts, "node")


def test_graphs_that_differ_after_their_first_step_are_told_apart() -> None:
    one, other = np.eye(2), np.full((2, 2), 0.5)
    graphs = [PeriodicTopology("mine", np.stack(weights)) for weights in ((one, other), (one, other, other))]
    facts = [make_fingerprint(GossipConfig(), graph, Linear()) for graph in graphs]
    with pytest.raises(FingerprintError, match="topology differs"):
        compare_facts(facts, "node")


class Back(MemoryNeighbours):
    """A node that returns to others, who do not come to an average meanwhile."""

    is_returning = True

    def enter(self, x: torch.Tensor) -> int:
        return 2

    def average(self, vector: torch.Tensor) -> Traffic:
        raise AssertionError("the others wait in a step")


def test_a_node_that_returns_does_not_evaluate_at_the_start(tmp_path: Path) -> None:
    topology = make_topology("full", 1)
    node = NodeNeighbours(Back(MemoryGraph(topology), 0), topology, 0, IslandGroup())
    callback = GossipCallback(method="dsgd", num_eval_examples=8, neighbours=node)
    trainer = trainer_of(tmp_path, callback, Linear(), 0.0, data(0.0), eval_on_start=True)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.args.eval_on_start


def test_the_end_of_an_epoch_is_at_one_step_on_all_nodes(tmp_path: Path) -> None:
    """Shares that are not equally large make more or fewer batches."""

    def facts(size: int) -> Facts:
        args = TrainingArguments(str(tmp_path), eval_strategy="epoch", use_cpu=True, report_to="none")
        loader = Trainer(Linear(), args, train_dataset=data(0.0, size), eval_dataset=data(0.0)).get_train_dataloader()
        return gossip_facts("fp32", True, args, TrainerState(), loader)

    assert facts(24) == facts(17)
    assert facts(25) != facts(24)


def test_one_node_alone_may_evaluate_its_own_weights(tmp_path: Path) -> None:
    train_nodes(
        lambda number: tmp_path / str(number), lambda number: None if number else data(0.0), eval_weights="local"
    )
    assert [event["weights"] for event in events(tmp_path / "0", "eval")] == ["inner", "inner"]


def test_nodes_that_share_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"nodes 1 and 3 both write to .*/1 on .*GossipConfig\(\).node"):
        train_nodes(lambda number: tmp_path / str(min(number, 4 - number)), lambda number: None)
