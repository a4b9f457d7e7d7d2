"""The checkpoints of a training: what they hold, those that cannot be written, how many stay, their replacement.

No checkpoint goes before a newer one is whole, whatever the clock says. One that cannot be written, because the disk
is full or fails, is told and removed; training goes on, and the next save tries again.
"""

from __future__ import annotations

import copy
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainerState, TrainingArguments, trainer as trainer_module
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_diloco.errors import CheckpointError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.manifest import recover_replaced, set_aside_name
from hf_diloco.trainer.arguments import folder_of
from hf_diloco.utils.files import is_write_failure, reason_of, telling

logger = logging.getLogger("hf_diloco")

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


class Saving:
    """The checkpoints of one training. Collective over the island's ranks.

    Until it ends the Trainer deletes none itself: it ranks them by the clock, and counts those that are not whole.

    Args:
        args: the Trainer's.
        ranks: of the island.
        record: the file in a checkpoint that is written last. One that has it, and cannot be read, may be whole.
        find_whole: the whole checkpoints in a folder, by step; asked on the leader.
        trainer: whose failures to write are met; None where it is not known.
        find_needed: of the whole checkpoints in a folder those that stay besides, since other islands may have no
            newer ones yet; by which of them this training has written.
        replacing: what its end gives back to the Trainer.
    """

    def __init__(
        self,
        args: TrainingArguments,
        ranks: IslandGroup,
        record: str,
        find_whole: Callable[[Path], Collection[Path]],
        trainer: Trainer | None,
        find_needed: Callable[[Path, Collection[Path]], Collection[Path]] | None,
        replacing: ExitStack,
    ) -> None:
        self._args = args
        self._ranks = ranks
        self._record = record
        self._find_all = find_whole
        self._find_needed = find_needed
        self._trainer = trainer
        self._folder = folder_of(args)
        self._limit = max(args.save_total_limit or 0, 0)  # the Trainer takes 0 and less as none
        self._has_failed = False  # the Trainer's part of the checkpoint under way
        self._written: set[Path] = set()
        replacing.enter_context(replaced(args, "save_total_limit", None))
        if trainer is not None:
            self._save = trainer._save_checkpoint
            replacing.enter_context(replaced(trainer, "_save_checkpoint", self._try_save))

    def complete(self, state: TrainerState, write: Callable[[Path], object]) -> bool:
        """Makes the checkpoint of this step whole, now that the Trainer has written its part; only then may others go.

        Args:
            state: the Trainer's.
            write: writes what is missing into the checkpoint, last the record that makes it whole. Raises
                `CheckpointError` on all ranks if one cannot.

        Returns:
            Whether it is whole. If not, that has been said.
        """
        checkpoint = self._path(state)
        if self._has_failed:
            self._has_failed = False
            return False
        try:
            write(checkpoint)
        except CheckpointError as error:
            self._abandon(checkpoint, str(error))
            return False
        self._written.add(checkpoint)
        if self._ranks.is_leader:
            shutil.rmtree(set_aside_name(checkpoint), ignore_errors=True)
        for path in self._ranks.from_leader(self._surplus(checkpoint, state) if self._ranks.is_leader else []):
            if self._args.should_save:
                with suppress(OSError):  # first, so that what is left by whoever is killed here counts as unfinished
                    Path(path, self._record).unlink()
                shutil.rmtree(path, ignore_errors=True)
        return True

    def _path(self, state: TrainerState) -> Path:
        return self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

    # What the Trainer writes

    def _try_save(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's own way to save. A rank that cannot write does all else, so that none waits for it."""
        assert self._trainer is not None
        checkpoint = self._path(self._trainer.state)
        failures: list[str] = []
        self._set_aside(checkpoint)
        with noting_failures(self._trainer, failures):
            self._save(*args, **kwargs)
        met = [failure for of_rank in self._ranks.gather(failures[:1]) for failure in of_rank]
        if met:
            self._has_failed = True
            self._abandon(checkpoint, f"{checkpoint} cannot be written ({met[0]})")

    def _find_whole(self, folder: Path) -> set[Path]:
        return {path for path in self._find_all(folder) if _CHECKPOINT.fullmatch(path.name)}

    def _set_aside(self, checkpoint: Path) -> None:
        """A checkpoint of this step stays until the new one is whole; what is left of an unfinished one goes."""
        if self._ranks.is_leader and checkpoint.is_dir():
            with suppress(OSError):
                if self._is_unfinished(checkpoint, self._find_whole(self._folder)):
                    shutil.rmtree(checkpoint, ignore_errors=True)
                else:
                    shutil.rmtree(set_aside_name(checkpoint), ignore_errors=True)
                    checkpoint.rename(set_aside_name(checkpoint))
        self._ranks.barrier()

    def _abandon(self, checkpoint: Path, reason: str) -> None:
        """Says that a checkpoint could not be written, and removes what there is of it."""
        shutil.rmtree(checkpoint, ignore_errors=True)
        self._ranks.barrier()
        if not self._ranks.is_leader:
            return
        recover_replaced(self._folder, self._find_whole)
        newest = max(self._find_whole(self._folder), key=_step_of, default=None)
        logger.error(
            "%s: make room; the next save tries again. %s",
            reason,
            f"Meanwhile {newest.name} stays the newest checkpoint" if newest else "There is no checkpoint yet",
        )

    # Which others go

    def _surplus(self, newest: Path, state: TrainerState) -> list[str]:
        """Beyond the limit: the whole ones of the lowest steps, and what is older than all that stay, whole or not.

        Those of later steps than this go first: they are left of an earlier training, of which this one went back.
        So what cannot be read for a moment goes only where it would if it were read. What is unfinished goes at once.
        """
        if not self._limit:
            return []
        whole = self._find_whole(self._folder)
        needed = set(self._find_needed(self._folder, self._written)) if self._find_needed else {newest}
        best = {Path(state.best_model_checkpoint)} if state.best_model_checkpoint else set()
        kept = {newest} | needed | best
        last = _step_of(newest)
        ranked = sorted(whole, key=lambda path: (path in kept, _step_of(path) <= last, _step_of(path)), reverse=True)
        num_kept = max(self._limit, len(whole & kept))
        staying = [_step_of(path) for path in ranked[:num_kept] if path not in best]
        oldest = min(staying, default=0) if needed and len(whole) >= self._limit else 0
        others = [
            path
            for path in self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if _CHECKPOINT.fullmatch(path.name)
            and path not in whole
            and (_step_of(path) < oldest or (_step_of(path) < _step_of(newest) and self._is_unfinished(path, whole)))
        ]
        return [str(path) for path in [*ranked[num_kept:], *others] if path not in kept]

    def _is_unfinished(self, checkpoint: Path, whole: Collection[Path]) -> bool:
        """Whether whoever wrote it was killed; not where it cannot be read, perhaps for a moment."""
        try:
            (checkpoint / self._record).stat()
        except FileNotFoundError:
            return checkpoint not in whole
        except OSError:
            return False
        return False


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


# Failures to write inside the Trainer and DeepSpeed


@contextmanager
def noting_failures(trainer: Trainer, failures: list[str]) -> Iterator[None]:
    """Adds what cannot be written to `failures`, and has the Trainer go on as if it had been.

    The steps in which one rank writes and others wait for it afterwards are met one by one; behind the last of them
    no rank waits, and any failure may end the rest.
    """
    with ExitStack() as stack:
        for owner, name in _writing_steps(trainer):
            stack.enter_context(replaced(owner, name, partial(_noting, getattr(owner, name), failures)))
        engine = _engine_of(trainer)
        if engine is not None:
            stack.enter_context(replaced(engine, "save_checkpoint", partial(_save_engine, engine, failures)))
        try:
            yield
        except Exception as error:
            _note(error, failures)


def _engine_of(trainer: Trainer) -> Any:
    return trainer.model_wrapped if trainer.is_deepspeed_enabled else None


def _writing_steps(trainer: Trainer) -> list[tuple[Any, str]]:
    """Owner and name of what one rank writes while, or before, others wait for it."""
    engine = _engine_of(trainer)
    steps: list[tuple[Any, str]] = [(trainer, "_save")]
    if engine is not None:
        writer = engine.checkpoint_engine
        steps += [(writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]
    if trainer.is_fsdp_enabled:
        steps += [(trainer_module, "save_fsdp_model"), (trainer_module, "save_fsdp_optimizer")]
    return steps


def _save_engine(engine: Any, failures: list[str], folder: str, **kwargs: Any) -> None:
    """DeepSpeed's `save_checkpoint`. The file `latest`, which rank 0 writes while others wait, comes after it."""
    type(engine).save_checkpoint(engine, folder, save_latest=False, **kwargs)
    if engine.global_rank == 0:
        _noting(Path(folder, "latest").write_text, failures, f"global_step{engine.global_steps}")


def _noting(call: Callable[..., Any], failures: list[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except CheckpointException as error:  # by which every rank is told what others met in a sharded checkpoint
        for met, _ in error.failures.values():
            _note(met, failures)
    except Exception as error:
        _note(error, failures)


def _note(error: BaseException, failures: list[str]) -> None:
    if not is_write_failure(error):
        raise error
    failures.append(reason_of(error))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute of one object, meanwhile."""
    before: Mapping[str, Any] = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if name in before:
            setattr(owner, name, before[name])


class ModelDescription:
    """Configuration and tokenizer of the model that trains.

    The Trainer writes both with whole models; with sharded checkpoints of FSDP it writes neither.

    Args:
        model: the module, also one whose parameters are sharded; of another library than transformers nothing is
            written.
        processing_class: the tokenizer, if the Trainer has one.
    """

    def __init__(self, model: nn.Module, processing_class: Any = None) -> None:
        self._model: Any = model
        self._processing_class = processing_class

    def complete(self, checkpoint: Path, ranks: IslandGroup) -> None:
        """Writes into a checkpoint what it lacks. Collective over the ranks.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        ranks.on_leader(lambda: self._write(checkpoint))

    def _write(self, checkpoint: Path) -> None:
        if any((checkpoint / name).exists() for name in (_CONFIG, _ADAPTER_CONFIG)):
            return
        with telling(checkpoint):
            checkpoint.mkdir(parents=True, exist_ok=True)
            for adapter in getattr(self._model, "peft_config", {}).values():
                adapter.save_pretrained(str(checkpoint))
            if not hasattr(self._model, "peft_config") and hasattr(self._model, "config"):
                config = copy.deepcopy(self._model.config)
                config.architectures = [_class_name(self._model)]
                config.save_pretrained(str(checkpoint))
            if hasattr(self._processing_class, "save_pretrained"):
                self._processing_class.save_pretrained(str(checkpoint))


def _class_name(model: nn.Module) -> str:
    """The name of the model's class, without the FSDP that `fully_shard` puts before it."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))
