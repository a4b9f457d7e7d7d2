"""What the callbacks of a run have in common, whether the Trainer is an island's, a node's or one by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.inner.checkpoints import resume_across_ranks
from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.arguments import examples_per_step
from hf_diloco.trainer.progress import STOP_FILE, Progress, RunFilesCallback, launchers_folder
from hf_diloco.trainer.record import Record
from hf_diloco.trainer.saving import Saving
from hf_diloco.trainer.stop import StopFlag

R = TypeVar("R", bound=Record)


class RunCallback(TrainerCallback, ABC, Generic[R]):
    """Ends training cleanly when asked to, makes checkpoints whole, and keeps the record.

    Args:
        stop_file: a file whose existence asks for a clean end, as `stop` does.

    Attributes:
        stopped: training ended early because it was asked to.
        moved_at_end: the weights changed after the last step: evaluations before that are of other weights.
    """

    def __init__(self, stop_file: str | Path | None) -> None:
        self.stopped = False
        self.moved_at_end = False
        folder = launchers_folder()
        if stop_file is None and folder is not None:
            stop_file = folder / STOP_FILE
        self._stop = StopFlag(Path(stop_file) if stop_file else None)
        self._saving: Saving | None = None
        self._record: R | None = None
        self._sync_every = 0  # steps between rounds, if there are any

    def stop(self) -> None:
        """Asks for a clean end: finish the step, write a checkpoint. May be called from any thread or handler."""
        self._stop.request()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Has DeepSpeed resume from checkpoints of another number of ranks."""
        if args.deepspeed_plugin is not None:
            resume_across_ranks()

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
        find_whole: Callable[[Path], Collection[Path]],
        find_needed: Callable[[Path], Collection[Path]] | None = None,
    ) -> None:
        """From here on signals are wishes, and checkpoints are looked after; see `Saving`."""
        self.stopped = self.moved_at_end = False
        self._stop.install(ranks, during=Trainer.train)
        if self._saving:  # of a training that ended in an error, of which the Trainer tells nobody
            self._saving.end()
        self._saving = Saving(args, ranks, find_whole, trainer, find_needed)
        if trainer is not None:
            self._tell_launcher(args, trainer)

    def _tell_launcher(self, args: TrainingArguments, trainer: Trainer) -> None:
        """Has the launcher of a user's own script see how far training is."""
        folder, handler = launchers_folder(), trainer.callback_handler
        if folder is None or any(isinstance(one, RunFilesCallback) for one in handler.callbacks):
            return
        progress = Progress(folder, trainer.state.max_steps, unit="examples")
        examples = examples_per_step(args)
        # Trainers call what is added while they call others.
        trainer.add_callback(RunFilesCallback(progress, self._num_rounds, self._sync_every, examples, in_script=True))

    def _num_rounds(self) -> int:
        """Synchronisations completed."""
        return 0

    def _end(self) -> None:
        self._stop.uninstall()
        if self._saving:
            self._saving.end()
            self._saving = None

    def _need_record(self) -> R:
        assert self._record is not None, "on_train_begin has not run"
        return self._record


def end_early(control: TrainerControl) -> None:
    """Has the Trainer end after a checkpoint of this step."""
    control.should_save = True
    control.should_evaluate = False
    control.should_training_stop = True


def tell_trackers(added: dict[str, float], logs: dict[str, Any], state: TrainerState) -> None:
    """Adds to what the Trainer logs now, for every tracker."""
    logs.update(added)
    if state.log_history:
        state.log_history[-1].update(added)
