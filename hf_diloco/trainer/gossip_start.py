"""How a gossip node begins to train: checks that all nodes have equal settings, chooses the checkpoint to resume from
or the mean to enter with, and aligns evaluations and saves with the other nodes.

Nodes that were lost before a run ended have older checkpoints than the others, or none. All nodes are present when
they agree on the step to resume from, so no two groups of nodes can choose differently.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from hf_diloco.errors import ConfigError, DiLoCoError, FingerprintError, UnsupportedError
from hf_diloco.gossip.checkpoint import (
    GossipIndex,
    Resumption,
    check_index,
    choose_common,
    choose_own,
    choose_step,
    lives_of,
    read_held,
    save_index,
    take_mean,
)
from hf_diloco.gossip.choco import check_static
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.records import Record, whole_number
from hf_diloco.inner.frozen import frozen_weights
from hf_diloco.membership.facts import MAX_STEPS, Facts, compare_facts, differ, frozen_facts, join_facts, remedy_for
from hf_diloco.membership.fingerprint import check_folders
from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
from hf_diloco.methods.topology import Topology, make_topology
from hf_diloco.trainer.arguments import decayed_groups
from hf_diloco.trainer.resuming import refuse_fewer_steps
from hf_diloco.utils.lr_schedule import move_schedule
from hf_diloco.utils.own_files import identify, is_own

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

    from hf_diloco.gossip.node import NodeNeighbours
    from hf_diloco.inner.island import IslandGroup

logger = logging.getLogger("hf_diloco")


def check_gossip(config: GossipConfig) -> Topology:
    """Returns the graph, after checking that the method exists, has these settings, and converges on the graph.

    Raises:
        ConfigError: a check failed.
    """
    topology = make_topology(config.topology, config.num_nodes, config.topology_seed)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    node = MemoryGraph(topology).node(config.node)
    try:
        optimizer = make_optimizer(
            config.method, [parameter], node, 0.1, slowmo=config.slowmo, **config.method_settings
        )
    except ConfigError as error:
        said = str(error)
        if any(said.startswith((f"{name}:", f"{name}=")) for name in config.options):
            raise ConfigError(f"options.{said}") from None
        raise
    if config.payload != "fp32":
        if optimizer.refuses_payload:
            raise ConfigError(f"payload={config.payload}: {optimizer.name} {optimizer.refuses_payload}")
        check_static(topology, config.payload)
    return topology


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the model's trainable parameters as groups of a node's optimizer.

    Raises:
        ConfigError: there are none.
        UnsupportedError: a parameter is not contiguous. The optimizer makes all of them views of one vector, and
            transformers cannot save such views in another memory format.
    """
    groups = decayed_groups(model, weight_decay, lars=0.0)
    if not groups:
        raise ConfigError("the model has no trainable parameters: freeze fewer of them")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_contiguous():
            raise UnsupportedError(
                f"parameter {name} is not contiguous in memory, as in channels_last, and could not be saved: call "
                "model.to(memory_format=torch.contiguous_format), or .contiguous() on it, before make_optimizer()"
            )
    return groups


