"""What the Trainer's callback and the Accelerate loop ask of a run of several islands."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DiLoCoError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.fragments import FragmentShards, cut_into_fragments, describe_fragments
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import MAX_STEPS, Facts
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import Phase
from hf_diloco.methods.outer import find_method
from hf_diloco.outer.checkpoint import check_checkpoint
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.background import Background
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution
from hf_diloco.utils.text import counted

logger = logging.getLogger("hf_diloco")


class BaseSession(ABC):
    """One rank's part in the run: meeting the other islands, the rounds, leaving.

    Every method is collective over the island's ranks. A round that fails changes nothing: parameters and outer state
    are touched only after all who take part have agreed on the average.

    Attributes:
        outer: this rank's outer state, the inner steps since the last round, and what saves and restores them.
        chosen: what `join` took for settings that are "auto", and where that comes from.
        has_left: `leave` was called; figures stay readable.
        has_finished: it had done all that it was to do.
        members: this island's signs of life, and those of others; on the island's leader, once it has entered.
        num_steps: inner steps that this island is to take, if known; set before `join`.
        num_rounds: rounds that the run is to have, if known; set before `join`.
        tokens_per_step: of the whole island, if known; set before `join`.
    """

    members: Members | None = None
    _went_on: tuple[float, int] | None = None  # when training did last, after how many inner steps; since `join`
    _is_heard = True  # other islands wait for what this one's signs of life say

    def __init__(self, config: DiLoCoConfig, island: IslandGroup) -> None:
        self.config = config
        self.island = island
        self.outer = OuterState(config, island)
        # A thread's talk inside the island must not mix with the training's.
        self._overlaps, self._is_streaming = config.overlaps, config.is_streaming
        self._talk = IslandGroup(timeout=config.longest_wait) if self._overlaps else island
        self._background = Background(self.outer, self._carry_out_behind)
        self._pulls = find_method(config.method).pulls
        self._reports: list[SyncReport] = []  # of rounds that ended before one failed: they come with the next
        self.has_left = self.has_finished = False
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
        """Whether the run ends for all islands with a round that is known, whatever steps they have taken then."""
        return False

    @property
    def speaks_for_all(self) -> bool:
        """Whether this rank is the one of all islands that tells people what is true of all of them alike."""
        return self.island.is_leader and self.config.island == 0

    @abstractmethod
    def common_checkpoint(self, output_dir: Path) -> Path | None:
        """The checkpoint in `output_dir` that this island is to resume from; None to start afresh.

        Raises:
            CheckpointError: the islands hold checkpoints that do not go together.
        """

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Reads every file of a checkpoint that this island is to resume from.

        Raises:
            CheckpointError: one does not hold what was written to it, which the message names; on every rank.
        """
        with self._leave_on_error():
            check_checkpoint(checkpoint, self.island)
        self.outer.checked = checkpoint

    @abstractmethod
    def join(self, shards: Shards, folder: Path, facts: Facts | None = None, checkpoint: Path | None = None) -> bool:
        """Meets the other islands, checks that all train the same thing, and makes their weights equal.

        Args:
            shards: this rank's master weights.
            folder: where this island writes; no two islands may share it.
            facts: further things that must be equal on all islands, by name.
            checkpoint: continue from its outer state; the masters must have been restored already.

        Returns:
            Whether the masters were replaced by the run's.

        Raises:
            FingerprintError, RendezvousError, CheckpointError, IslandLostError.
        """

    def _show_standing(self) -> None:
        """From now on this island's signs of life say where it stands."""
        self._went_on = time.monotonic(), self.outer.num_steps
        self._refresh_standing()

    def _refresh_standing(self) -> None:
        """Called before each sign of life. Its tokens a second are those since the last round; before the first step
        after it, and in a round, they are as before."""
        if self.members is None or self._went_on is None:
            return
        standing, (since, num_steps) = self.members.standing, self._went_on
        standing.round, standing.steps = self.outer.round, self.outer.steps
        elapsed, taken = time.monotonic() - since, self.outer.num_steps - num_steps
        if taken and elapsed > 0 and standing.phase != "syncing":
            standing.tokens_per_second = taken * (self.tokens_per_step or 0) / elapsed

    def _give_heartbeats(self, members: Members) -> None:
        """From now on this island's leader gives signs of life."""
        members.standing.num_ranks = self.island.size
        members.refresh = self._refresh_standing
        members.start_heartbeats()

    def _stand(self, phase: Phase) -> None:
        if self.members is None or self._went_on is None:
            return
        self._refresh_standing()  # how fast it was until now
        if self._is_heard:
            self.members.stand(phase)
        else:
            self.members.standing.phase = phase

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Within, signs of life say that this island synchronises."""
        self._stand("syncing")
        try:
            yield
        finally:
            self._stand("training")

    def _go_on(self) -> None:
        """Training goes on."""
        self._background.last_end = time.monotonic()
        self._went_on = self._background.last_end, self.outer.num_steps

    @property
    def _holds_up_training(self) -> bool:
        """Whether inner steps wait for a round that was to be hidden behind them, and so for whoever is late."""
        return self._background.is_landing and self._pulls

    def _choose(self) -> None:
        """Puts numbers in the place of settings that are "auto", now that the number of rounds is known."""
        chosen = find_method(self.config.method).choose(self.config, self.num_rounds)
        self.chosen = chosen.source
        self.config = self.outer.config = self.config.model_copy(update=dict(chosen.values))
        if chosen.source and self.island.is_leader:
            logger.info("chosen: %s", chosen.source)

    def _steps_fact(self) -> dict[str, int]:
        """The number of steps, which must be equal on all islands that know theirs."""
        return {} if self.num_steps is None else {MAX_STEPS: self.num_steps}

    def _cut(self, shards: Shards) -> list[Shards]:
        """The shards of each fragment."""
        if not self._is_streaming:
            return [shards]
        config = self.config
        names = cut_into_fragments(shards.sizes, config.num_fragments, config.fragment_order, config.fragment_patterns)
        if self.island.is_leader and len(names) > 1:
            logger.info("%s", describe_fragments(names, shards.sizes))
        return [FragmentShards(shards, part) for part in names]

    def is_due(self, is_last: bool = False) -> bool:
        """Whether `advance` is to be called after the inner step that was counted last.

        Args:
            is_last: it is the last step of the run.
        """
        if self._background.failure or self.outer.is_due or self._background.landing() is not None:
            return True
        return is_last and self._is_streaming and self._is_ahead

    @property
    def _is_ahead(self) -> bool:
        """Whether the masters hold something that is not a round's yet."""
        return not self.outer.on_boundary

    def advance(self, is_last: bool = False) -> list[SyncReport]:
        """Begins the round that is due and ends those whose time has come, as `sync` does at once.

        After the last step, what streams is synchronised to its end: the masters hold the outer parameters.

        Returns:
            The figures of the rounds that ended.

        Raises:
            As `sync`.
        """
        self._background.raise_failure()
        if self._pulls and self.outer.steps and (self.outer.is_due or is_last):
            self.outer.current.install_in = 0  # also where no round is under way, which is then that of the start
        while (fragment := self._background.landing(at_once=is_last)) is not None:
            self._reports += self._background.land(fragment)
        if is_last and self._is_streaming:
            while self.outer.steps and not self.is_over:
                self._reports.append(self.sync())
        elif self._overlaps:
            if self.outer.is_due and not self._has_begun_all:
                self._background.take_off()
        elif (self.outer.is_due or is_last) and not self.is_over:
            self._reports.append(self.sync())  # after the last step: those of missed rounds may be left
        return self._take_reports()

    def conclude(self) -> None:
        """Ends a loop that has taken its last step: where the run is over, the masters take its outer parameters.

        Says so, or that they hold this island's own weights.
        """
        steps, outer = self.outer.steps, self.outer
        if outer.on_boundary:
            return
        if self.is_over:
            outer.write_masters()
            text = "the run ended with round %d, without the loop's last %s: the model holds the run's result"
            logger.warning(text, outer.round, counted(steps, "step"))
        else:
            logger.warning(
                "the loop ended %s after the last synchronisation: the model holds this island's own weights",
                counted(steps, "step"),
            )

    @property
    def _has_begun_all(self) -> bool:
        """Whether the run's last round is under way: there is no other to begin."""
        return False

    def _take_reports(self) -> list[SyncReport]:
        reports, self._reports = self._reports, []
        return reports

    def _carry_out_behind(self, own: Contribution) -> SyncReport:
        with self._syncing():
            return self._carry_out(own)

    @abstractmethod
    def _carry_out(self, own: Contribution) -> SyncReport:
        """Takes a contribution through its round, on a thread behind the inner steps."""

    def settle(self) -> list[SyncReport]:
        """Waits for the rounds under way, so that a checkpoint can be written; they land at their time still.

        Afterwards nothing is on its way to other islands.

        Returns:
            The figures of the rounds that ended. A failure is raised by the next `advance`.
        """
        self._reports += self._background.settle()
        return self._take_reports()

    def take_refused(self) -> dict[int, str]:
        """Islands whose contributions were refused since the last call, with the reason; on the island's leader."""
        return {}

    def sync(self) -> SyncReport:
        """Runs one round, for which training waits; see `_sync` of the kind of session."""
        with self._syncing():
            try:
                return self._sync()
            finally:
                self._go_on()

    @abstractmethod
    def _sync(self) -> SyncReport:
        """Carries out what `sync` does.

        Raises:
            StopRequested: this island was asked to stop while it waited.
            ExchangeError: the round did not take place.
            DivergedError: islands that should be equal are not.
        """

    @abstractmethod
    def leave(self, finished: bool) -> None:
        """Says goodbye, so that nobody waits for this island, and lets go of all connections.

        Args:
            finished: this island has done all it was to do; otherwise it stops early.
        """

    def abandon(self) -> None:
        """As `leave`, where the model may hold anything by now: nothing of it is offered."""
        self.leave(finished=False)

    def hang_up(self) -> None:
        """As `abandon`, by this rank alone: it waits for no other of its island."""
        if self.members:
            self.members.leave("left")
        self.has_left = True
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Lets go of all connections."""

    @contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        """Says goodbye before an error is raised: the others have then read what they, too, will find wrong."""
        try:
            yield
        except DiLoCoError:
            self.leave(finished=False)
            raise
