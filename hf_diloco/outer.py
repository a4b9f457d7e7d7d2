"""One rank's part of the outer state, and how far it is: what every kind of session does with it.

    masters -> pseudo_gradient (+ what was left out before) -> (average over the islands) -> install -> masters

Nothing here knows of other islands. What reads or writes parameters or files is collective over the island's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_diloco.checkpoint import OuterIndex, load_outer, read_index, save_outer
from hf_diloco.codecs import CODECS
from hf_diloco.codecs.feedback import ErrorFeedback
from hf_diloco.config import DiLoCoConfig
from hf_diloco.digests import digest_vector
from hf_diloco.errors import CheckpointError
from hf_diloco.island import IslandGroup
from hf_diloco.meeting import model_digest
from hf_diloco.shards.base import Shards
from hf_diloco.shards.partition import Partition
from hf_diloco.strategies import DiLoCo, Strategy


class OuterState:
    """One rank's part of the outer state. It can be used after `open` and one of `begin` and `restore`.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.

    Attributes:
        strategy: holds the outer parameters and momentum, and takes the outer step.
        codec: how pseudo-gradients travel.
        partition: which part of them is this rank's; set by `open`.
        scratch: fp32 host vector of that length, for what is on its way in or out; set by `open`.
        round: rounds completed.
        steps: inner steps since the last of them.
        weight: examples or tokens since then.
        outer_hash: digest of the whole island's outer parameters; empty before there are any.
        due_at: inner steps since the last round at which the next one is due.
        run: id of the run in its object store; empty without one.
    """

    partition: Partition
    scratch: torch.Tensor
    _shards: Shards
    _feedback: ErrorFeedback | None = None

    def __init__(self, config: DiLoCoConfig, island: IslandGroup) -> None:
        self.config = config
        self.island = island
        self.strategy: Strategy = DiLoCo(config.outer_lr, config.outer_momentum, config.nesterov)
        self.codec = CODECS[config.payload]
        self.round = 0
        self.steps = 0
        self.weight = 0.0
        self.outer_hash = ""
        self.due_at = config.sync_every
        self.run = ""

    # The inner steps

    def count_step(self, weight: float = 0.0) -> bool:
        """Counts one inner step with `weight` examples or tokens behind it; returns whether a round is due."""
        self.steps += 1
        self.weight += weight
        return self.is_due

    @property
    def is_due(self) -> bool:
        """Whether the inner steps of the next round are done."""
        return self.steps >= self.due_at

    @property
    def on_boundary(self) -> bool:
        """Whether the model's weights are the outer parameters."""
        return self.steps == 0

    @property
    def round_weight(self) -> float:
        """What this island's pseudo-gradient weighs in the average: examples or tokens behind it, or 1."""
        return 1.0 if self.config.weight_by == "uniform" else self.weight

    # The first outer parameters

    def open(self, shards: Shards, partition: Partition) -> None:
        """Takes this rank's master weights, and the cut that the islands agreed on."""
        self._shards = shards
        self.partition = partition
        self.scratch = torch.empty(partition.numel)
        if self.config.feedback_decay:
            self._feedback = ErrorFeedback(self.codec, self.config.feedback_decay, partition.numel)

    def begin(self) -> None:
        """Takes the master weights as the first outer parameters."""
        self.partition.gather(self.scratch)
        self.strategy.start(self.scratch)
        self.outer_hash = self.digest()

    def replace(self, parameters: torch.Tensor) -> None:
        """Takes `parameters` (this rank's part) as the first outer parameters, and writes them into the masters."""
        self.strategy.start(parameters)
        self.write_masters()

    # Rounds

    def pseudo_gradient(self) -> tuple[torch.Tensor, float]:
        """What this island contributes to the next round. Neither the masters nor the outer state are changed.

        With error feedback, what was left out of its earlier ones is added.

        Returns:
            This rank's part of it, in `scratch`, and the sum of the squares of the whole; the sum is not finite
            exactly if some value is not, or is beyond all reason.
        """
        own_square = self._take_progress()
        if self._feedback is not None:
            own_square = self._feedback.add_(self.scratch)
        (square,) = self.island.sum([own_square])
        return self.scratch, square

    def _take_progress(self) -> float:
        """Puts the outer parameters less the masters into `scratch`; returns the sum of this rank's squares."""
        self.partition.gather(self.scratch)
        return self.strategy.pseudo_gradient_(self.scratch)

    def install(self, mean: torch.Tensor, took_part: bool = True) -> float:
        """Takes the outer step with the averaged pseudo-gradient `mean`, and completes the round.

        Args:
            mean: this rank's part of it.
            took_part: it was made with what `pseudo_gradient` returned last.

        Returns:
            The `round_weight` of the round that this completes.
        """
        weight = self.round_weight
        if took_part and self._feedback is not None:
            self._feedback.commit()
        self.strategy.step(mean)
        self.write_masters()
        self.round += 1
        return weight

    def install_beside(self, mean: torch.Tensor, used: torch.Tensor | None = None) -> None:
        """Takes the outer step of a round without ending this island's own inner steps.

        Its progress stays what it was, now on top of the new outer parameters. The masters move by what the outer
        parameters move.

        Args:
            mean: the averaged pseudo-gradient.
            used: the part of this island's progress that went into `mean`, and is its own no more.
        """
        with self._keeping_progress(used):
            self.strategy.step(mean)
        self.round += 1

    def count_down(self, num_steps: int) -> None:
        """Takes inner steps that a round has used from what is this island's own."""
        self.weight *= 1 - num_steps / self.steps
        self.steps -= num_steps

    def shrink(self, num_steps: int) -> None:
        """Takes inner steps that a round has used, but whose values are gone, from this island's own progress.

        What they amount to can only be estimated: their share of it.
        """
        left = 1 - num_steps / self.steps
        self._take_progress()
        self.partition.scatter(torch.add(self.strategy.parameters, self.scratch, alpha=-left, out=self.scratch))
        self.count_down(num_steps)
        if self._feedback is not None:
            self._feedback.load(None)

    def use_up(self) -> None:
        """A round has used all of this island's progress, but its average cannot be had: the masters begin anew."""
        if self._feedback is not None:
            self.pseudo_gradient()
            self._feedback.commit()
        self.write_masters()

    def jump(self, state: dict[str, torch.Tensor], round_number: int) -> None:
        """Takes over the outer state after `round_number`, keeping this island's own progress on top of it."""
        with self._keeping_progress():
            self.strategy.load_state_dict(state)
        self.round = round_number

    @contextmanager
    def _keeping_progress(self, used: torch.Tensor | None = None) -> Iterator[None]:
        self._take_progress()
        delta = self.scratch
        if used is not None:
            delta.sub_(used)
        yield
        torch.sub(self.strategy.parameters, delta, out=delta)
        self.partition.scatter(delta)
        self.outer_hash = self.digest()

    def write_masters(self) -> None:
        """Writes the outer parameters into the masters: the inner steps begin anew from there."""
        self.partition.scatter(self.strategy.parameters)
        self.outer_hash = self.digest()
        self.steps = 0
        self.weight = 0.0
        self.due_at = self.config.sync_every

    def digest(self) -> str:
        """Digest of the whole island's outer parameters; islands with equal ones have equal digests."""
        return digest_vector(self.strategy.parameters, self.partition, self.island)

    # Checkpoints

    def save(self, checkpoint: Path, global_step: int, data: Mapping[str, Any]) -> None:
        """Writes the outer state into a checkpoint folder, whole or not at all.

        Args:
            checkpoint: the folder.
            global_step: optimizer steps of the whole training.
            data: how far the island had read.
        """
        index = OuterIndex(
            round=self.round,
            steps_since_sync=self.steps,
            weight_since_sync=self.weight,
            global_step=global_step,
            num_parameters=self._shards.num_parameters,
            model=model_digest(self._shards),
            outer_digest=self.outer_hash,
            run=self.run,
            settings=self.config.model_dump(),
            data=dict(data),
        )
        tensors = self.strategy.state_dict()
        if self._feedback is not None:
            tensors["residual"] = self._feedback.residual
        save_outer(checkpoint, self.island, tensors, self.partition.intervals, index)

    def restore(self, checkpoint: Path) -> None:
        """Takes over the outer state of a checkpoint. The masters must have been restored already.

        Raises:
            CheckpointError: on every rank, where one rank cannot read it, or it is of another model.
        """
        self.island.on_all(lambda: self._load(checkpoint))
        self.outer_hash = self.digest()

    def _load(self, checkpoint: Path) -> None:
        index = read_index(checkpoint)
        if index.model != model_digest(self._shards):
            raise CheckpointError(
                f"{checkpoint} holds the outer state of another model: {index.num_parameters:,} trainable parameters, "
                f"here {self._shards.num_parameters:,} (or others of the same number)"
            )
        state = load_outer(checkpoint, index, self.partition.intervals)
        if self.config.outer_momentum and "momentum" not in state:
            state["momentum"] = torch.zeros_like(state["anchor"])
        residual = state.pop("residual", None)
        if self._feedback is not None:
            self._feedback.load(residual)
        self.strategy.load_state_dict(state)
        self.round = index.round
        self.steps = index.steps_since_sync
        self.weight = index.weight_since_sync
        self.run = index.run