@dataclass(eq=False)
class Beginning:
    """How one node begins each of its trainings.

    Attributes:
        facts: further facts that must be equal on all nodes.
        ranks: the ranks of this node.
        life: an id of this training, equal on all nodes, that distinguishes it from earlier trainings.
        passed: the newest step of any node, up to which it has evaluated, if nodes start at different steps; else 0.
    """

    config: GossipConfig
    topology: Topology
    facts: Facts
    node: NodeNeighbours
    optimizer: GossipOptimizer
    ranks: IslandGroup
    life: str = ""
    passed: int = 0
    _data_step: int = 0  # up to which the node had read its data when training began
    _begun_at: int = 0
    _resumption: Resumption | None = None
    _news: str = ""
    _num_trainings: int = 0  # before this one

    def choose_checkpoint(self, mine: Mapping[int, Path]) -> Path | None:
        """See `GossipCallback.common_checkpoint`; `mine`: this node's complete checkpoints, by step."""
        if self.node.is_returning:  # the others are training: only for the position in the data
            return self._newest_of_run(mine)
        records = self.node.share("checkpoints", {"held": lives_of(mine, self.ranks)})
        with self._refusing_together():
            held = [read_held(record, node) for node, record in enumerate(records)]
            if self.optimizer.num_vectors == 0:
                self._resumption = choose_common(held, self.optimizer.name)
            else:
                self._resumption = choose_step(held) if self.optimizer.is_in_step else choose_own(held)
        if self._resumption is None:
            return None
        if self._resumption.late:
            self._news = self._resumption.describe(held)
        if not self.optimizer.is_in_step:
            return mine[max(mine)] if mine else None
        before = [step for step in mine if step <= self._resumption.step]
        return mine[max(before)] if before else None

    def _newest_of_run(self, mine: Mapping[int, Path]) -> Path | None:
        """Returns the newest checkpoint, ignoring those of an earlier `life` beyond the step that all went back to."""
        others = self.node.recall("join")
        if others and self.optimizer.is_in_step:
            begun, life = whole_number(others[0], "step", others[0]["node"]), others[0].get("life")
            held = lives_of(mine, self.ranks)
            mine = {step: mine[step] for step, its_life in held if step <= begun or its_life == life}
        return mine[max(mine)] if mine else None

    @property
    def entry_step(self) -> int | None:
        """The step at which this node enters with the others' mean; None if it does not."""
        resumption = self._resumption
        return resumption.step if resumption and self.config.node in resumption.late else None

    def find_step(self, args: TrainingArguments, state: TrainerState) -> None:
        """Checks the checkpoint that the Trainer has loaded, and puts `state` at its step: see `GossipIndex`.

        Raises `CheckpointError`, on every rank, if it is another node's, method's or graph's.
        """
        from hf_diloco.trainer.frames import find_resumed

        self._data_step = state.global_step
        if state.global_step:
            checkpoint = find_resumed(args, state.global_step)
            _move_to(check_index(checkpoint, self._index(state), self.ranks), state)

    def complete(self, checkpoint: Path, state: TrainerState) -> None:
        """Marks a checkpoint of this training as complete. Collective over the node's ranks."""
        save_index(checkpoint, self._index(state), self.ranks, self._begun_at - self._data_step)

    def _index(self, state: TrainerState) -> GossipIndex:
        whose = self.config.model_dump(include={"node", "num_nodes"})
        return GossipIndex(step=state.global_step, method=self.optimizer.name, life=self.life, **whose)

    def begin(
        self, model: torch.nn.Module, state: TrainerState, scheduler: Any, folder: Path, arguments: Facts
    ) -> str:
        """Checks that all nodes train the same thing from the same starting point. Collective over the nodes.

        A second training without a checkpoint continues from each node's present parameters.

        A node that enters with the others' mean takes over their step in `state` and `scheduler`.

        Args:
            folder: where this node writes.
            arguments: facts of the Trainer's arguments that must be equal on all nodes; see `gossip_facts`.

        Returns:
            News about nodes that enter, for the record; empty if none do.

        Raises:
            FingerprintError: the nodes train different things, or from different steps.
            RendezvousError: two nodes write to one folder.
            ConfigError: training is to end before the step that it resumes from.
        """
        refuse_fewer_steps(state)
        place = {"node": self.config.node, "host": socket.gethostname(), "folder": os.path.realpath(folder)}
        common = make_fingerprint(self.config, self.topology, model)
        facts = {MAX_STEPS: state.max_steps, **common, **arguments}
        if self.node.is_returning:
            self._return(facts, place, state, scheduler)
        else:
            self._compare(facts, place, model, state)
            self._let_in_late(model, state, scheduler)
        self._num_trainings += 1
        self._begun_at = state.global_step
        news, self._news, self._resumption = self._news, "", None
        return news

    def _return(self, facts: Facts, place: Record, state: TrainerState, scheduler: Any) -> None:
        """Rejoins a run that continued: from the neighbours' mean, at their step, with no momentum."""
        self.optimizer.check_entry()
        others = self.node.recall("join")
        for record in others:
            theirs = record["facts"]
            for name, value in join_facts(facts, self.facts).items():
                if differ(name, theirs.get(name), value):
                    raise FingerprintError(
                        f"the run that this node returns to trains something else: {name} is {theirs.get(name)} "
                        f"there, and {value} here; {remedy_for(name)}"
                    )
        _check_folders([*others, place])
        self.node.recall("checkpoints")  # the others may have shared theirs: before a further training all do again
        self._note(others)
        self._tell_rates(others)
        # Where nodes are not in step, it may have been ahead, and its data are where it was.
        own = 0 if self.optimizer.is_in_step else state.global_step
        self._begin_at(lambda x: max(own, self.node.enter(x)), state, scheduler)
        logger.warning(
            "node %d is back: it goes on from the mean of its neighbours, at step %d",
            self.config.node,
            state.global_step,
        )

    def _let_in_late(self, model: torch.nn.Module, state: TrainerState, scheduler: Any) -> None:
        """Initialises nodes without a checkpoint of the common step with the mean of the nodes that have one."""
        resumption = self._resumption
        if resumption is None or not resumption.late:
            return
        logger.warning("%s", self._news)
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]

        def enter(x: torch.Tensor) -> int:
            take_mean(self.node, [x, *buffers], resumption)
            return resumption.step

        if self.entry_step is None:
            enter(self.optimizer.flat_parameters)
        else:
            self._begin_at(enter, state, scheduler)
        _forget_evaluations(state)

    def _begin_at(self, enter: Callable[[torch.Tensor], int], state: TrainerState, scheduler: Any) -> None:
        """Calls `GossipOptimizer.begin_at`; moves the Trainer and the schedule to the step it returns."""
        _move_to(self.optimizer.begin_at(enter), state)
        if not move_schedule(scheduler, state.global_step):
            logger.warning("%s cannot be advanced: the learning rate starts from scratch", type(scheduler).__name__)

    def _compare(self, facts: Facts, place: Record, model: torch.nn.Module, state: TrainerState) -> None:
        """Raises `FingerprintError` unless all nodes train the same thing from the same starting point."""
        facts, step = dict(facts), self.entry_step or state.global_step
        if self.optimizer.is_in_step:
            facts["step"] = step
        if not step and self._num_trainings:
            self.optimizer.begin_training()
        elif not step:
            facts["initial weights (set the same seed)"] = digest_of(model)
        mine = {"facts": join_facts(facts, self.facts), "step": step, "life": secrets.token_hex(4), **place}
        mine["rates"] = self._base_rates
        records = self.node.share("join", mine)
        with self._refusing_together():
            compare_facts([record["facts"] for record in records], "node")
            _check_folders(records)
            self._note(records)
        if self.entry_step is not None:
            self._tell_rates([record for record in records if record["node"] != self.config.node])
        if self.passed:
            _forget_evaluations(state)

    @contextmanager
    def _refusing_together(self) -> Iterator[None]:
        """Delays an error raised inside, where each node checks all records, until all nodes have read the records.

        Node 0 may host the store: if it exited first, the others could not read the reason.
        """
        try:
            yield
        except DiLoCoError:
            with suppress(DiLoCoError):  # another node has exited
                self.node.share("refused", {})
            raise

    @property
    def _base_rates(self) -> list[float]:
        """The base learning rate of each parameter group, which the schedule multiplies."""
        return [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]

    def _tell_rates(self, records: Sequence[Record]) -> None:
        """Warns if this entering node's learning rate differs from the rates in the other nodes' checkpoints."""
        mine, others = self._base_rates, [record["rates"] for record in records if "rates" in record]
        if others and mine not in others:
            logger.warning(
                "node %d enters with learning rates of %s, and the others train with %s, as in their checkpoints, "
                "whatever learning_rate is now: set it back, and start this node again; or start all in a new folder",
                self.config.node,
                mine,
                others[0],
            )

    def _note(self, records: Sequence[Record]) -> None:
        """Sets `life` and `passed` from the nodes' records, node 0's first: node 0 never returns to a run."""
        self.life = str(records[0].get("life", "")) if records else ""
        steps = [whole_number(record, "step", record["node"]) for record in records]
        self.passed = max(steps) if len(set(steps)) > 1 else 0


