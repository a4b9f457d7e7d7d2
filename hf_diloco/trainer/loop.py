"""Integration with a hand-written Accelerate loop, modelled on Accelerate's `LocalSGD`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator

from hf_diloco.config.base import choose_config
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, DiLoCoError, MissedRoundError, StopRequested
from hf_diloco.inner import open_shards
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts, facts_given
from hf_diloco.outer.checkpoint import RECORD, find_complete, last_of_earlier_round, read_index
from hf_diloco.outer.saved_state import save_state
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.open import abandon_last, open_session
from hf_diloco.rounds.session import BaseSession
from hf_diloco.trainer.arguments import check_count, check_prepared, check_weight, path_given, settings_of
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from hf_diloco.trainer.progress import Progress, Speed, launchers_folder
from hf_diloco.trainer.record import IslandRecord
from hf_diloco.trainer.refusals import refuse
from hf_diloco.trainer.saving import check_folder, check_saving, save_accelerator, weights_name
from hf_diloco.trainer.stop import StopFlag, launchers_stop_file
from hf_diloco.trainer.views import HasOuterWeights

logger = logging.getLogger("hf_diloco")


class OuterLoop(HasOuterWeights):
    """Synchronises a model with the other islands every `sync_every` optimizer steps of a hand-written loop.

        with OuterLoop(accelerator, model, optimizer, config) as outer:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...; optimizer.step(); optimizer.zero_grad(); outer.step()

    Args:
        accelerator: the Accelerator that prepared `model` and `optimizer`.
        model: the prepared model.
        optimizer: the prepared optimizer.
        config: the outer loop's settings; default: `DiLoCoConfig()`.
        fingerprint: further facts that must be equal on all islands.
        output_dir: where this island writes checkpoints and `metrics.jsonl`, different on every island of a machine.
            Without it the record is in the launcher's folder, if `hf-diloco launch` started this process.
        resume_from: a folder that `save_state` wrote to; load everything else from it first. For checkpoints of
            `save_checkpoint` see `common_checkpoint`.
        num_steps: optimizer steps that the loop takes; must be equal on all islands.
        num_rounds: the run's number of rounds, where islands come and go; see `is_over`. Default: the number of
            rounds in `num_steps`, else no limit; without a limit `outer_momentum: auto` assumes many rounds.

    Raises:
        TypeError: an argument has the wrong type.
        ConfigError: `optimizer` was not prepared, or trains another model; a count is not a positive integer, or a
            folder no path; on entering: the Accelerator has a setting that the outer loop does not support.
        RendezvousError, FingerprintError, UnsupportedError, CheckpointError: on entering.

    Attributes:
        global_step: optimizer steps taken, including those before a resume.
        report: the last round's figures; None before the first round.
        stopped: whether the loop ends early on request; see `should_stop`.
    """

    _shown: ClassVar[Progress | None] = None
    """What the launcher shows: of several loops, the one entered first."""

    NOT_BEGUN = "OuterLoop is a context manager: use it as `with OuterLoop(...) as outer:`"

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        config: DiLoCoConfig | None = None,
        *,
        fingerprint: Facts | None = None,
        output_dir: str | Path | None = None,
        resume_from: str | Path | None = None,
        num_steps: int | None = None,
        num_rounds: int | None = None,
    ) -> None:
        super().__init__()
        self.config = choose_config(DiLoCoConfig, config, {}, "OuterLoop(..., DiLoCoConfig(sync_every=500))")
        check_prepared(accelerator, model, optimizer)
        self.report: SyncReport | None = None
        self.stopped = False
        self._accelerator = accelerator
        self._model = accelerator.unwrap_model(model)
        self._optimizer = optimizer
        self._facts: Facts = facts_given(fingerprint)
        own = path_given("OuterLoop", "output_dir", output_dir)
        self._output_dir = own and own.absolute()  # before a script changes directory
        self._folder = self._output_dir or Path(f"island-{self.config.island}").absolute()
        self._resume_from = path_given("OuterLoop", "resume_from", resume_from)
        self._num_steps = check_count("num_steps", num_steps)
        self._num_rounds = check_count("num_rounds", num_rounds)
        if num_steps is not None and num_rounds is None:
            self._num_rounds = count_rounds(self.config, num_steps) or None
        self.global_step = 0
        self._stop = StopFlag(launchers_stop_file())
        self._heeds_stop = self._has_failed_together = False
        self._checkpoints: CheckpointFolder | None = None  # once the `with` block has begun
        self._record = IslandRecord(None)
        self._progress = Progress(None, 0)
        self._speed = Speed()
        self._seen = 0.0  # examples or tokens since the last optimizer step, for `weight_by`

    def common_checkpoint(self) -> Path | None:
        """Meets the other islands, and agrees on the round to resume from. Call it on all ranks, before the `with`.

            if checkpoint := outer.common_checkpoint():
                accelerator.load_state(checkpoint)
            with outer: ...

        Returns:
            The checkpoint that the loop then resumes from: of those that `save_checkpoint` wrote to `output_dir`, the
            newest complete one of the newest round that all islands have a checkpoint of. Where islands come and go,
            this island's newest. None to start from scratch.

        Raises:
            CheckpointError: the islands have checkpoints, but of no common round.
            RendezvousError, DuplicateIslandError, ConfigError: this island cannot meet the others.
        """
        if self._checkpoints is not None:
            raise ConfigError("this OuterLoop was entered before: call common_checkpoint() first, on a new OuterLoop")
        self._resume_from = self._meet().common_checkpoint(self._folder)
        return self._resume_from

    def __enter__(self) -> OuterLoop:
        if self._checkpoints is not None:
            raise ConfigError("this OuterLoop was entered before: make another one for another loop")
        session = self._meet()
        with self._leaving_on_error():
            self._begin(session, open_shards(self._model, self._optimizer, session.island.size))
        session.is_inside = True
        return self

    def _meet(self) -> BaseSession:
        if self._session is None or self._session.has_left:
            refuse(settings_of(self._accelerator, self._optimizer), "loop")
            island = IslandGroup(timeout=self.config.longest_wait)
            abandon_last(self.config, island)  # of a loop that was never entered, in a process that lives on
            self._session = open_session(self.config, island, self._is_asked_to_stop, folder=self._folder)
        return self._session

    def _begin(self, session: BaseSession, shards: Shards) -> None:
        session.num_steps = self._num_steps
        session.num_rounds = self._num_rounds
        session.join(shards, self._folder, self._facts, self._resume_from)
        if self._resume_from is not None:
            self.global_step = read_index(self._resume_from).global_step
        needed = partial(last_of_earlier_round, self.global_step) if self.config.goes_back_together else None
        deletes, anew = self._accelerator.is_local_main_process, self._resume_from is None
        if session.island.is_leader:
            self._show_progress()
        alone = self._record.check_alone
        self._checkpoints = CheckpointFolder(
            self._folder, session.island, RECORD, find_complete, needed, alone, deletes, anew
        )
        self._record.start(self.global_step, session, shards, None, resumed=self._resume_from is not None)
        if session.is_over and self.global_step != self._num_steps:
            text = "the run at %s ended with round %d: for another one give another rendezvous"
            logger.warning(text, self.config.rendezvous, session.outer.round)
        if session.is_due(is_last=self._has_taken_all):  # a round was due at the checkpoint, but failed
            self._try_advance(session, is_last=self._has_taken_all)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        self._need_session().is_inside = False
        if error is not None:
            self._fail(error)
            return
        with self._leaving_on_error():
            self._end()

    def _end(self) -> None:
        session = self._need_session()
        self._stop.uninstall()
        if not self.stopped and session.is_due(is_last=True):
            self._try_advance(session, is_last=True)
        if not self.stopped:
            session.conclude()
        self._record.end(self.global_step, session.outer, run_is_over=session.is_over)
        self._record.close()
        self._show_end(state="stopped" if self.stopped else "done")
        session.leave(finished=not self.stopped)

    def _fail(self, error: BaseException) -> None:
        """Leaves the run. If only this rank may have failed, it does not wait for the island's other ranks."""
        session = self._session
        assert session is not None, "only an entered loop fails"
        is_alone = session.island.size > 1 and not self._has_failed_together
        self._stop.uninstall(waits=not is_alone)
        self._record.close()
        self._show_end(state="failed", message=str(error) or type(error).__name__)
        leave = session.hang_up if is_alone else session.abandon
        if not session.has_left:
            leave()

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Calls `_fail` on errors and interrupts before the first step and after the last: `__exit__` does not."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    @property
    def on_boundary(self) -> bool:
        """Whether the model holds the outer parameters, equal on all islands."""
        return self._need_session().outer.on_boundary

    def step(self, weight: float | None = None) -> SyncReport | None:
        """Counts an optimizer step and synchronises if a round is due. Call it after `optimizer.step()`.

        Calls during gradient accumulation do not count as steps.

        Args:
            weight: examples or tokens of this step, over all ranks; required unless `weight_by` is "uniform".

        Returns:
            The figures of the round that ended with this step, if one did; `report` has those of the last round.

        Raises:
            ExchangeError: an island was lost that must be there, or has what this one needs. Saving still works.
            DivergedError, DuplicateIslandError, ForgedError, UnsupportedError: this island cannot go on.
            ConfigError: the weight is missing or negative; or the call is after the loop or inside `outer_weights()`.
        """
        session = self._need_session()
        if session.has_left:
            raise ConfigError("step() after the `with` block of OuterLoop: the other islands are gone; call it inside")
        if self._shows_outer:
            raise ConfigError("step() within outer_weights(), whose end restores the earlier weights: train outside")
        unit = self.config.weight_by
        if weight is None and unit != "uniform":
            raise ConfigError(f"weight_by={unit!r} needs step(weight=number of {unit})")
        number = check_weight(weight)
        self._seen += number
        if not self._accelerator.sync_gradients:
            session.outer.add_weight(number)
            return None
        self.global_step += 1
        session.outer.count_step(number)
        rate = self._speed.count(1.0 if unit == "uniform" else self._seen)
        self._seen = 0.0
        if not session.is_due(is_last=self._has_taken_all):
            self._update_progress(state="training", tokens_per_second=rate)
            return None
        self._update_progress(state="syncing", tokens_per_second=rate)
        report = self._try_advance(session, is_last=self._has_taken_all)
        self._update_progress(state="training")
        return report

    @property
    def _has_taken_all(self) -> bool:
        return self.global_step == self._num_steps

    def should_stop(self) -> bool:
        """Whether this island was asked to stop: by SIGTERM or Ctrl-C, sent to it or to `hf-diloco launch`.

        Call it after each `step()`, on all ranks: all get the same answer after the same optimizer step. If it is
        true, save and leave the loop. After the first call, these signals no longer end the process; a second Ctrl-C
        does.
        """
        session = self._need_session()
        if session.has_left:
            return self.stopped
        if not self._heeds_stop:
            self._heeds_stop = True
            self._stop.install(session.island)
            (OuterLoop._shown or self._progress).update(can_stop=True)  # whichever of its loops a script asks
        if self._accelerator.sync_gradients and self._stop.agreed() and not self._has_taken_all:
            self.stopped = True
        return self.stopped

    def _is_asked_to_stop(self) -> bool:
        """Whether to stop waiting for other islands."""
        return self._heeds_stop and self._stop.is_requested()

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is complete. End the loop then: further steps do not count."""
        return self._need_session().is_over

    def save_state(self, folder: str | Path) -> None:
        """Writes only the outer state into `folder`. Call it on all ranks; save everything else yourself.

        Raises:
            CheckpointError: on every rank, if one cannot write. Training can continue.
            ConfigError: `folder` is no path; or the call is inside `outer_weights()`.
        """
        to = check_folder("save_state", folder)
        self._begin_save("save_state")
        self._write_outer(to, is_last=False)
        self._note_saved(to)

    def save_checkpoint(self, limit: int | None = None, write: Callable[[Path], object] | None = None) -> Path | None:
        """Writes `output_dir`/checkpoint-N after N steps, atomically, for `common_checkpoint`.

        Call it on all ranks, after `step()`. The checkpoint holds the files of `accelerator.save_state` and the outer
        state.

        Args:
            limit: how many checkpoints to keep: the newest, and over `tcp://` one of an earlier round, to which all
                islands may have to go back. Default: keep all.
            write: writes model, optimizer and data position into a folder, on all ranks, instead of the Accelerator.

        Returns:
            The checkpoint; None if it cannot be written, which is logged. Training can continue.

        Raises:
            CheckpointError: `write` raised an error on another rank, which the message names.
            DuplicateIslandError: another process has begun to train in `output_dir`; nothing was written.
            ConfigError: the limit is not a positive integer, or `write` no function; the Accelerator names its
                checkpoints itself; or the call is inside `outer_weights()`.
        """
        if self._checkpoints is None:
            raise ConfigError(self.NOT_BEGUN)
        limit = check_saving(self._accelerator, limit, write)
        self._begin_save("save_checkpoint")
        checkpoint = self._checkpoints.path(self.global_step)
        self._checkpoints.begin(checkpoint, partial(save_accelerator, self._accelerator, checkpoint, write))
        saved = checkpoint if self._checkpoints.complete(checkpoint, self._write_outer, limit) else None
        self._note_saved(saved)
        return saved

    def _begin_save(self, call: str) -> None:
        if self._shows_outer:
            raise ConfigError(f"{call}() within outer_weights(), of weights that do not train: save outside")
        self._update_progress(state="saving")
        self._drain()

    def _write_outer(self, folder: Path, is_last: bool = True) -> None:
        data = {"steps": self.global_step, "weights": weights_name(self._accelerator, self._model)}
        save_state(self._need_session().outer, folder, self.global_step, data, is_last)

    def _note_saved(self, folder: Path | None) -> None:
        if folder is not None:
            self._record.write("save", self.global_step, path=folder.name)
        self._speed.restart()
        self._update_progress(state="training")

    def _try_advance(self, session: BaseSession, is_last: bool) -> SyncReport | None:
        try:
            reports = session.advance(is_last)
        except StopRequested:
            self.stopped = True
            return None
        except MissedRoundError as error:
            logger.warning("%s", error)
            self._record.miss(self.global_step, session, error)
            return None
        except DiLoCoError:  # on all ranks of the island
            self._has_failed_together = True
            raise
        for report in reports:
            self._note(report)
        self._record.refuse(self.global_step, session.take_refused())
        return reports[-1] if reports else None

    def _note(self, report: SyncReport) -> None:
        self.report = report
        self._record.sync(report, self.global_step)
        if self._accelerator.trackers:
            self._accelerator.log(self._record.take_for_trackers(), step=self.global_step)

    def _show_progress(self) -> None:
        """Opens the island's record, and reports the loop's progress to the launcher."""
        folder = launchers_folder() if OuterLoop._shown is None else None
        record = self._output_dir or folder
        self._record = IslandRecord(record)
        if folder is not None:
            self._progress = OuterLoop._shown = Progress(
                folder,
                self._num_steps or 0,
                unit="steps" if self.config.weight_by == "uniform" else self.config.weight_by,
                record=record,
                noun="island",
                can_stop=False,
                survives_losses=self.config.meets_in_store,
            )
        self._speed.restart()
        self._update_progress(state="training")

    def _show_end(self, **values: Any) -> None:
        self._update_progress(**values)
        if OuterLoop._shown is self._progress:
            OuterLoop._shown = None

    def _update_progress(self, **values: Any) -> None:
        self._progress.update(step=self.global_step, round=self.round, **values)
