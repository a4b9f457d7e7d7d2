"""The seam to a hand-written Accelerate loop, in the shape of Accelerate's `LocalSGD`."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_diloco.config.base import choose_config
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError, DiLoCoError, MissedRoundError, StopRequested
from hf_diloco.inner import open_shards, refuse_foreign_optimizer, unwrap_optimizer
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts, facts_given
from hf_diloco.outer.checkpoint import read_index
from hf_diloco.outer.saved_state import save_state
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.rounds.open import open_session
from hf_diloco.rounds.round import SyncReport
from hf_diloco.trainer.progress import Progress, Speed, launchers_folder
from hf_diloco.trainer.record import IslandRecord
from hf_diloco.trainer.refusals import refuse
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
        accelerator: what prepared `model` and `optimizer`.
        model: the prepared model.
        optimizer: the prepared optimizer.
        config: the outer loop's settings; default: `DiLoCoConfig()`.
        fingerprint: further facts that must be equal on all islands.
        output_dir: where this island writes checkpoints and `metrics.jsonl`, different on every island of a machine.
            Without it the record is in the launcher's folder, if `hf-diloco launch` started this process.
        resume_from: a folder that `save_state` wrote to; call `accelerator.load_state` first.
        num_steps: optimizer steps that the loop is to take; islands that give unequal numbers are refused.
        num_rounds: rounds that the run is to have, where islands come and go; see `is_over`. Default: as many as
            `num_steps` make, or no limit; `outer_momentum: auto` then takes it that there are many.

    Raises:
        TypeError: an argument is of another kind.
        ConfigError: `optimizer` was not prepared, or trains another model; a count is no whole number; on entering:
            the Accelerator has a setting that does not go with the outer loop.
        RendezvousError, FingerprintError, UnsupportedError, CheckpointError: on entering.

    Attributes:
        global_step: optimizer steps taken, with those before a resume.
        report: the last round's figures, or None before the first.
        stopped: the loop ends early because it was asked to, see `should_stop`.
    """

    _shown: ClassVar[OuterLoop | None] = None
    """The loop that the launcher sees, of several that a script has at a time: the first."""
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
        _check_prepared(accelerator, model, optimizer)
        self.report: SyncReport | None = None
        self.stopped = False
        self._accelerator = accelerator
        self._model = accelerator.unwrap_model(model)
        self._optimizer = optimizer
        self._facts: Facts = facts_given(fingerprint)
        self._output_dir = Path(output_dir) if output_dir else None
        self._folder = self._output_dir or Path(f"island-{self.config.island}")
        self._resume_from = Path(resume_from) if resume_from else None
        self._num_steps = _checked_count("num_steps", num_steps)
        self._num_rounds = _checked_count("num_rounds", num_rounds)
        if num_steps is not None and num_rounds is None:
            self._num_rounds = count_rounds(self.config, num_steps) or None
        self.global_step = 0
        self._stop = StopFlag(launchers_stop_file())
        self._heeds_stop = self._has_failed_together = False
        self._record = IslandRecord(None)
        self._progress: Progress | None = None
        self._speed = Speed()
        self._seen = 0.0  # since the last step, of what `weight_by` counts

    def __enter__(self) -> OuterLoop:
        if self._session is not None:
            raise ConfigError("this OuterLoop was entered before: make another one for another loop")
        refuse(_settings_of(self._accelerator, self._optimizer), "loop")
        island = IslandGroup(timeout=self.config.longest_wait)
        shards = open_shards(self._model, self._optimizer, island.size)
        self._session = open_session(self.config, island, self._is_asked_to_stop, folder=self._folder)
        with self._leaving_on_error():
            self._begin(shards)
        return self

    def _begin(self, shards: Shards) -> None:
        session = self._need_session()
        session.num_steps = self._num_steps
        session.num_rounds = self._num_rounds
        session.join(shards, self._folder, self._facts, self._resume_from)
        if self._resume_from is not None:
            self.global_step = read_index(self._resume_from).global_step
        if session.island.is_leader:
            self._show_progress()
        self._record.start(self.global_step, session, shards, None, None, resumed=self._resume_from is not None)
        if session.is_due(is_last=self._has_taken_all):  # the checkpoint was written when it could not take place
            self._try_advance(is_last=self._has_taken_all)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        if error is not None:
            self._fail(error)
            return
        with self._leaving_on_error():
            self._end()

    def _end(self) -> None:
        session = self._need_session()
        self._stop.uninstall()
        if not self.stopped and session.is_due(is_last=True):
            self._try_advance(is_last=True)
        if not (self.stopped or session.outer.on_boundary):
            logger.warning(
                "the loop ended %d steps after the last synchronisation: the model holds this island's own weights",
                session.outer.steps,
            )
        self._record.end(self.global_step, session.outer, run_is_over=session.is_over)
        self._record.close()
        self._show_end(state="done", message="stopped on request" if self.stopped else "")
        session.leave(finished=not self.stopped)

    def _fail(self, error: BaseException) -> None:
        """Leaves the run. Where an error may be this rank's alone, the others of its island may be anywhere."""
        session = self._need_session()
        is_alone = session.island.size > 1 and not self._has_failed_together
        self._stop.uninstall(waits=not is_alone)
        self._record.close()
        self._show_end(state="failed", message=str(error) or type(error).__name__)
        if session.has_left:
            return
        if is_alone:
            session.hang_up()
        else:
            session.abandon()

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Before the first step and after the last the loop has no other end, also where one interrupts a wait."""
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
        """Counts an optimizer step and, when the round is due, synchronises. Call it after `optimizer.step()`.

        Steps that only accumulate gradients do not count.

        Args:
            weight: examples or tokens that this step saw on all ranks; required unless `weight_by` is "uniform".

        Returns:
            The figures of the round that ended with this step, if one did.

        Raises:
            ExchangeError: an island was lost; nothing was changed, `save_state` still works.
            ConfigError: the weight is missing, negative or not finite; or the loop has ended; or the model shows the
                outer parameters.
        """
        session = self._need_session()
        if session.has_left:
            raise ConfigError("step() after the `with` block of OuterLoop: the other islands are gone; call it inside")
        if self._shows_outer:
            raise ConfigError(
                "step() within outer_weights(), whose end puts back the weights from before: train outside"
            )
        if weight is None and self.config.weight_by != "uniform":
            raise ConfigError(
                f"weight_by={self.config.weight_by!r} needs step(weight=number of {self.config.weight_by})"
            )
        number = _checked(weight)
        self._seen += number
        if not self._accelerator.sync_gradients:
            session.outer.add_weight(number)
            return None
        self.global_step += 1
        session.outer.count_step(number)
        rate = self._speed.count(1.0 if self.config.weight_by == "uniform" else self._seen)
        self._seen = 0.0
        if not session.is_due(is_last=self._has_taken_all):
            self._update_progress(state="training", tokens_per_second=rate)
            return None
        self._update_progress(state="syncing", tokens_per_second=rate)
        report = self._try_advance(is_last=self._has_taken_all)
        self._update_progress(state="training")
        return report

    @property
    def _has_taken_all(self) -> bool:
        """Whether the last step was that of a loop of known length."""
        return self.global_step == self._num_steps

    def should_stop(self) -> bool:
        """Whether this island was asked to end: by SIGTERM or Ctrl-C, also of `hf-diloco launch`.

        Call it after each `step()`, on all ranks: all learn it after the same optimizer step. Where it is true, save,
        and leave the loop. From the first call on the signals no longer end the process; a second Ctrl-C does.
        """
        session = self._need_session()
        if session.has_left:
            return self.stopped
        if not self._heeds_stop:
            self._heeds_stop = True
            self._stop.install(session.island)
            (OuterLoop._shown or self)._update_progress(can_stop=True)
        if self._accelerator.sync_gradients and self._stop.agreed() and not self._has_taken_all:
            self.stopped = True
        return self.stopped

    def _is_asked_to_stop(self) -> bool:
        """Whether a wait for other islands is to end."""
        return self._heeds_stop and self._stop.is_requested()

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is complete: time to end the loop."""
        return self._need_session().is_over

    def save_state(self, folder: str | Path) -> None:
        """Writes the outer state into `folder`; call it on all ranks, beside `accelerator.save_state`.

        Raises:
            CheckpointError: it cannot be written; on every rank. Training can go on.
        """
        session = self._need_session()
        self._update_progress(state="saving")
        for report in session.settle():
            self._note(report)
        save_state(session.outer, Path(folder), self.global_step, {"steps": self.global_step}, is_last=False)
        self._record.write("save", self.global_step, path=str(folder))
        self._speed.restart()
        self._update_progress(state="training")

    def _try_advance(self, is_last: bool = False) -> SyncReport | None:
        try:
            reports = self._need_session().advance(is_last)
        except StopRequested:
            self.stopped = True
            return None
        except MissedRoundError as error:
            logger.warning("%s", error)
            self._record.miss(self.global_step, self._need_session(), error)
            return None
        except DiLoCoError:  # on all ranks of the island
            self._has_failed_together = True
            raise
        for report in reports:
            self._note(report)
        self._record.refuse(self.global_step, self._need_session().take_refused())
        return reports[-1] if reports else None

    def _note(self, report: SyncReport) -> None:
        self.report = report
        self._record.sync(report, self.global_step)
        if self._accelerator.trackers:
            self._accelerator.log(self._record.take_for_trackers(), step=self.global_step)

    def _show_progress(self) -> None:
        """Opens the island's record, and has the launcher see how far the loop is."""
        folder = launchers_folder() if OuterLoop._shown is None else None
        record = self._output_dir or folder
        self._record = IslandRecord(record)
        if folder is not None:
            OuterLoop._shown = self
            unit = "steps" if self.config.weight_by == "uniform" else self.config.weight_by
            self._progress = Progress(
                folder, self._num_steps or 0, unit=unit, record=record, noun="island", can_stop=False
            )
        self._speed.restart()
        self._update_progress(state="training")

    def _show_end(self, **values: Any) -> None:
        self._update_progress(**values)
        if OuterLoop._shown is self:
            OuterLoop._shown = None

    def _update_progress(self, **values: Any) -> None:
        if self._progress is not None:
            self._progress.update(step=self.global_step, round=self.round, **values)


