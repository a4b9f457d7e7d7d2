"""A `GossipCallback` that trains more than once in one process."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.threads import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from tests.islands import run_islands
from tests.small_model import Linear

NUM_STEPS, LR = 3, 0.01


def data_of(node: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((4,), float(i + node)), "y": torch.ones(1)} for i in range(8)]


def train_twice(
    folder: Path, method: str, num_nodes: int = 2, num_steps: int = NUM_STEPS, stops_at_first: bool = False
) -> list[Linear]:
    """Nodes of a ring, each a thread; returns their models."""
    topology = make_topology("ring", num_nodes)
    graph, turns, building = MemoryGraph(topology), Turns(), threading.Lock()

    def train(number: int) -> Linear:
        node = NodeNeighbours(graph.node(number), topology, number, IslandGroup(), turns)
        config = GossipConfig(method=method, num_nodes=num_nodes, node=number, rendezvous="tcp://127.0.0.1:1")
        arguments: dict[str, Any] = {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0}
        try:
            with turns.mine():
                with building:
                    torch.manual_seed(0)
                    model = Linear()
                args = TrainingArguments(
                    str(folder / str(number)), max_steps=num_steps, use_cpu=True, report_to="none", **arguments
                )
                callback = GossipCallback(config, neighbours=node)
                optimizer = callback.make_optimizer(model, args)
                trainer = Trainer(
                    model, args, train_dataset=data_of(number), optimizers=(optimizer, None), callbacks=[callback]
                )
                if stops_at_first and number == 0:
                    callback.stop()
                trainer.train()
                assert callback.stopped == stops_at_first
                trainer.train()
                assert (trainer.state.global_step, optimizer.num_steps) == (num_steps, num_steps)
                assert not callback.stopped
        except BaseException:
            node.close()
            raise
        return model

    return run_islands(num_nodes, train)


@pytest.mark.parametrize(("method", "momentum"), [pytest.param("dsgd", 0.0, marks=pytest.mark.slow), ("pmsgd", 0.9)])
def test_a_further_training_goes_on_from_the_parameters_and_without_momentum(
    method: str, momentum: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes that average equally are one that takes the mean gradient, here twice."""
    models = train_twice(tmp_path, method)
    assert caplog.text.count("this training starts from scratch, but") == 2, "beside the checkpoints of the first"
    torch.manual_seed(0)
    expected = Linear()
    inputs = [torch.stack([example["x"] for example in data_of(node)]) for node in (0, 1)]
    for _ in range(2):
        optimizer = torch.optim.SGD(expected.parameters(), lr=LR, momentum=momentum)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            sum(expected(x, torch.ones(8, 1))["loss"] / 2 for x in inputs).backward()
            optimizer.step()
    for model in models:
        torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "method", ["decentlam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("d2", "swarm-sgd"))]
)
def test_nodes_that_differ_after_a_training_train_on(method: str, tmp_path: Path) -> None:
    models = train_twice(tmp_path, method, num_nodes=4)
    assert len({tuple(model.layer.weight.flatten().tolist()) for model in models}) > 1


def test_a_training_that_was_asked_to_end_does_not_end_the_next(tmp_path: Path) -> None:
    train_twice(tmp_path, "dsgd", num_steps=12, stops_at_first=True)


class EndsOnce(TrainerCallback):
    """Raises an error of the user's own, or has two Ctrl-C come, the first time that an event comes at a step."""

    def __init__(self, event: str, step: int, error: type[BaseException] = ValueError) -> None:
        self._is_due = True

        def end(args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
            if not self._is_due or state.global_step != step:
                return
            self._is_due = False
            if error is not KeyboardInterrupt:
                raise error
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        setattr(self, event, end)


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_step_begin", ValueError), ("on_step_begin", KeyboardInterrupt), ("on_prediction_step", ValueError)],
)
@pytest.mark.parametrize("options", [{}, {"combine_first": True}], ids=["", "ahead"])
def test_a_training_goes_on_after_one_that_ended_in_an_error(
    event: str, error: type[BaseException], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, step, num_steps = Linear(), 2, 4
    args = TrainingArguments(
        str(tmp_path),
        max_steps=num_steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        eval_strategy="steps",
        eval_steps=2,
        use_cpu=True,
        report_to="none",
    )
    callback = GossipCallback(method="dsgd", options=options, num_nodes=1)
    trainer = make_trainer(model, args, callback, EndsOnce(event, step, error))
    with pytest.raises(error):
        trainer.train()
    trainer.train()
    assert (trainer.state.global_step, callback.stopped) == (num_steps, False)
    expected = train_plainly(step + num_steps)
    torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)


class Ends(TrainerCallback):
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = state.global_step == 1


def test_a_training_that_another_callback_ends_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neighbours know nothing of it, and wait."""
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    make_trainer(Linear(), args, GossipCallback(method="dsgd", num_nodes=1), Ends()).train()
    assert "training ended after 1 of 2 steps: another callback ended it, or the data did, on this node" in caplog.text


@pytest.mark.parametrize("fact", ["max_steps", "payload", "step"])
def test_a_fact_given_does_not_take_the_place_of_a_real_one(fact: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    trainer = make_trainer(Linear(), args, GossipCallback(method="dsgd", num_nodes=1, fingerprint={fact: 99}))
    with pytest.raises(ConfigError, match=rf"fingerprint\['{fact}'\] is 99, but this process has"):
        trainer.train()


def test_a_mean_that_an_error_left_in_the_model_spares_a_loaded_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Linear()
    args = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        use_cpu=True,
        report_to="none",
    )
    callback = GossipCallback(method="dsgd", num_nodes=1)
    trainer = make_trainer(model, args, callback, EndsOnce("on_prediction_step", 3))
    with pytest.raises(ValueError):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(model.layer.weight, train_plainly(4).layer.weight, rtol=1e-5, atol=1e-6)


def train_plainly(num_steps: int) -> Linear:
    torch.manual_seed(0)
    model, inputs = Linear(), torch.stack([example["x"] for example in data_of(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs, torch.ones(8, 1))["loss"].backward()
        optimizer.step()
    return model


def make_trainer(
    model: Linear, args: TrainingArguments, callback: GossipCallback, *others: TrainerCallback
) -> Trainer:
    return Trainer(
        model,
        args,
        train_dataset=data_of(0),
        eval_dataset=data_of(0),
        optimizers=(callback.make_optimizer(model, args), None),
        callbacks=[callback, *others],
    )
