"""What the callbacks of a run have in common, whether the Trainer is an island's, a node's or one by itself."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.inner.checkpoints import resume_across_ranks
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts
from hf_diloco.trainer.arguments import (
    check_launched,
    examples_per_step,
    floats,
    folder_of,
    is_of_training,
    name_evaluated,
    tokens_per_step,
)
from hf_diloco.trainer.progress import Progress, RunFilesCallback, launchers_folder
from hf_diloco.trainer.record import Record
from hf_diloco.trainer.refusals import refuse_out_of_reach, refuse_unknown_layers
from hf_diloco.trainer.saving import Saving
from hf_diloco.trainer.stop import StopFlag, launchers_stop_file
from hf_diloco.trainer.write_failures import replaced

R = TypeVar("R", bound=Record)

logger = logging.getLogger("hf_diloco")


class RunCallback(TrainerCallback, ABC, Generic[R]):
    """Ends training cleanly when asked to, makes checkpoints whole, and keeps the record.

    Args:
        stop_file: a file whose existence asks for a clean end, as `stop` does.

    Attributes:
        has_outer_loop: whether it reads the master weights.
        stopped: training ended early because it was asked to.
        moved_at_end: the weights changed after the last step: evaluations before that are of other weights.
    """

    has_outer_loop: ClassVar[bool] = True
    _noun: ClassVar[str] = "island"
    """What the run has several of."""

    def __init__(self, stop_file: str | Path | None) -> None:
        self._facts: Facts = {}
        self.stopped = False
        self.moved_at_end = False
        self._stop = StopFlag(Path(stop_file) if stop_file else launchers_stop_file())
        self._saving: Saving | None = None
        self._record: R | None = None
        self._replaced = ExitStack()  # what belongs to the Trainer, until training has ended
        self._ends_early = False
        self._sync_every = 0  # steps between rounds, if there are any
        if "deepspeed" in sys.modules:  # it may be added to a Trainer that is made, after `on_init_end`
            resume_across_ranks()

    def stop(self) -> None:
        """Asks for a clean end: finish the step, write a checkpoint. May be called from any thread or handler."""
        self._stop.request()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Has DeepSpeed resume from checkpoints of another number of ranks.

        Raises:
            ConfigError: DeepSpeed is to train in a process that no launcher has started; or it, or FSDP, is told what
                it would fail at.
        """
        if args.deepspeed_plugin is not None:
            check_launched()
            refuse_out_of_reach(args.deepspeed_plugin.deepspeed_config, self.has_outer_loop)
            resume_across_ranks()
        if args.fsdp:
            assert isinstance(args.fsdp_config, dict), "TrainingArguments makes it of whatever it is given"
            refuse_unknown_layers(args.fsdp_config.get("transformer_layer_cls_to_wrap"), kwargs["model"])

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Has nothing more evaluated or saved where training ends early: an epoch ends then, too."""
        if self._ends_early:
            control.should_evaluate = control.should_save = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keeps the record, and adds to what the Trainer logs, for every tracker."""
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
        """What goes with `logs`."""
        return {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records an evaluation, and which weights were evaluated."""
        metrics = kwargs.get("metrics") or {}
        if self._record and name_evaluated(metrics) is not None:
            weights = self._about_weights(metrics)
            self._record.write("eval", state.global_step, **weights, **floats(metrics))

    def _about_weights(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Which weights these metrics are of."""
        return {"weights": "inner"}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Makes the checkpoint whole; only then may an older one go."""
        assert self._saving is not None, "on_train_begin has not run"
        if self._saving.complete(state, lambda checkpoint: self._complete(checkpoint, state)):
            name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._need_record().write("save", state.global_step, path=name)

    @abstractmethod
    def _complete(self, checkpoint: Path, state: TrainerState) -> None:
        """Writes into a checkpoint of the Trainer's what it lacks. Collective over the ranks."""

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
        """From here on signals are wishes, and checkpoints are looked after; see `Saving`."""
        self.stopped = self.moved_at_end = self._ends_early = False
        if self._saving:  # of a training that ended in an error, of which the Trainer tells nobody
            self._end()
        self._stop.install(ranks, during=Trainer.train)
        self._saving = Saving(args, ranks, record, find_whole, trainer, find_needed, self._replaced, begins_anew)
        if trainer is not None:
            self._replace(trainer, "_run_epoch", self._run_epoch)
            self._tell_launcher(args, trainer)

    def _replace(self, trainer: Trainer, name: str, ours: Callable[..., Any]) -> None:
        """Until training has ended `ours` is called instead of a method, with Trainer, method and arguments."""
        self._replaced.enter_context(replaced(trainer, name, partial(ours, trainer, getattr(trainer, name))))

    def _evaluate(self, trainer: Trainer, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The evaluation that the Trainer makes while it trains, of the weights that the run is about."""
        with self._giving_back(), self._evaluated_weights(trainer):
            return evaluate(*args, **kwargs)

    def _evaluated_weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        """The model holds them inside; or what it holds, if another callback took this one's place after an error."""
        return nullcontext()

    def _run_epoch(self, trainer: Trainer, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Skips the epoch where there is no step to take.

        Resumed after the last step, the Trainer would take one more before it looks.
        """
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return None
        with self._giving_back():
            return run(*args, **kwargs)

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Gives back what belongs to the Trainer where it ends in an error, which it tells no callback.

        In an epoch, or in the evaluation before the first one.
        """
        try:
            yield
        except BaseException:
            self._replaced.close()
            self._on_error()
            raise

    def _on_error(self) -> None:
        """An error ended training, on this rank at least."""

    def _tell_launcher(self, args: TrainingArguments, trainer: Trainer) -> None:
        """Has the launcher of a user's own script see how far training is."""
        folder, handler = launchers_folder(), trainer.callback_handler
        if folder is None:
            return
        if any(isinstance(one, RunFilesCallback) and one.is_in_script for one in handler.callbacks):
            return  # of an earlier training
        examples = examples_per_step(args)
        tokens = tokens_per_step(self._facts, examples)
        unit = "examples" if tokens is None else "tokens"
        progress = Progress(folder, trainer.state.max_steps, unit=unit, record=folder_of(args), noun=self._noun)
        files = RunFilesCallback(
            progress, self._num_rounds, self._sync_every, tokens or examples, was_stopped=lambda: self.stopped
        )
        trainer.add_callback(files)  # Trainers call what is added while they call others

    def _num_rounds(self) -> int:
        """Synchronisations completed."""
        return 0

    def _end_early(self, control: TrainerControl) -> None:
        """Has the Trainer end after a checkpoint of this step."""
        self._ends_early = True
        control.should_save = True
        control.should_evaluate = False
        control.should_training_stop = True

    def _end(self) -> None:
        self._replaced.close()
        self._stop.uninstall()
        self._saving = None

    def _need_record(self) -> R:
        assert self._record is not None, "on_train_begin has not run"
        return self._record


def warn_if_short(state: TrainerState, unit: str) -> None:
    """What else may end training, of which the others know nothing: its data, or another callback."""
    if state.global_step < state.max_steps:
        logger.warning(
            "training ended after %d of %d steps: another callback ended it, or the data did, on this %s alone. To "
            "end all %ss early, call stop() of this callback on each",
            state.global_step,
            state.max_steps,
            unit,
            unit,
        )
