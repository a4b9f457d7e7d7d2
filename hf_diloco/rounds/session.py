"""The session interface that the Trainer's callback and the Accelerate loop use."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DiLoCoError, StopRequested
from hf_diloco.inner.base import Shards
from hf_diloco.inner.fragments import FragmentShards, cut_into_fragments, describe_fragments
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import MAX_STEPS, Facts
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import Phase
from hf_diloco.methods.outer import find_method
from hf_diloco.outer.checkpoint import files_of
from hf_diloco.outer.manifest import check_contents
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.background import Background
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution, Rounds
from hf_diloco.utils.text import counted

logger = logging.getLogger("hf_diloco")


class BaseSession(ABC):
    """One rank's part in the run: joining, rounds, leaving.

    Every method is collective over the island's ranks. A round that fails changes nothing: parameters and outer state
    are changed only after all participants have agreed on the average.

    Attributes:
        outer: this rank's outer state, and the inner steps since the last round.
        chosen: describes the values that `join` chose for "auto" settings, and their source.
        has_left: `leave` was called; figures stay readable.
        has_finished: the island left after it had taken all its steps.
        is_inside: a `with` block of a loop uses it, and has not ended.
        members: heartbeats of this island and the others; on the island's leader, once it has entered.
        num_steps: inner steps that this island is to take, if known; set before `join`.
        num_rounds: rounds that the run is to have, if known; set before `join`.
        tokens_per_step: of the whole island, if known; set before `join`.
        rounds: carries out rounds; set by `join`.
    """

    rounds: Rounds
    members: Members | None = None
    _went_on: tuple[float, int] | None = None  # time and inner steps when training last resumed; since `join`
    _is_heard = True  # other islands wait for this one's phase

    def __init__(self, config: DiLoCoConfig, island: IslandGroup) -> None:
        self.config = config
        self.island = island
        self.outer = OuterState(config, island)
        # A thread's messages inside the island must not mix with the training's.
        self._overlaps, self._is_streaming = config.overlaps, config.is_streaming
        self._talk = IslandGroup(timeout=config.longest_wait) if self._overlaps else island
        self._background = Background(self.outer, self._carry_out_behind)
        self._pulls = find_method(config.method).pulls
        self._failure: DiLoCoError | None = None  # of a round that `drain` waited for
        self._reports: list[SyncReport] = []  # kept for the next call if a round fails
        self.has_left = self.has_finished = self.is_inside = False
        self.chosen = ""
        self.num_steps: int | None = None
        self.num_rounds: int | None = None
        self.tokens_per_step: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the other islands have ended the run: there will be no further round."""
        return False

    @property
    def has_common_end(self) -> bool:
        """Whether the run ends for all islands with a known round, whatever their numbers of steps."""
        return False

    @property
    def speaks_for_all(self) -> bool:
        """Whether this rank, alone of all islands' ranks, logs messages that hold for all islands."""
        return self.island.is_leader and self.config.island == 0

    @abstractmethod
    def common_checkpoint(self, output_dir: Path) -> Path | None:
        """Returns the checkpoint in `output_dir` that this island must resume from; None to start afresh.

        Raises:
            CheckpointError: the islands' checkpoints do not match.
        """

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Checks every file of a checkpoint before this island resumes from it.

        Raises:
            CheckpointError: a file is corrupt; the message names it; on every rank.
        """
        with self._leave_on_error():
            check_contents(checkpoint, files_of, self.island)
        self.outer.checked = checkpoint

    @abstractmethod
    def join(self, shards: Shards, folder: Path, facts: Facts | None = None, checkpoint: Path | None = None) -> bool:
        """Joins the other islands, checks that all train the same thing, and makes their weights equal.

        Args:
            shards: this rank's master weights.
            folder: where this island writes; no two islands may share it.
            facts: further values that must be equal on all islands, by name.
            checkpoint: continue from its outer state; the masters must have been restored already.

        Returns:
            Whether the masters were replaced by the run's.

        Raises:
            FingerprintError, RendezvousError, CheckpointError, IslandLostError.
        """

    def _show_standing(self) -> None:
        """Starts to report this island's progress in its heartbeats."""
        self._went_on = time.monotonic(), self.outer.num_steps
        self._refresh_standing()

    def _refresh_standing(self) -> None:
        """Called before each heartbeat. Updates round, steps and tokens per second since the last round; the latter
        stays unchanged before the first step after a round, and during a round."""
        if self.members is None or self._went_on is None:
            return
        standing, (since, num_steps) = self.members.standing, self._went_on
        standing.round, standing.steps = self.outer.round, self.outer.steps
        elapsed, taken = time.monotonic() - since, self.outer.num_steps - num_steps
        if taken and elapsed > 0 and standing.phase != "syncing":
            standing.tokens_per_second = taken * (self.tokens_per_step or 0) / elapsed

    def _give_heartbeats(self, members: Members) -> None:
        members.standing.num_ranks = self.island.size
        members.refresh = self._refresh_standing
        members.start_heartbeats()

    def _set_phase(self, phase: Phase) -> None:
        if self.members is None or self._went_on is None:
            return
        self._refresh_standing()  # the speed until now
        if self._is_heard:
            self.members.set_phase(phase)
        else:
            self.members.standing.phase = phase

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        self._set_phase("syncing")
        try:
            yield
        finally:
            self._set_phase("training")

    def _go_on(self) -> None:
        self._background.last_end = time.monotonic()
        self._went_on = self._background.last_end, self.outer.num_steps

    @property
    def _holds_up_training(self) -> bool:
        """Whether inner steps are waiting for a round that should have overlapped with them, so for late islands."""
        return self._background.is_installing and self._pulls

    def _choose(self) -> None:
        """Replaces "auto" settings by values, now that the number of rounds is known."""
        chosen = find_method(self.config.method).choose(self.config, self.num_rounds)
        self.chosen = chosen.source
        self.config = self.outer.config = self.config.model_copy(update=dict(chosen.values))
        if chosen.source and self.island.is_leader:
            logger.info("chosen: %s", chosen.source)

    def _steps_fact(self) -> dict[str, int]:
        """Returns the number of steps as a fact: it must be equal on all islands that know theirs."""
        return {} if self.num_steps is None else {MAX_STEPS: self.num_steps}

    def _cut(self, shards: Shards) -> list[Shards]:
        """Returns the shards of each fragment."""
        if not self._is_streaming:
            return [shards]
        config = self.config
        names = cut_into_fragments(shards.sizes, config.num_fragments, config.fragment_order, config.fragment_patterns)
        if self.island.is_leader and len(names) > 1:
            logger.info("%s", describe_fragments(names, shards.sizes))
        return [FragmentShards(shards, part) for part in names]

    def is_due(self, is_last: bool = False) -> bool:
        """Whether `advance` must be called after the last counted inner step; `is_last`: of the whole run."""
        if self._failure or self.outer.is_due or self.outer.next_install() is not None:
            return True
        return is_last and self._is_streaming and self._is_ahead

    @property
    def _is_ahead(self) -> bool:
        """Whether the masters hold progress that no round has used yet."""
        return not self.outer.on_boundary

    def advance(self, is_last: bool = False) -> list[SyncReport]:
        """Begins the round that is due, and ends the rounds that are due to land; without overlap, calls `sync`.

        After the last step of a streaming run, synchronises all fragments: the masters then hold the outer parameters.

        Returns:
            The figures of the rounds that ended.

        Raises:
            As `sync`.
        """
        self._raise_failure()
        if self._pulls and self.outer.steps and (self.outer.is_due or is_last):
            self.outer.current.install_in = 0  # also if no round is in flight, as at the start
        while (fragment := self.outer.next_install(at_once=is_last)) is not None:
            self._reports += self._background.install(fragment)
        if is_last and self._is_streaming:
            while self.outer.steps and not self.is_over:
                self._reports.append(self.sync())
        elif self._overlaps:
            if self.outer.is_due and not self._has_begun_all:
                self._background.begin_due_round()
        elif (self.outer.is_due or is_last) and not self.is_over:
            self._reports.append(self.sync())  # after the last step: steps of missed rounds may be left
        return self._take_reports()

    def conclude(self) -> None:
        """Ends a loop after its last step: if the run is over, installs its outer parameters in the masters.

        Logs a warning if steps after the last round were dropped, or if the masters hold this island's own weights.
        """
        if self.outer.on_boundary:
            return
        steps = counted(self.outer.steps, "step")
        text = "the loop ended %s after the last synchronisation, round %d: the model holds this island's own weights"
        if self.is_over:
            self.outer.write_masters()
            text = "the loop's last %s are not in the run, which ended with round %d: the model holds its result"
        if self.island.is_leader:
            logger.warning(text, steps, self.outer.round)

    @property
    def _has_begun_all(self) -> bool:
        """Whether the run's last round has begun, so that no other may begin."""
        return False

    def _take_reports(self) -> list[SyncReport]:
        reports, self._reports = self._reports, []
        return reports

    def _carry_out_behind(self, own: Contribution) -> SyncReport:
        with self._syncing():
            return self.rounds.carry_out(own)

    def drain(self) -> list[SyncReport]:
        """Waits for the rounds in flight, so that a checkpoint can be written. They still land when they are due.

        Afterwards no traffic to other islands is in flight.

        Returns:
            The figures of the rounds that ended. A failure is raised by the next `advance`.
        """
        reports, failure = self._background.drain()
        self._reports += reports
        self._failure = failure or self._failure
        return self._take_reports()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def take_refused(self) -> dict[int, str]:
        """Returns islands whose contributions were refused since the last call, with the reason; on the leader."""
        return {}

    def sync(self) -> SyncReport:
        """Runs one round while training waits; see `_sync` of the session's class."""
        with self._syncing():
            try:
                return self._sync()
            finally:
                self._go_on()

    @abstractmethod
    def _sync(self) -> SyncReport:
        """Implements `sync`.

        Raises:
            StopRequested: this island was asked to stop while it waited.
            ExchangeError: the round did not take place.
            DivergedError: islands that should be equal are not.
        """

    @abstractmethod
    def leave(self, finished: bool, failed: bool = False) -> None:
        """Announces that this island leaves, so that no island waits for it, and closes all connections.

        Args:
            finished: this island has taken all its steps; otherwise it stops early.
            failed: it stops because of an error, not because it was asked to stop.
        """

    def abandon(self) -> None:
        """Leaves early without offering anything, because the model may be in any state."""
        self.leave(finished=False, failed=True)

    def hang_up(self) -> None:
        """Does `abandon` on this rank alone, without waiting for the island's other ranks."""
        if self.members:
            self.members.leave("left")
        self.has_left = True
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._background.close()
        self.outer.close()

    @contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        """Leaves before it raises an error of its body.

        Leaving gives the other islands time to read this island's records, in which they find the same error.
        """
        try:
            yield
        except DiLoCoError as error:
            self.leave(finished=False, failed=not isinstance(error, StopRequested))
            raise
