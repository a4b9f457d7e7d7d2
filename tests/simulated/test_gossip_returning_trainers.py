"""Nodes that return while the others train on, each with a Trainer, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.topology import make_topology
from tests.clocks import LONG
from tests.gossip_meshes import join
from tests.islands import run_islands
from tests.small_model import Linear
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread", "compiled_averages")

NUM_NODES, LEAVER = 3, 2


class AtSteps(TrainerCallback):
    """Calls `act` with the number of steps so far before each step, and `begin` when training begins."""

    def __init__(self, act: Callable[[int], None], begin: Callable[[int], None] = lambda step: None) -> None:
        self._act, self._begin = act, begin

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin(state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._act(state.global_step)


class Run:
    """A node leaves it in an error, and returns; meanwhile the others are slow.

    Attributes:
        begun: the step at which each training of the node that leaves began.
    """

    def __init__(self, folder: Path, method: str, max_steps: int, leaves_at: int, others_wait_at: int) -> None:
        self.begun: list[int] = []
        self.folders = [folder / str(number) for number in range(NUM_NODES)]
        self._method = method
        self._args = [  # before any training: each that is made resets Accelerate's state
            TrainingArguments(
                str(folder),
                max_steps=max_steps,
                save_steps=leaves_at,
                per_device_train_batch_size=4,
                learning_rate=0.001,
                use_cpu=True,
                disable_tqdm=True,
                report_to="none",
            )
            for folder in self.folders
        ]
        self._leaves_at, self._others_wait_at = leaves_at, others_wait_at
        self._store, self._topology = KeptStore(), make_topology("ring", NUM_NODES)
        self._has_left, self._is_back = threading.Event(), threading.Event()
        self._building = threading.Lock()

    @contextmanager
    def trained(self, number: int, stops: bool = False) -> Iterator[tuple[GossipCallback, Trainer]]:
        """Yields them after the training, of which the node that has returned is asked to end all if `stops`."""
        if number == LEAVER:
            _, trainer, _ = self._start(number)
            with pytest.raises(ValueError, match="leaves"):
                trainer.train()
            self._has_left.set()
        callback, trainer, checkpoint = self._start(number)
        if stops and number == LEAVER:
            callback.stop()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        yield callback, trainer
        callback.node.share("end", {})
        callback.node.close()

    def _start(self, number: int) -> tuple[GossipCallback, Trainer, Path | None]:
        mesh = join(self._store, self._topology, number)
        node = NodeNeighbours(mesh, self._topology, number, IslandGroup())
        config = GossipConfig(method=self._method, num_nodes=NUM_NODES, node=number, rendezvous="tcp://127.0.0.1:1")
        callback = GossipCallback(config, neighbours=node)
        args = self._args[number]
        with self._building:
            torch.manual_seed(0)
            model = Linear()
        optimizer = callback.make_optimizer(model, args)
        acts = AtSteps(self._leave, self._begin) if number == LEAVER else AtSteps(self._wait)
        checkpoint = callback.common_checkpoint(self.folders[number])
        data = [{"x": torch.full((4,), float(i + number) / 20), "y": torch.ones(1)} for i in range(8)]
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback, acts])
        return callback, trainer, checkpoint

    def _begin(self, step: int) -> None:
        self.begun.append(step)
        if len(self.begun) == 2:
            self._is_back.set()

    def _leave(self, step: int) -> None:
        if step == self._leaves_at and not self._has_left.is_set():
            raise ValueError("leaves")

    def _wait(self, step: int) -> None:
        if step == self._others_wait_at:
            assert self._has_left.wait(LONG)
        self._is_back.wait(1.0)


def test_a_node_that_was_ahead_where_nobody_waits_goes_on_from_its_own_step(tmp_path: Path) -> None:
    """At the others' step it would have no data for its last ones, and end before them."""
    run = Run(tmp_path, "swarm-sgd", max_steps=66, leaves_at=60, others_wait_at=2)

    def live(number: int) -> int:
        with run.trained(number) as (_, trainer):
            return trainer.state.global_step

    assert run_islands(NUM_NODES, live) == [66] * NUM_NODES
    assert run.begun == [0, 60]


def test_who_has_returned_looks_for_a_common_checkpoint_with_the_others(tmp_path: Path) -> None:
    """Before a second training, as before the first; it was not there when they did so before the first."""
    run = Run(tmp_path, "dmsgd", max_steps=1000, leaves_at=3, others_wait_at=1000)

    def live(number: int) -> str | None:
        with run.trained(number, stops=True) as (callback, _):
            assert callback.stopped
            found = callback.common_checkpoint(run.folders[number])
        return found.name if found else None

    first, *others = run_islands(NUM_NODES, live)
    assert first is not None
    assert others == [first] * 2