def make_fingerprint(config: GossipConfig, topology: Topology, model: torch.nn.Module) -> Facts:
    """Returns the facts that must be equal on all nodes at any step, by their names in error messages."""
    if is_own(config.topology):
        graph = identify(config.topology)  # a user's graph may change at any step: compare its source
    else:
        weights = [topology.weights(step).tobytes() for step in range(topology.period or 1)]
        graph = xxhash.xxh3_64_hexdigest(b"".join(weights))
    sizes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    return {
        "method": identify(config.method),
        "settings of the method": str(sorted(config.method_settings.items())),
        "slowmo": str(config.slowmo or "none"),
        "payload": config.payload,
        "topology": graph,
        **({"topology_seed": config.topology_seed} if topology.period is None else {}),
        "buffers": config.buffers,
        "eval_weights": config.eval_weights,
        "model (names and sizes)": xxhash.xxh3_64_hexdigest("\n".join(sizes).encode()),
        **frozen_facts(frozen_weights(model)),
    }


def _check_folders(records: Sequence[Record]) -> None:
    places = {record["node"]: (record["host"], record["folder"]) for record in records}
    check_folders(places, "node")


def _move_to(step: int, state: TrainerState) -> None:
    from hf_diloco.trainer.frames import find_trainer

    state.global_step = step
    if (trainer := find_trainer()) is not None:  # which has noted these: it logs losses per step since then
        trainer._initial_global_step = trainer._globalstep_last_logged = step


def _forget_evaluations(state: TrainerState) -> None:
    """Drops evaluations of this step, so that all nodes evaluate again: the holders' are of another mean."""
    from hf_diloco.trainer.arguments import name_evaluated

    state.log_history = [
        entry for entry in state.log_history if name_evaluated(entry) is None or entry["step"] != state.global_step
    ]


def digest_of(model: torch.nn.Module) -> str:
    """Returns a digest of the bits of all trainable parameters."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
