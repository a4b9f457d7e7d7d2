"""A node that is left without an average of all nodes, as node 0, which keeps the rendezvous, is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import IslandLostError, UnsupportedError
from hf_diloco.gossip.mesh.average import GroupAverage
from hf_diloco.gossip.neighbours import MemoryGraph, MemoryNeighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from hf_diloco.transport.base import Traffic
from tests.small_model import Linear


class NoRendezvous(MemoryNeighbours):
    """A node that cannot average with all."""

    averaged_over = (0, 1)  # the last time that it could
    num_tries = 0

    def average(self, vector: torch.Tensor) -> Traffic:
        self.num_tries += 1
        raise IslandLostError("the rendezvous does not answer")


class InAnotherProcess(MemoryNeighbours):
    """A node that averages as over a mesh."""

    def check_average(self, vector: torch.Tensor) -> None:
        GroupAverage.check(vector)


@pytest.mark.parametrize("settings", [{"method": "pmsgd"}, {"method": "dsgd", "slowmo": {"sync_every": 2}}])
def test_what_nodes_cannot_average_is_refused_before_the_first_step(settings: dict[str, Any], tmp_path: Path) -> None:
    topology = make_topology("full", 1)
    node = NodeNeighbours(InAnotherProcess(MemoryGraph(topology), 0), topology, 0, IslandGroup())
    callback = GossipCallback(**settings, neighbours=node)
    with pytest.raises(UnsupportedError, match="nodes in several processes average float32, not float64"):
        callback.make_optimizer(Linear().double(), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))


def test_it_evaluates_its_own_weights_on_its_own_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    topology = make_topology("full", 1)
    neighbours = NoRendezvous(MemoryGraph(topology), 0)
    node = NodeNeighbours(neighbours, topology, 0, IslandGroup())
    callback = GossipCallback(method="dsgd", num_eval_examples=8, evaluates_at_end=True, neighbours=node)
    model = Linear()
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", label_names=["y"])
    data = [{"x": torch.full((4,), float(i)), "y": torch.ones(1)} for i in range(8)]
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(callback.make_optimizer(model, args), None),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.nodes_in_mean == (0,)
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    with torch.no_grad():
        batch = {name: torch.stack([example[name] for example in data]) for name in ("x", "y")}
        assert found == [pytest.approx(float(model(**batch)["loss"]))]
    assert "this node's own weights take its place" in caplog.text
    assert "they are of this node's part of the data" in caplog.text
    assert neighbours.num_tries == 1, "the average of the metrics would go with that of the others' next evaluation"
