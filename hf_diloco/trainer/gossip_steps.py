"""What nodes do after the same steps, evaluations and saves, and the Trainer's arguments that decide on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from hf_diloco.errors import ConfigError
from hf_diloco.membership.facts import Facts
from hf_diloco.trainer.arguments import callback_settings, check_ranks, saving_facts, steps_per_epoch
from hf_diloco.trainer.refusals import follows_evaluations, refuse


def check_gossip_arguments(
    args: TrainingArguments, payload: str = "fp32", callbacks: Iterable[TrainerCallback] = ()
) -> None:
    """Refuses settings that averaging between neighbours does not support.

    Raises:
        ConfigError: a setting of `REFUSALS` is used (the message names all); or the payload is not fp32, and nodes
            might save after different steps; or ranks would train apart.
    """
    refuse({**vars(args), **callback_settings(callbacks)}, "nodes")
    check_ranks(args.world_size)
    if payload != "fp32" and args.save_strategy not in (SaveStrategy.STEPS, SaveStrategy.NO):
        raise ConfigError(
            f"save_strategy={SaveStrategy(args.save_strategy).value} with payload={payload}: all nodes must save "
            "after the same steps, whatever their data and metrics; set it to steps"
        )


def check_eval_sizes(
    num_eval_examples: int | Mapping[str, int] | None, trainer: Trainer | None, num_nodes: int
) -> bool | str:
    """Checks `num_eval_examples` against the Trainer's evaluation data, and against a schedule that follows it.

    Returns:
        Whether metrics are weighted by numbers of examples; with several data sets, their names in the Trainer's
        order.

    Raises:
        ConfigError: the numbers do not match the Trainer's data sets, or are no numbers of examples; or there are
            none, and the learning rate follows evaluations, which may differ between nodes.
    """
    if num_eval_examples is None:
        if trainer is not None and num_nodes > 1:
            _refuse_own_rates(trainer)
        return False
    sizes = num_eval_examples.values() if isinstance(num_eval_examples, Mapping) else [num_eval_examples]
    if not all(isinstance(size, Integral) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ConfigError(f"num_eval_examples={num_eval_examples!r}: give whole numbers above 0")
    evaluated = trainer.eval_dataset if trainer is not None else None
    names = list(evaluated) if isinstance(evaluated, dict) else None
    given = sorted(num_eval_examples) if isinstance(num_eval_examples, Mapping) else None
    if evaluated is not None and given != (names and sorted(names)):
        what = f"a number for each of {', '.join(names)}, by name" if names else "one number, of the one data set"
        raise ConfigError(f"num_eval_examples={num_eval_examples!r}: give {what} that the Trainer evaluates")
    return ", ".join(names) if names else True


def _refuse_own_rates(trainer: Trainer) -> None:
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside Accelerate's wrapper
    if follows_evaluations(name := type(scheduler).__name__):
        raise ConfigError(
            f"the learning rate follows evaluations ({name}), and each node would train at a rate of its own: give "
            "GossipCallback num_eval_examples, for metrics of all nodes, or choose a schedule of steps, such as "
            "lr_scheduler_type=cosine"
        )


def eval_size(num_eval_examples: int | Mapping[str, int], name: str | None) -> int:
    """Returns the number of examples of the evaluated data set; `name` as `name_evaluated` returns it."""
    if not isinstance(num_eval_examples, Mapping):
        return num_eval_examples
    if (known := (name or "").removesuffix("_")) in num_eval_examples:
        return num_eval_examples[known]
    raise ConfigError(f"num_eval_examples={num_eval_examples!r} does not say how large {known!r} is: add it")


def gossip_facts(
    payload: str,
    evaluates_with_others: bool,
    args: TrainingArguments,
    state: TrainerState,
    loader: Any,
    weighed: bool | str = False,
) -> Facts:
    """Returns facts about joint actions that must be equal on all nodes, by their names in error messages.

    Args:
        evaluates_with_others: whether an evaluation takes a mean over all nodes, of their weights or their metrics.
        loader: of the training data.
        weighed: result of `check_eval_sizes`.
    """
    facts: dict[str, str | int | float | bool | None] = {"num_eval_examples is given": weighed}
    if payload != "fp32":  # all nodes must rekey at the same steps
        facts |= saving_facts(args, state, loader)
    if evaluates_with_others:
        when = "never"
        if args.eval_strategy == IntervalStrategy.STEPS:
            when = f"every {state.eval_steps} steps, after {args.eval_delay:g}"
        elif args.eval_strategy == IntervalStrategy.EPOCH:
            num_batches = len(loader) if has_length(loader) else "some"
            when = f"after epochs of {num_batches} batches, {args.gradient_accumulation_steps} a step"
        if args.eval_on_start:
            when += ", and at the start"
        facts["when nodes evaluate (each by itself: eval_weights=local, without num_eval_examples)"] = when
    return facts


class CommonSteps:
    """Makes a node evaluate and save after the same steps as the others, even if it started apart from them.

    A node that has entered is at another position in its data, so its epochs end after other steps. It does the work
    due at epoch ends at the steps at which the others' epochs end.

    Args:
        loader: of the training data.
        with_others: whether an evaluation takes a mean over all nodes.
        evaluates_at_end: whether to evaluate after the last step, whatever `args` say.
        passed: the step up to which other nodes have already evaluated: they join no mean of these steps.
    """

    def __init__(
        self, args: TrainingArguments, loader: Any, with_others: bool, evaluates_at_end: bool, passed: int
    ) -> None:
        steps = steps_per_epoch(args, loader)
        self._saves = steps is not None and args.save_strategy == SaveStrategy.EPOCH
        self._evaluates = steps is not None and with_others and args.eval_strategy == IntervalStrategy.EPOCH
        self._steps_per_epoch = steps or 0
        self._eval_delay = args.eval_delay
        self._evaluates_at_end = evaluates_at_end
        self._passed = passed if with_others else 0

    def end_step(self, state: TrainerState, control: TrainerControl) -> None:
        """Decides whether to save and evaluate after a step."""
        step, is_last = state.global_step, state.global_step >= state.max_steps
        if (self._saves or self._evaluates) and (is_last or step % self._steps_per_epoch == 0):
            control.should_save |= self._saves
            control.should_evaluate |= self._evaluates and self._eval_delay <= step / self._steps_per_epoch
        control.should_evaluate |= is_last and self._evaluates_at_end
        control.should_evaluate &= step > self._passed

    def end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        """Cancels saves and evaluations at the end of this node's own epochs; called before other callbacks ask."""
        control.should_save &= not self._saves
        control.should_evaluate &= not self._evaluates and state.global_step > self._passed
