"""Common base of the Trainer callbacks: for an island, for a gossip node, and for a Trainer that trains alone."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts
from hf_diloco.trainer.arguments import (
    check_launched,
    examples_per_step,
    floats,
    folder_of,
    is_of_training,
    name_evaluated,
    path_given,
    tokens_per_step,
)
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from hf_diloco.trainer.progress import Progress, RunFilesCallback, launchers_folder
from hf_diloco.trainer.record import Record
from hf_diloco.trainer.refusals import refuse_unknown_layers, refuse_unreadable_masters
from hf_diloco.trainer.resuming import resume_across_ranks
from hf_diloco.trainer.saving import noting_failures, replaced
from hf_diloco.trainer.stop import StopFlag, launchers_stop_file

R = TypeVar("R", bound=Record)

logger = logging.getLogger("hf_diloco")


class RunCallback(TrainerCallback, ABC, Generic[R]):
    """Stops training cleanly on request, completes checkpoints, and writes the record.

    Args:
        stop_file: a file whose existence requests a clean stop, as `stop` does.

    Attributes:
        has_outer_loop: whether the callback reads the master weights.
        stopped: whether training ended early on request.
        moved_at_end: whether the weights changed after the last step, so that earlier evaluations are outdated.
    """

    has_outer_loop: ClassVar[bool] = True
    _noun: ClassVar[str] = "island"
    """What messages call one participant of the run."""

    def __init__(self, stop_file: str | Path | None) -> None:
        self._facts: Facts = {}
        self.stopped = False
        self.moved_at_end = False
        self._stop = StopFlag(path_given(type(self).__name__, "stop_file", stop_file) or launchers_stop_file())
        self._checkpoints: CheckpointFolder | None = None  # while training
        self._limit = 0  # of checkpoints
        self._record: R | None = None
        self._replaced = ExitStack()  # restores replaced attributes of the Trainer when training ends
        self._ends_early = False
        self._sync_every = 0  # steps between rounds, if there are any
        resume_across_ranks()

    def stop(self) -> None:
        """Requests a clean stop: finish the step, write a checkpoint. Safe in any thread or signal handler."""
        self._stop.request()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks the settings of DeepSpeed and FSDP.

        Raises:
            ConfigError: DeepSpeed is used without a launcher; or DeepSpeed or FSDP has a setting that would fail.
        """
        if args.deepspeed_plugin is not None:
            check_launched()
            refuse_unreadable_masters(args.deepspeed_plugin.deepspeed_config, self.has_outer_loop)
        if args.fsdp:
            assert isinstance(args.fsdp_config, dict), "TrainingArguments makes it of whatever it is given"
            refuse_unknown_layers(args.fsdp_config.get("transformer_layer_cls_to_wrap"), kwargs["model"])

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Skips evaluating and saving after an early stop, which ends the epoch, too."""
        if self._ends_early:
            control.should_evaluate = control.should_save = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Records the Trainer's logs, and adds this callback's metrics to them for the trackers."""
        logs = kwargs.get("logs")
        if logs is None or self._record is None:
            return
        if is_of_training(logs):
            self._record.write("train", state.global_step, **floats(logs))
        added = self._for_trackers(self._record, logs, state)
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)

    def _for_trackers(self, record: R, logs: dict[str, Any], state: TrainerState) -> dict[str, float]:
        """Returns the metrics to add to `logs`."""
        return {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records an evaluation and which weights it used."""
        metrics = kwargs.get("metrics") or {}
        if self._record and name_evaluated(metrics) is not None:
            weights = self._about_weights(metrics)
            self._record.write("eval", state.global_step, **weights, **floats(metrics))

    def _about_weights(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Returns which weights these metrics belong to."""
        return {"weights": "inner"}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Completes the checkpoint; only then are older ones deleted."""
        assert self._checkpoints is not None, "on_train_begin has not run"
        checkpoint = self._checkpoints.path(state.global_step)
        best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
        if self._checkpoints.complete(checkpoint, lambda folder: self._complete(folder, state), self._limit, best):
            self._need_record().write("save", state.global_step, path=checkpoint.name)

    @abstractmethod
    def _complete(self, checkpoint: Path, state: TrainerState) -> None:
        """Adds this callback's files to the Trainer's checkpoint. Collective over the ranks."""

    def _begin(
        self,
        args: TrainingArguments,
        ranks: IslandGroup,
        trainer: Trainer | None,
        record: str,
        find_whole: Callable[[Path], Collection[Path]],
        find_needed: Callable[[Path, Collection[Path]], Collection[Path]] | None = None,
        begins_anew: bool = False,
    ) -> None:
        """Starts treating signals as stop requests and managing checkpoints; see `CheckpointFolder`.

        Turns off the Trainer's own deletion: it sorts checkpoints by time, and counts incomplete ones.
        """
        self.stopped = self.moved_at_end = self._ends_early = False
        if self._checkpoints:  # left from a training that raised: the Trainer tells callbacks nothing then
            self._end()
        self._stop.install(ranks, during=Trainer.train)
        self._checkpoints = CheckpointFolder(
            folder_of(args), ranks, record, find_whole, find_needed, self._check_alone, args.should_save, begins_anew
        )
        self._limit = max(args.save_total_limit or 0, 0)  # the Trainer takes 0 and less as none
        self._replaced.enter_context(replaced(args, "save_total_limit", None))
        if trainer is not None:
            self._replace(trainer, "_save_checkpoint", self._save)
            self._replace(trainer, "_run_epoch", self._run_epoch)
            self._guard_other_callbacks(trainer)
            self._tell_launcher(args, trainer)

    def _check_alone(self) -> None:
        self._need_record().check_alone()

    def _replace(self, trainer: Trainer, name: str, ours: Callable[..., Any]) -> None:
        """Replaces a method by `ours` until training ends; `ours` gets the Trainer, the method and its arguments."""
        self._replaced.enter_context(replaced(trainer, name, partial(ours, trainer, getattr(trainer, name))))

    def _guard_other_callbacks(self, trainer: Trainer) -> None:
        """Makes this callback notice errors of those that begin after it, such as a tracker whose login fails."""
        for other in trainer.callback_handler.callbacks:
            own = getattr(other, "__dict__", {})
            if other is not self and "on_train_begin" not in own:
                own["on_train_begin"] = self._giving_back()(other.on_train_begin)
                self._replaced.callback(own.pop, "on_train_begin", None)  # Trainers in threads may share it

    def _save(self, trainer: Trainer, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Runs the Trainer's save. A rank that cannot write runs all other steps, so that no rank waits for it."""
        assert self._checkpoints is not None

        def write(failures: list[str]) -> None:
            with noting_failures(trainer, failures):
                save(*args, **kwargs)

        self._checkpoints.begin(self._checkpoints.path(trainer.state.global_step), write)

    def _evaluate(self, trainer: Trainer, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an evaluation during training on `_evaluated_weights`."""
        with self._giving_back(), self._evaluated_weights(trainer):
            return evaluate(*args, **kwargs)

    def _evaluated_weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Puts the weights to evaluate into the model; no-op if another callback replaced this one after an error."""
        return nullcontext()

    def _run_epoch(self, trainer: Trainer, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Skips the epoch if training resumes after the last step, or ends early before its first: the Trainer would
        take one step too many."""
        if trainer.state.global_step >= trainer.state.max_steps or self._ends_early:
            trainer.control.should_training_stop = True
            return None
        with self._giving_back():
            return run(*args, **kwargs)

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """If its body raises, restores the Trainer's methods and calls `_on_error`: the Trainer tells no callback."""
        try:
            yield
        except BaseException:
            self._replaced.close()
            self._on_error()
            raise

    def _on_error(self) -> None:
        """Called when an error ended training, at least on this rank."""

    def _tell_launcher(self, args: TrainingArguments, trainer: Trainer) -> None:
        """Reports progress to the launcher, if it started a user's own script."""
        folder, handler = launchers_folder(), trainer.callback_handler
        if folder is None:
            return
        if any(isinstance(one, RunFilesCallback) and one.is_in_script for one in handler.callbacks):
            return  # added by an earlier training
        examples = examples_per_step(args)
        tokens = tokens_per_step(self._facts, examples)
        unit = "examples" if tokens is None else "tokens"
        progress = Progress(
            folder if trainer.state.is_world_process_zero else None,
            trainer.state.max_steps,
            unit=unit,
            record=folder_of(args),
            noun=self._noun,
            survives_losses=self._survives_losses(),
        )
        files = RunFilesCallback(
            progress, self._num_rounds, self._sync_every, tokens or examples, end_of=self._progress_at_end
        )
        trainer.add_callback(files)  # a Trainer also calls callbacks added during an event

    @staticmethod
    def _show_round(trainer: Trainer, state: TrainerState) -> None:
        """Reports a synchronisation before the first step to the launcher."""
        for one in trainer.callback_handler.callbacks:
            if isinstance(one, RunFilesCallback):
                one.show_round(state)

    def _survives_losses(self) -> bool:
        """Returns whether the others go on when one of them is lost."""
        return False

    def _num_rounds(self) -> int:
        """Returns the number of completed rounds."""
        return 0

    def _progress_at_end(self) -> dict[str, str]:
        """Returns what the launcher is told when training ends; see `Progress`."""
        return {"state": "stopped" if self.stopped else "done"}

    def _end_early(self, control: TrainerControl) -> None:
        """Makes the Trainer save a checkpoint of this step and stop."""
        self._ends_early = True
        control.should_save = True
        control.should_evaluate = False
        control.should_training_stop = True

    def _end(self, waits: bool = True) -> None:
        self._replaced.close()
        self._stop.uninstall(waits)
        self._checkpoints = None

    def _warn_if_short(self, state: TrainerState) -> None:
        """Warns if its data or another callback ended training early: the other islands do not know of it."""
        if state.global_step < state.max_steps:
            logger.warning(
                "training ended after %d of %d steps: another callback ended it, or the data did, on this %s alone. "
                "To end all %ss early, call stop() of this callback on each",
                state.global_step,
                state.max_steps,
                self._noun,
                self._noun,
            )

    def _need_record(self) -> R:
        assert self._record is not None, "on_train_begin has not run"
        return self._record
