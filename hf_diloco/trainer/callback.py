"""Integration with the Hugging Face Trainer: when to synchronise, save, log and stop. No mathematics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.config.advice import warn_about_plan
from hf_diloco.config.base import choose_config
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import (
    DiLoCoError,
    DivergedError,
    DuplicateIslandError,
    ExchangeError,
    ForgedError,
    MissedRoundError,
    StopRequested,
    UnsupportedError,
)
from hf_diloco.inner import open_shards, refuse_foreign_optimizer, unwrap_optimizer
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts, facts_given
from hf_diloco.outer.checkpoint import RECORD, find_complete, last_of_earlier_round
from hf_diloco.outer.saved_state import save_state
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.open import abandon_last, open_session
from hf_diloco.rounds.session import BaseSession
from hf_diloco.trainer.arguments import (
    check_arguments,
    check_tokens,
    examples_per_step,
    folder_of,
    name_evaluated,
    path_given,
    saving_facts,
    tokens_per_step,
)
from hf_diloco.trainer.base import RunCallback
from hf_diloco.trainer.frames import find_resumed, find_trainer, move_before_trackers
from hf_diloco.trainer.record import IslandRecord
from hf_diloco.trainer.resuming import check_resumption, data_facts, follow_schedule
from hf_diloco.trainer.saving import describe_model, replaced
from hf_diloco.trainer.views import HasOuterWeights
from hf_diloco.utils.text import counted, plural

logger = logging.getLogger("hf_diloco")

_OWN_OPTIMIZER = (
    "give the Trainer an optimizer of this model's parameters, or leave `optimizers` out, and choose an `optim` that "
    "is not layerwise"
)
_FOLDER = "give the folder, or leave it out, and call trainer.train(resume_from_checkpoint=True)"


class DiLoCoCallback(RunCallback[IslandRecord], HasOuterWeights):
    """Synchronises the model with the other islands every `sync_every` optimizer steps.

        trainer = Trainer(model, args, train_dataset=ds, callbacks=[DiLoCoCallback(sync_every=500)])

    Works with plain PyTorch, DDP, DeepSpeed ZeRO-0/1/2/3 and FSDP2 inside the island. Between synchronisations the
    Trainer runs unchanged. The outer state is saved with every checkpoint of the Trainer and restored when training
    resumes. When an island is lost, or this process is asked to stop (SIGTERM, SIGINT, `stop`), the Trainer finishes
    the step, writes a checkpoint and ends; after a lost island `trainer.train()` then raises `IslandLostError`.

    Args:
        config: the outer loop's settings; or give them as keyword arguments.
        fingerprint: further facts that must be equal on all islands (a tokenizer's hash, a sequence length, ...).
        resume_from_checkpoint: where the outer state is, if not in the folder that training resumes from.
        stop_file: a file whose existence requests a clean stop, as `stop` does.
        **settings: `DiLoCoConfig` fields, instead of `config`.

    Raises:
        ConfigError: a setting is wrong.
        TypeError: `config` or `fingerprint` has the wrong type.

    Attributes:
        config: the settings.
        stopped: whether training ended early on request.
        moved_at_end: whether a round may have changed the weights after the last step, so that earlier evaluations are
            outdated.
    """

    NOT_BEGUN = (
        "training has not begun with this DiLoCoCallback: give it to the Trainer before trainer.train(), not while it "
        "trains, and use outer_weights() during training or after it"
    )

    def __init__(
        self,
        config: DiLoCoConfig | None = None,
        *,
        fingerprint: Facts | None = None,
        resume_from_checkpoint: str | Path | None = None,
        stop_file: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.config = choose_config(DiLoCoConfig, config, settings, "DiLoCoCallback(sync_every=500)")
        RunCallback.__init__(self, stop_file)
        HasOuterWeights.__init__(self)
        self._sync_every = self.config.sync_every
        self._facts = facts_given(fingerprint)
        self._resume_path = path_given("DiLoCoCallback", "resume_from_checkpoint", resume_from_checkpoint, _FOLDER)
        self._failure: DiLoCoError | None = None
        self._tokens_seen = 0
        self._has_joined = False

    def common_checkpoint(self, output_dir: str | Path) -> Path | None:
        """Meets the other islands and agrees on the round to resume from.

        Returns:
            This island's newest checkpoint of the newest round that all islands have a checkpoint of; where they come
            and go, this island's newest. None to start from scratch.

        Raises:
            CheckpointError: the islands have checkpoints, but of no common round.
            RendezvousError, DuplicateIslandError, ConfigError: this island cannot meet the others.
            StopRequested: this island was asked to stop while it waited for them.
        """
        return self._connect(Path(output_dir)).common_checkpoint(Path(output_dir))

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """Reads and verifies every file of a checkpoint that this island is about to resume from.

        Raises:
            CheckpointError: a file is missing or corrupt; the message names it.
        """
        self._connect(Path(checkpoint).parent).check_checkpoint(Path(checkpoint))

    # Trainer events, in the order in which they happen

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves this callback ahead of the trackers, so that they get the metrics that `on_log` adds."""
        super().on_init_end(args, state, control, **kwargs)
        move_before_trackers(self, is_last=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Joins the other islands, restores or creates the outer state, and makes all islands' weights equal."""
        self._failure = None
        move_before_trackers(self, is_last=True)  # `add_callback` comes after `on_init_end`
        with self._giving_back():
            self._join(args, state, control, **kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Counts the step, and runs a round if one is due."""
        session = self._need_session()
        control.should_log |= self._need_record().has_round_for_trackers  # one that a save or evaluation waited for
        if session.is_over:
            self._end_with_the_run(state, control)
            return
        weight = float(examples_per_step(args))
        if self.config.weight_by == "tokens":
            weight = check_tokens(state.num_input_tokens_seen - self._tokens_seen, more.get("model"))
            self._tokens_seen = state.num_input_tokens_seen
        self._outer.count_step(weight)
        if session.is_due(is_last=state.global_step >= state.max_steps):
            self._sync(state, control)
        elif self._stop.agreed():
            self._stop_early(state, control)

    def _for_trackers(self, record: IslandRecord, logs: dict[str, Any], state: TrainerState) -> dict[str, float]:
        if (name := name_evaluated(logs)) is not None and self._holds_outer:
            record.log_outer_loss(float(logs[f"eval_{name}loss"]), name)
        return record.take_for_trackers()

    def _about_weights(self, metrics: dict[str, float]) -> dict[str, Any]:
        return {"weights": "outer" if self._holds_outer else "inner"}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds the outer state to the Trainer's checkpoint; only then are older checkpoints deleted."""
        self._drain()
        super().on_save(args, state, control, **kwargs)

    def _complete(self, checkpoint: Path, state: TrainerState) -> None:
        position = {"epoch": state.epoch, "tokens": state.num_input_tokens_seen, "steps": state.global_step}
        self._need_session().island.on_leader(lambda: self._describe_model(checkpoint))
        save_state(self._outer, checkpoint, state.global_step, {**position, **self._data_facts})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leaves the run; if an error ended training early, `_finish` raises it, or this method without a Trainer."""
        if not (self._failure or self.stopped):
            self._bring_last_steps(state, control)
        self._end()
        took_all = not (self._failure or self.stopped)
        if took_all and not self._outer.on_boundary:
            steps, every = self._outer.steps, self.config.sync_every
            logger.warning(
                "training ended %s after the last synchronisation: the model holds this island's own weights, "
                "not the outer ones. %s",
                counted(steps, "step"),
                f"Let it end after a multiple of sync_every ({every}) steps"
                if steps < every
                else "Rounds were missed: resume this island from its last checkpoint, when the others are there",
            )
        if took_all and not self._need_session().is_over:
            self._warn_if_short(state)
        self._need_record().end(state.global_step, self._outer, run_is_over=self._need_session().is_over)
        self._need_session().leave(finished=took_all, failed=self._failure is not None)
        if self._failure and find_trainer() is None:
            raise self._failure

    # Steps of the above

    def _join(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = find_trainer()
        callbacks = trainer.callback_handler.callbacks if trainer else ()
        optimizer, scheduler = unwrap_optimizer(kwargs["optimizer"]), kwargs.get("lr_scheduler")
        check_arguments(self.config, args, callbacks, optimizer, scheduler, state.is_hyper_param_search)
        refuse_foreign_optimizer(kwargs["model"], kwargs["optimizer"], _OWN_OPTIMIZER)
        shards = open_shards(kwargs["model"], kwargs["optimizer"], args.world_size)
        self._state, self._data_facts = state, data_facts(args, self.config)
        checkpoint = self._resume_path
        if checkpoint is None and state.global_step:
            checkpoint = find_resumed(args, state.global_step)
        if checkpoint is not None:
            check_resumption(checkpoint, shards, args, self.config, state)
        session = self._connect(folder_of(args))
        session.num_steps = state.max_steps
        session.num_rounds = count_rounds(self.config, state.max_steps) or None
        session.tokens_per_step = tokens_per_step(self._facts, examples_per_step(args))
        self._has_joined = True
        saving = saving_facts(args, state, kwargs["train_dataloader"]) if self.config.goes_back_together else {}
        session.join(shards, folder_of(args), {**self._facts, **saving}, checkpoint)
        self._resume_path = None  # not for the next training
        follow_schedule(session, state, scheduler)
        self._describe_model = partial(describe_model, kwargs["model"], kwargs.get("processing_class"))
        self._tokens_seen = state.num_input_tokens_seen
        needed = partial(last_of_earlier_round, state.global_step) if self.config.goes_back_together else None
        self._begin(args, session.island, trainer, RECORD, find_complete, needed, begins_anew=checkpoint is None)
        self.moved_at_end = session.is_over or state.global_step >= state.max_steps  # by a round since the checkpoint
        if trainer is not None:
            self._replace(trainer, "_finalize_training", self._finish)
            self._replace(trainer, "_evaluate", self._evaluate)
        self._record = self._open_record(args, state, shards, resumed=checkpoint is not None)
        if session.speaks_for_all:
            warn_about_plan(session.config, state.max_steps)
        if session.is_due(is_last=state.global_step >= state.max_steps):  # the round before the checkpoint failed
            if trainer is not None:
                self._show_round(trainer, state)
            self._sync(state, control)
            if self._ends_early:
                self._replaced.enter_context(replaced(args, "eval_on_start", False))

    def _on_error(self) -> None:
        """Leaves the run at once, as the process may live on (in a notebook). Only on islands of one rank."""
        if self._session is None or self._session.island.size > 1:
            return
        if not self._session.has_left:
            self._session.abandon()
        self._end()

    def _connect(self, folder: Path) -> BaseSession:
        if self._has_joined and self._session and not self._session.has_left:
            self._session.abandon()  # left from a training that raised, unknown to callbacks
            self._end()
        if self._session is None or self._session.has_left:
            # A rank waits for its leader, which waits for other islands.
            island = IslandGroup(timeout=self.config.longest_wait)
            abandon_last(self.config, island)  # likewise, from another callback
            self._session = open_session(self.config, island, self._stop.is_requested, self._session, folder)
            self._has_joined = False
        return self._session

    def _note(self, report: SyncReport) -> None:
        self._need_record().sync(report, self._state.global_step)

    def _survives_losses(self) -> bool:
        return self.config.meets_in_store

    def _num_rounds(self) -> int:
        return self.round

    def _progress_at_end(self) -> dict[str, str]:
        failure = self._failure
        return {"state": "failed", "message": str(failure)} if failure else super()._progress_at_end()

    @property
    def _outer(self) -> OuterState:
        return self._need_session().outer

    @property
    def _holds_outer(self) -> bool:
        """Whether the model holds the outer parameters."""
        return self._outer.on_boundary or self._shows_outer

    def _evaluated_weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        shows_outer = self.config.eval_weights == "outer" and not self._need_session().has_left
        return self.outer_weights() if shows_outer else nullcontext()

    def _finish(self, trainer: Trainer, finish: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the Trainer's `_finalize_training`, which logs to trackers; then raises what ended training early."""
        output = finish(*args, **kwargs)
        if self._failure:
            raise self._failure
        return output

    def _sync(self, state: TrainerState, control: TrainerControl) -> None:
        try:
            self._run_round(state, control)
        except StopRequested:
            self._stop_early(state, control)
            return
        except MissedRoundError as error:
            self._on_missed(state, error)
        except (DivergedError, ExchangeError, ForgedError, DuplicateIslandError, UnsupportedError) as error:
            if isinstance(error, DivergedError) and not error.is_state_sound:  # write no checkpoint of it
                self._need_session().leave(finished=False, failed=True)
                raise
            logger.error("%s", error)
            self._failure = error
            self._stop_early(state, control)
            return
        if self._stop.agreed():
            self._stop_early(state, control)
        elif self._need_session().is_over and state.global_step < state.max_steps:
            self._end_with_the_run(state, control)

    def _bring_last_steps(self, state: TrainerState, control: TrainerControl) -> None:
        """After missed rounds, runs one more round for the last steps, unless the run is over."""
        if not self.config.meets_in_store or self._outer.on_boundary:
            return
        if self._need_session().is_over:
            self._end_with_the_run(state, control)
            self.moved_at_end = True
            return
        try:
            self._run_round(state, control)
            self.moved_at_end = True
        except StopRequested:
            self.stopped = True
        except MissedRoundError as error:
            self._on_missed(state, error)
        except DiLoCoError as error:
            self._failure = error

    def _on_missed(self, state: TrainerState, error: MissedRoundError) -> None:
        if self._need_session().island.is_leader:
            logger.warning("%s", error)
        self._need_record().miss(state.global_step, self._need_session(), error)

    def _end_with_the_run(self, state: TrainerState, control: TrainerControl) -> None:
        """Ends training with the final model: the other islands have completed the run's last round."""
        self._outer.write_masters()
        text = "the run's %d rounds are complete, after %d of this island's %d steps"
        logger.info(text, self._outer.round, state.global_step, state.max_steps)
        control.should_save = True
        control.should_training_stop = True

    def _run_epoch(self, trainer: Trainer, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Trains, unless the run ended while this island was away: then saves the outer parameters of its end."""
        state = trainer.state
        if state.global_step >= state.max_steps or not self._need_session().is_over:
            return super()._run_epoch(trainer, run, *args, **kwargs)
        with self._giving_back():
            self._end_with_the_run(state, trainer.control)
            trainer._save_checkpoint(kwargs["model"], kwargs["trial"])
            trainer.callback_handler.on_save(trainer.args, state, trainer.control)

    def _run_round(self, state: TrainerState, control: TrainerControl) -> None:
        for report in self._need_session().advance(is_last=state.global_step >= state.max_steps):
            self._note(report)
            control.should_log = True
        self._need_record().refuse(state.global_step, self._need_session().take_refused())

    def _stop_early(self, state: TrainerState, control: TrainerControl) -> None:
        """Ends training after a checkpoint of this step."""
        is_complete = state.global_step >= state.max_steps and self._outer.on_boundary
        self.stopped = self._failure is None and not is_complete
        self._end_early(control)

    def _open_record(
        self, args: TrainingArguments, state: TrainerState, shards: Shards, resumed: bool
    ) -> IslandRecord:
        session, examples = self._need_session(), examples_per_step(args)
        logger.info(
            "island %d of %d, %s, %d %s: %d examples a step on this island, %d on all islands of this size",
            self.config.island,
            self.config.num_islands,
            shards.description,
            session.island.size,
            plural("rank", session.island.size),
            examples,
            examples * self.config.num_islands,
        )
        record = IslandRecord(folder_of(args) if session.island.is_leader else None)
        record.start(state.global_step, session, shards, examples, resumed)
        return record