def _checked(weight: Any) -> float:
    """A step's weight as a number."""
    try:
        number = float(weight or 0.0)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        number = math.nan
    if isinstance(weight, str) or not 0 <= number < math.inf:
        raise ConfigError(f"step(weight={weight!r}): give the number of examples or tokens of the step, 0 or more")
    return number


def _checked_count(name: str, value: Any) -> int | None:
    """A number of steps or rounds; None if it is not known."""
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = 0
    if number is not None and (number < 1 or isinstance(value, bool)):
        raise ConfigError(f"OuterLoop(..., {name}={value!r}): give a whole number from 1 on, or leave it out")
    return number


def _check_prepared(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raises unless these are what they should be, and belong together."""
    call = "call OuterLoop(accelerator, model, optimizer, config)"
    for name, value, kind in (("accelerator", accelerator, Accelerator), ("model", model, nn.Module)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}: {call}")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__} that this Accelerator has not prepared: give what "
            "accelerator.prepare(model, optimizer) returned"
        )
    remedy = "give both as one call of accelerator.prepare(model, optimizer) returned them"
    refuse_foreign_optimizer(model, optimizer, remedy)


def _settings_of(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """What `REFUSALS` names of an Accelerator and of what it has prepared."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return {
        "optim": type(unwrap_optimizer(optimizer)).__name__,
        "fsdp_config": {"version": plugin.fsdp_version} if plugin else None,
        "parallelism_config": accelerator.parallelism_config,
        "ProjectConfiguration.total_limit": accelerator.project_configuration.total_limit,
    }
