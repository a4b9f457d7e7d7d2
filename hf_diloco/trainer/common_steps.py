"""When nodes evaluate and save: after the same steps, however their data lie, and wherever they have begun."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length


class CommonSteps:
    """What is changed in the Trainer's plan for a node that begins apart from the others.

    One that has entered is elsewhere in its data, so its own epochs end after other steps. What is to be done after
    epochs is done after the steps at which those of the others end.

    Args:
        args: of the Trainer.
        loader: of the training data.
        with_others: an evaluation takes a mean over all nodes.
        evaluates_at_end: the Trainer is to evaluate after the last step, whatever its arguments say.
        passed: the step up to which other nodes have evaluated already: they come to no mean of these steps.
    """

    def __init__(
        self, args: TrainingArguments, loader: Any, with_others: bool, evaluates_at_end: bool, passed: int
    ) -> None:
        counts_epochs = has_length(loader)
        self._saves = counts_epochs and args.save_strategy == SaveStrategy.EPOCH
        self._evaluates = counts_epochs and with_others and args.eval_strategy == IntervalStrategy.EPOCH
        self._steps_per_epoch = max(1, -(-len(loader) // args.gradient_accumulation_steps)) if counts_epochs else 0
        self._eval_delay = args.eval_delay
        self._evaluates_at_end = evaluates_at_end
        self._passed = passed if with_others else 0

    def end_step(self, state: TrainerState, control: TrainerControl) -> None:
        """What follows a step."""
        step, is_last = state.global_step, state.global_step >= state.max_steps
        if (self._saves or self._evaluates) and (is_last or step % self._steps_per_epoch == 0):
            control.should_save |= self._saves
            control.should_evaluate |= self._evaluates and self._eval_delay <= step / self._steps_per_epoch
        control.should_evaluate |= is_last and self._evaluates_at_end
        control.should_evaluate &= step > self._passed

    def end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        """What follows an epoch of this node's own; called before other callbacks ask for more."""
        control.should_save &= not self._saves
        control.should_evaluate &= not self._evaluates and state.global_step > self._passed
