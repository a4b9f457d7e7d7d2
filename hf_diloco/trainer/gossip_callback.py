"""Integration with the Hugging Face Trainer: meeting the other nodes, evaluating their mean, saving, stopping."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.config.base import choose_config
from hf_diloco.errors import ConfigError, IslandLostError, UnsupportedError
from hf_diloco.gossip.averages import are_equal
from hf_diloco.gossip.checkpoint import (
    RECORD,
    files_of,
    find_whole,
    sound_checkpoints,
)
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.node import CommonEnd, NodeNeighbours
from hf_diloco.gossip.open import leave_after_error, open_node
from hf_diloco.inner import refuse_foreign_optimizer
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts, facts_given
from hf_diloco.methods.gossip import GossipOptimizer, make_optimizer
from hf_diloco.outer.manifest import check_contents
from hf_diloco.trainer.arguments import (
    examples_per_step,
    floats,
    folder_of,
    is_of_training,
    name_evaluated,
)
from hf_diloco.trainer.base import RunCallback
from hf_diloco.trainer.frames import find_trainer, move_before_trackers
from hf_diloco.trainer.gossip_start import Beginning, check_gossip, parameter_groups
from hf_diloco.trainer.gossip_steps import (
    CommonSteps,
    check_eval_sizes,
    check_gossip_arguments,
    eval_size,
    gossip_facts,
)
from hf_diloco.trainer.record import NodeRecord
from hf_diloco.trainer.saving import replaced
from hf_diloco.trainer.views import MeanView
from hf_diloco.utils.redact import redact

logger = logging.getLogger("hf_diloco")

_ALONE = "which averages with nobody: give it optimizers=(callback.make_optimizer(model, args), None)"
_AFTER_ERROR = (
    "an error ended the last training with this GossipCallback, and the others went on without this node: make a new "
    "callback, and for it a new optimizer and Trainer"
)
_NOT_AVERAGED = ("_runtime", "_samples_per_second", "_steps_per_second")
"""Suffixes of metrics that do not describe the model."""


class GossipCallback(RunCallback[NodeRecord]):
    """Makes a Trainer one node of a graph. The node averages with its neighbours after every step.

        callback = GossipCallback(method="decentlam", topology="ring", num_nodes=8, node=3, rendezvous=url)
        optimizer = callback.make_optimizer(model, args)
        trainer = Trainer(model, args, ..., optimizers=(optimizer, None), callbacks=[callback])

    The Trainer evaluates the mean over all nodes; the model also holds the mean inside `with callback.mean_weights()`.
    Checkpoints hold each node's own parameters and state. When this process is asked to stop, by a signal or `stop`,
    all nodes finish the same step, write a checkpoint, and end. A lost neighbour's weight is added to the node's own.

    Args:
        config: the settings; or give them as keyword arguments.
        fingerprint: further facts that must be equal on all nodes.
        stop_file: a file whose existence requests a clean stop, as `stop` does.
        num_eval_examples: this node's number of evaluation examples, if nodes evaluate different examples: metrics are
            then weighted means over all nodes. With several data sets, by name: `{"books": 120, "web": 900}`.
        evaluates_at_end: makes the Trainer evaluate after the last step, whatever `eval_strategy` is.
        neighbours: this node's connection to the others, if they have already met.
        **settings: `GossipConfig` fields, instead of `config`.

    Raises:
        ConfigError, TypeError: a setting is wrong, or the method does not converge on the graph.

    Attributes:
        config: the settings.
        stopped: whether training ended early on request.
    """

    _noun = "node"

    def __init__(
        self,
        config: GossipConfig | None = None,
        *,
        fingerprint: Facts | None = None,
        stop_file: str | Path | None = None,
        num_eval_examples: int | Mapping[str, int] | None = None,
        evaluates_at_end: bool = False,
        neighbours: NodeNeighbours | None = None,
        **settings: Any,
    ) -> None:
        self.config = choose_config(GossipConfig, config, settings, "GossipCallback(method='decentlam')")
        self.topology = check_gossip(self.config)
        super().__init__(stop_file)
        self._facts = facts_given(fingerprint)
        self._num_eval_examples = num_eval_examples
        self._evaluates_at_end = evaluates_at_end
        self._node = neighbours
        self._has_failed = False
        self._optimizer: GossipOptimizer | None = None
        self._view: MeanView | None = None
        self._common_steps: CommonSteps | None = None
        self._combined: dict[str, float] = {}

    @property
    def node(self) -> NodeNeighbours:
        """This node's connection to its neighbours; the first use connects to the other nodes."""
        if self._node is None:
            self._node = open_node(self.config, self.topology, self._ranks)
        return self._node

    @cached_property
    def _ranks(self) -> IslandGroup:
        return IslandGroup(timeout=self.config.longest_wait)

    @cached_property
    def _beginning(self) -> Beginning:
        return Beginning(self.config, self.topology, self._facts, self.node, self.optimizer, self._ranks)

    @property
    def optimizer(self) -> GossipOptimizer:
        """The optimizer that `make_optimizer` returned."""
        if self._optimizer is None:
            raise UnsupportedError(f"the Trainer has an optimizer of its own, {_ALONE}")
        return self._optimizer

    def make_optimizer(self, model: torch.nn.Module, args: TrainingArguments) -> GossipOptimizer:
        """Makes the method's optimizer with learning rate and weight decay of `args`; moves the model to its device.

        As in the Trainer, weight decay does not apply to biases and norms. LARS does not scale these either.

        Raises:
            ConfigError: a setting is out of range, or no parameter is trainable.
            UnsupportedError: the parameters are neither fp32 nor fp64, of several dtypes or devices, or in a memory
                format that cannot be saved.
            RendezvousError, IslandLostError: the nodes cannot meet, or neighbours did not connect in time.
        """
        model.to(args.device)
        self._optimizer = make_optimizer(
            self.config.method,
            parameter_groups(model, args.weight_decay),
            self.node,
            args.learning_rate,
            slowmo=self.config.slowmo,
            **self.config.method_settings,
        )
        vars(self).pop("_beginning", None)  # it belongs to an earlier optimizer
        return self._optimizer

    def common_checkpoint(self, output_dir: str | Path) -> Path | None:
        """Agrees with the other nodes on the step to resume from: the newest that a majority has a checkpoint of.

        If no step has a majority, it is the newest that any node has. Nodes without a checkpoint of that step enter
        when training begins, with the mean of the nodes that have one. If the method's nodes are not in step, each
        resumes from its own newest. If nodes cannot enter (`pmsgd`), all must have a checkpoint of the step.

        Returns:
            This node's checkpoint of that step. On a node that enters, its newest earlier one, which gives the
            position in the data, or None. None if no node has a checkpoint.

        Raises:
            CheckpointError: nodes that cannot enter have checkpoints, but of no common step.
        """
        return self._beginning.choose_checkpoint(sound_checkpoints(Path(output_dir), self._ranks))

    @property
    def entry_step(self) -> int | None:
        """The step at which this node enters with the others' mean, after `common_checkpoint`; None if it does not."""
        return self._beginning.entry_step

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """Reads and verifies every file of a checkpoint that this node is about to resume from.

        Raises:
            CheckpointError: a file is missing or corrupt; the message names it.
        """
        check_contents(Path(checkpoint), files_of, self._ranks)

    @contextmanager
    def mean_weights(self) -> Iterator[None]:
        """Puts the mean over all nodes into the model inside the block. Collective over all nodes and their ranks."""
        with self._need_view().shown():
            yield

    @property
    def nodes_in_mean(self) -> tuple[int, ...]:
        """The nodes in the last mean; only this node if no mean could be formed."""
        return self._need_view().nodes

    def _need_view(self) -> MeanView:
        if self._view is None:
            raise ConfigError(
                "training has not begun with this GossipCallback: give it to the Trainer before trainer.train(), and "
                "use mean_weights() during training or after it"
            )
        return self._view

    # Trainer events, in the order in which they happen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks that all nodes train the same thing from the same starting point."""
        if self._has_failed:
            raise UnsupportedError(_AFTER_ERROR)
        trainer = find_trainer()
        move_before_trackers(self, is_last=True)
        check_gossip_arguments(args, self.config.payload, trainer.callback_handler.callbacks if trainer else ())
        optimizer, given = self.optimizer, kwargs["optimizer"]
        inner = getattr(given, "optimizer", given)  # inside Accelerate's wrapper
        if inner is not optimizer:
            raise UnsupportedError(f"the Trainer steps a {type(inner).__name__}, {_ALONE}")
        model, node = kwargs["model"], self.node
        refuse_foreign_optimizer(model, optimizer, "call make_optimizer with this very model, adapters included")
        node.end = CommonEnd(*optimizer.exchanges)
        if not (optimizer.is_in_step and optimizer.num_vectors):  # a stop request need not spread step by step
            node.end.window = 1
        node.rekey()
        self._beginning.find_step(args, state)
        loader = kwargs["train_dataloader"]
        weighed = check_eval_sizes(self._num_eval_examples, trainer, self.config.num_nodes)
        with_others = self.config.eval_weights == "average" or bool(weighed)
        facts = gossip_facts(self.config.payload, with_others, args, state, loader, weighed)
        is_back = node.is_returning
        news = self._beginning.begin(model, state, kwargs["lr_scheduler"], folder_of(args), facts)
        node.standing.steps = state.global_step
        self._view = MeanView(optimizer, node, model, self.config.buffers == "average", lacks_statistics=is_back)
        self._begin(args, self._ranks, trainer, RECORD, find_whole, begins_anew=not state.global_step)
        if trainer is not None:
            self._replace(trainer, "_evaluate", self._evaluate)
        self._common_steps = CommonSteps(args, loader, with_others, self._evaluates_at_end, self._beginning.passed)
        if is_back and with_others:  # the others are training, and do not evaluate now
            self._replaced.enter_context(replaced(args, "eval_on_start", False))
        self._open_record(args, state, optimizer)
        if news:
            self._need_record().write("neighbour", state.global_step, news=news)
        node.set_phase("training")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Starts sending what does not depend on the gradient, to overlap it with forward and backward."""
        self.optimizer.begin_exchange()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reports lost neighbours, and ends training at the step at which all nodes end."""
        node, optimizer = self.node, self.optimizer
        node.standing.steps = state.global_step
        if not optimizer.is_in_step:
            node.total += optimizer.traffic
            node.give_turn()
        self._need_record().tell_news(state.global_step)
        assert self._common_steps is not None, "on_train_begin has not run"
        self._common_steps.end_step(state, control)
        if state.global_step < state.max_steps and self._all_end(state):
            self.stopped = True
            self._end_early(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluates and saves after the same steps as the other nodes, wherever this node is in its data."""
        assert self._common_steps is not None, "on_train_begin has not run"
        self._common_steps.end_epoch(state, control)
        super().on_epoch_end(args, state, control)

    def _for_trackers(self, record: NodeRecord, logs: dict[str, Any], state: TrainerState) -> dict[str, float]:
        """Returns the `gossip/*` metrics; replaces an evaluation's metrics by those over all nodes."""
        if name_evaluated(logs) is None:
            return record.take_for_trackers(state.global_step) if is_of_training(logs) else {}
        self._combined = self._combine(logs)
        distance = self._shown_distance
        return self._combined | ({} if distance is None else {"gossip/consensus_distance": distance})

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records the evaluation, and news of other nodes that it brought."""
        super().on_evaluate(args, state, control, **kwargs)
        if self._record:
            self._record.tell_news(state.global_step)  # there may be no later step to report it

    def _about_weights(self, metrics: dict[str, float]) -> dict[str, Any]:
        metrics.update({name: value for name, value in self._combined.items() if name in metrics})
        distance = self._shown_distance
        return {"weights": "inner" if distance is None else "outer", "consensus_distance": distance}

    @property
    def _shown_distance(self) -> float | None:
        """The nodes' distance from their mean, if the model holds the mean."""
        return self._view.consensus_distance if self._view is not None and self._view.is_on else None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Marks the checkpoint as complete."""
        self.node.rekey()  # as on resuming from here, and as neighbours do when they save
        self._need_record().mix(state.global_step)
        super().on_save(args, state, control, **kwargs)

    def _complete(self, checkpoint: Path, state: TrainerState) -> None:
        self._beginning.complete(checkpoint, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the record; the nodes stay together, for an evaluation of their mean."""
        self._end()
        if not self.stopped:
            self._warn_if_short(state)
        self._need_record().end(state.global_step)
        self.node.set_phase("left" if self.stopped else "finished")

    # Steps of the above

    def _on_error(self) -> None:
        """Leaves the other nodes at once, as the process may live on (in a notebook)."""
        if self.config.num_nodes > 1:
            self._end(waits=self._ranks.size == 1)  # other ranks may never arrive
            self._has_failed = True
            leave_after_error(self.config, self.node)

    def _survives_losses(self) -> bool:
        return self.optimizer.num_vectors > 0

    def _all_end(self, state: TrainerState) -> bool:
        end = self.node.end
        if self._stop.agreed():
            end.wish()
        if not self.optimizer.is_in_step:
            end.value(0)
        elif self.optimizer.num_vectors == 0:
            self.node.spread_wish(torch.zeros(1))
        return end.has_come(state.global_step)

    def _evaluated_weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        shows_mean = self.config.eval_weights == "average" and self in trainer.callback_handler.callbacks
        return self.mean_weights() if shows_mean else nullcontext()

    def _combine(self, logs: dict[str, Any]) -> dict[str, float]:
        """Averages the metrics over all nodes, weighted by their numbers of evaluation examples."""
        if self._num_eval_examples is None:
            return {}
        numbers = floats(logs)
        names = sorted(name for name in numbers if name.startswith("eval_") and not name.endswith(_NOT_AVERAGED))
        weight = float(eval_size(self._num_eval_examples, name_evaluated(logs)))
        sums = torch.tensor([*(numbers[name] * weight for name in names), weight])
        try:
            if self._need_view().has_failed:  # a late average may belong to the next evaluation
                raise IslandLostError("nor is there one of their weights")
            if not are_equal(self.node, "\n".join(names)):
                logger.warning("nodes measure different things: this one's %s are of its own data", ", ".join(names))
                return {}
            self.node.average(sums)
        except IslandLostError as error:
            logger.warning("no mean of the nodes' metrics (%s): they are of this node's part of the data", error)
            return {}
        means = (sums[:-1] / sums[-1]).tolist()
        return dict(zip(names, means, strict=True))

    def _open_record(self, args: TrainingArguments, state: TrainerState, optimizer: GossipOptimizer) -> None:
        if self._record is not None:
            self._record.close()
        folder = folder_of(args) if state.is_world_process_zero else None
        self._record = NodeRecord(folder, self.node, state.global_step)
        self._record.write(
            "start",
            state.global_step,
            **(self.config.slowmo.record if self.config.slowmo else {}),
            island=self.config.node,
            num_islands=self.config.num_nodes,
            rendezvous=redact(self.config.rendezvous),
            num_ranks=args.world_size,
            shards="whole parameters",
            num_parameters=sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
            method=optimizer.name,
            **self.config.model_dump(include={"payload", "eval_weights"}),
            topology=self.topology.name,
            rho=self.topology.rho,
            max_steps=state.max_steps,
            examples_per_step=examples_per_step(args),
            resumed=state.global_step > 0,
            comes_and_goes=False,
        )
