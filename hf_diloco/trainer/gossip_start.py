"""How a node begins to train: from which checkpoint or whose mean, and that all nodes train the same thing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import TrainerState

from hf_diloco.errors import FingerprintError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.resumption import Resumption, choose_common, choose_own, choose_step, take_mean
from hf_diloco.membership.facts import MAX_STEPS, Facts, compare_facts, differ, remedy_for
from hf_diloco.methods.gossip import GossipOptimizer
from hf_diloco.methods.topology import Topology
from hf_diloco.utils.lr_schedule import move_schedule
from hf_diloco.utils.own_files import identify, is_own

logger = logging.getLogger("hf_diloco")


class Beginning:
    """How one node begins each of its trainings.

    Args:
        config: the settings.
        topology: the graph that they name.
        facts: further facts that must be equal on all nodes.
        node: this node's end of the graph.
        optimizer: the method's.
    """

    def __init__(
        self, config: GossipConfig, topology: Topology, facts: Facts, node: NodeNeighbours, optimizer: GossipOptimizer
    ) -> None:
        self._config = config
        self._topology = topology
        self._facts = facts
        self._node = node
        self._optimizer = optimizer
        self._resumption: Resumption | None = None
        self._news = ""
        self._num_trainings = 0  # before this one

    def choose_checkpoint(self, mine: Mapping[int, Path]) -> Path | None:
        """See `GossipCallback.common_checkpoint`.

        Args:
            mine: this node's whole checkpoints, by step.
        """
        if self._node.is_returning:  # the others go on meanwhile: it gives the position in the data, and such
            return mine[max(mine)] if mine else None
        records = self._node.share("checkpoints", {"steps": sorted(mine)})
        steps = [[int(step) for step in record["steps"]] for record in records]
        self._resumption = self._choose(steps)
        if self._resumption is None:
            return None
        if self._resumption.late:
            self._news = self._resumption.describe(steps)
        if not self._optimizer.is_in_step:
            return mine[max(mine)] if mine else None
        before = [step for step in mine if step <= self._resumption.step]
        return mine[max(before)] if before else None

    @property
    def entry_step(self) -> int | None:
        """The step at which this node enters with the others' mean; None if it need not."""
        resumption = self._resumption
        return resumption.step if resumption and self._config.node in resumption.late else None

    def begin(self, model: torch.nn.Module, state: TrainerState, scheduler: Any, saves: str) -> str:
        """Makes sure that all nodes train the same thing, from the same beginning. Collective over the nodes.

        A further training that resumes from no checkpoint goes on from the parameters that each node has.

        Args:
            model: whose parameters the optimizer has.
            state: the Trainer's; a node that enters with the others' mean goes on from their step.
            scheduler: of the learning rate, moved to that step.
            saves: when checkpoints are saved, in words.

        Returns:
            What is to be recorded about nodes that enter; empty: nothing.

        Raises:
            FingerprintError: the nodes train different things, or from different steps.
        """
        if self._node.is_returning:
            self._return(model, state, scheduler, saves)
        else:
            self._compare(model, state, saves)
            self._let_in_late(model, state, scheduler)
        self._num_trainings += 1
        news, self._news, self._resumption = self._news, "", None
        return news

    def _choose(self, steps: list[list[int]]) -> Resumption | None:
        if self._optimizer.num_vectors == 0:
            return choose_common(steps, self._optimizer.name)
        return choose_step(steps) if self._optimizer.is_in_step else choose_own(steps)

    def _return(self, model: torch.nn.Module, state: TrainerState, scheduler: Any, saves: str) -> None:
        """Takes part again in a run that went on: from the neighbours' mean, at their step, with no momentum."""
        self._optimizer.check_entry()
        for record in self._node.recall("join"):
            theirs = record["facts"]
            for name, value in {MAX_STEPS: state.max_steps, **self._fingerprint(model, saves)}.items():
                if differ(name, theirs.get(name), value):
                    raise FingerprintError(
                        f"the run that this node returns to trains something else: {name} is {theirs.get(name)} "
                        f"there, and {value} here; {remedy_for(name)}"
                    )
        self._begin_at(self._node.enter, state, scheduler)
        logger.warning(
            "node %d is back: it goes on from the mean of its neighbours, at step %d",
            self._config.node,
            state.global_step,
        )

    def _let_in_late(self, model: torch.nn.Module, state: TrainerState, scheduler: Any) -> None:
        """Gives nodes without a checkpoint of the step that all go on from the mean of those that have one."""
        resumption = self._resumption
        if resumption is None or not resumption.late:
            return
        logger.warning("%s", self._news)
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]

        def enter(x: torch.Tensor) -> int:
            take_mean(self._node, [x, *buffers], resumption)
            return resumption.step

        if self.entry_step is None:
            enter(self._optimizer.flat_parameters)
        else:
            self._begin_at(enter, state, scheduler)
        # Holders' evaluations of this step are of another mean, and late nodes have none: all evaluate again.
        state.log_history = [
            entry for entry in state.log_history if "eval_loss" not in entry or entry["step"] != state.global_step
        ]

    def _begin_at(self, enter: Callable[[torch.Tensor], int], state: TrainerState, scheduler: Any) -> None:
        """See `GossipOptimizer.begin_at`; Trainer and schedule go on from that step."""
        state.global_step = self._optimizer.begin_at(enter)
        if not move_schedule(scheduler, state.global_step):
            logger.warning("%s cannot be moved on: the learning rate begins anew", type(scheduler).__name__)

    def _compare(self, model: torch.nn.Module, state: TrainerState, saves: str) -> None:
        """Raises `FingerprintError` unless all nodes train the same thing from the same point."""
        facts = {MAX_STEPS: state.max_steps, **self._fingerprint(model, saves)}
        step = self.entry_step or state.global_step
        if self._optimizer.is_in_step:
            facts["step"] = step
        if not step and self._num_trainings:
            self._optimizer.begin_training()
        elif not step:
            facts["initial weights (set the same seed)"] = digest_of(model)
        compare_facts([record["facts"] for record in self._node.share("join", {"facts": facts})], "node")

    def _fingerprint(self, model: torch.nn.Module, saves: str) -> Facts:
        facts = {**make_fingerprint(self._config, self._topology, model), **self._facts}
        if self._config.payload != "fp32":  # all rekey at the same steps
            facts["when checkpoints are saved"] = saves
        return facts


def make_fingerprint(config: GossipConfig, topology: Topology, model: torch.nn.Module) -> Facts:
    """What must be equal at any step, by the name that an error message gives it."""
    sizes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    return {
        "method": identify(config.method),
        "settings of the method": str(sorted(config.method_settings.items())),
        "slowmo": str(config.slowmo or "none"),
        "payload": config.payload,
        "topology": _identify_graph(config, topology),
        "model (names and sizes)": xxhash.xxh3_64_hexdigest("\n".join(sizes).encode()),
    }


def _identify_graph(config: GossipConfig, topology: Topology) -> str:
    if is_own(config.topology):
        return identify(config.topology)  # the weights of a first step do not tell those of later ones
    return xxhash.xxh3_64_hexdigest(topology.weights(0).tobytes())


def digest_of(model: torch.nn.Module) -> str:
    """A digest of the bits of all trainable parameters."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
