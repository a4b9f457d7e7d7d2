"""Coming to a later state where what a decided round was made of is gone from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hf_diloco.errors import CheckpointError, DivergedError, IslandLostError, PayloadError
from hf_diloco.membership.snapshot_records import Snapshot
from hf_diloco.rounds.context import RoundContext
from hf_diloco.rounds.round import Part
from hf_diloco.rounds.round_plan import PlannedRound
from hf_diloco.utils.waiting import WaitNotes, name_all

logger = logging.getLogger("hf_diloco")

_LOOK_SECONDS = 0.2


class Recovery:
    """One rank's part in it.

    Args:
        context: of the island's rounds.
    """

    def __init__(self, context: RoundContext) -> None:
        self.config = context.config
        self.outer = context.outer
        self.island = context.island
        self._context = context
        self._snapshots = context.snapshots
        self._clock = context.clock
        self._notes = WaitNotes(self.config.island, clock=self._clock)

    def await_average(self, planned: PlannedRound) -> bool:
        """Whether the average of a committed round is in the store, or comes there before a later snapshot does."""
        return self.island.on_leader(lambda: self._await_average(planned))

    def _await_average(self, planned: PlannedRound) -> bool:
        engine = self._context.engine_of(planned.number)
        deadline = self._clock.now() + self.config.exchange_timeout
        wait = self._notes.begin(self.config.exchange_timeout, f"catching up with round {planned.number}")
        islands = [offer.island for offer in planned.offers]
        while not engine.has_average(planned):
            if self._snapshots.newest(self.outer.round) is not None or self._clock.now() >= deadline:
                return False
            wait.look(f"its average in the store, from {name_all(islands)}")
            self._clock.sleep(_LOOK_SECONDS)
        return True

    def pass_over(self, planned: PlannedRound, error: PayloadError, part: Part, is_resuming: bool) -> None:
        """Takes over a later snapshot, and drops what the rounds until then have used of this island's progress.

        Args:
            planned: the round that cannot be carried out.
            error: why.
            part: of this island's progress that it has used.
            is_resuming: the progress comes from a checkpoint, and may have gone into any of them.

        Raises:
            IslandLostError: there is no later snapshot yet.
            CheckpointError: there will be none.
        """
        if not self.take_over(lambda: getattr(self._snapshots.newest(self.outer.round), "folder", None)):
            if self._context.engines[0].needs_presence:  # it may come yet
                raise IslandLostError(str(error))
            raise CheckpointError(
                f"this island, at round {self.outer.round}, cannot catch up: the pseudo-gradients of round "
                f"{planned.number} are gone ({error}), and no later snapshot is there. Start it in an empty run "
                "folder once there is one, and raise keep_rounds"
            )
        self._give_up(planned, Part.WHOLE if is_resuming else part)
        if is_resuming:
            self._drop_after(planned.number)

    def skip(self, number: int, error: PayloadError, is_resuming: bool, may_be_used: bool) -> None:
        """As `pass_over`, where a record of the committed round `number` is damaged: nobody knows who took part.

        Args:
            number: of the round.
            error: what is damaged.
            is_resuming: see `pass_over`.
            may_be_used: this island had offered; what it offered must not count twice.

        Raises:
            IslandLostError: there is no later snapshot yet.
        """
        if not self.take_over(lambda: getattr(self._snapshots.newest(self.outer.round), "folder", None)):
            raise IslandLostError(f"{error}: there is no later snapshot yet to go on from")
        if self.island.is_leader:
            logger.warning("round %d is passed over: %s", number, error)
        if may_be_used:
            self.outer.drop_progress(self.outer.fragment_of(number))
        if is_resuming:
            self._drop_after(number)

    def _drop_after(self, number: int) -> None:
        """Drops progress from a checkpoint that rounds after `number` may have used."""
        last = min(self.outer.round, number + len(self.outer.fragments) - 1)
        for later in range(number + 1, last + 1):
            self.outer.drop_progress(self.outer.fragment_of(later))

    def _give_up(self, planned: PlannedRound, part: Part) -> None:
        """Subtracts progress that a committed round consumed and the store no longer holds."""
        own = planned.place_of(self.config.island)
        fragment = self.outer.fragment_of(planned.number)
        if part is Part.WHOLE and own is None:
            self.outer.drop_progress(fragment)
        elif part is Part.WHOLE:
            self.outer.use_up(fragment)
        elif part is Part.SOME and own is not None:
            self.outer.shrink(fragment, planned.offers[own].steps)

    def take_over(self, find: Callable[[], str | None]) -> bool:
        """Takes over the outer state of the snapshot in the folder that `find` names; returns whether there is one.

        A snapshot may be cleared up while it is read: then there is a newer one. One that is damaged is passed over:
        then an older one, and the rounds since, do.
        """
        tried = None
        while (folder := self.island.on_leader(find)) is not None:
            try:
                self._load(folder)
                return True
            except PayloadError as error:
                if folder == tried:
                    if not self._snapshots.shun(folder):
                        raise
                    if self.island.is_leader:
                        logger.warning("the snapshot %s is passed over: %s", folder, error)
                tried = folder
        return False

    def _load(self, folder: str) -> None:
        def fetch() -> tuple[Snapshot, list[dict[str, torch.Tensor]] | None]:
            snapshot = self._snapshots.at(folder)
            holds_it = (snapshot.round, snapshot.state) == (self.outer.round, self.outer.outer_hash)
            return snapshot, None if holds_it else self._snapshots.fetch(snapshot)

        snapshot, states = self.island.on_all(fetch)
        if states is None:
            return
        if self.island.is_leader:
            logger.info("taking over the outer parameters of round %d from the store", snapshot.round)
        self._snapshots.wait()
        self.outer.jump(states, snapshot.round)
        if self.outer.outer_hash != snapshot.state:
            raise DivergedError(
                f"the snapshot {folder} does not hold the outer parameters that it announces "
                f"({self.outer.outer_hash[:12]} instead of {snapshot.state[:12]}): delete it, and start again"
            )
