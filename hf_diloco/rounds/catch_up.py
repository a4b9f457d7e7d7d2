"""Finished rounds: the averages and snapshots in the store from which late islands catch up.

If the payloads of a committed round are gone, an island moves on to a later snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hf_diloco.errors import DivergedError, IslandLostError, PayloadError, StoreError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OutcomeRecord, Snapshot, round_of
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.engines import Engine
from hf_diloco.rounds.round import Part
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.utils.clock import Clock
from hf_diloco.utils.text import name_all
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

LOOK_SECONDS = 0.2
"""Poll interval of the store while waiting for other islands."""
START_ALL = (
    "It may come from an island that holds a later state: start all. If none does, stop all, and start them with an "
    "empty rendezvous: they go on from their checkpoints in a new run"
)


class NoLaterStateError(IslandLostError):
    """A committed round cannot be carried out, and there is no later snapshot yet."""


class StrandedError(IslandLostError):
    """Nobody who holds a later state has been there for `join_timeout`: the island ends."""


@dataclass
class Archive:
    """One rank's access to finished rounds. Methods that write or load a state are collective over the island's ranks.

    Attributes:
        island: the ranks of this island; a group that nothing else uses while a thread carries out rounds.
        engines: move values between islands, one per fragment.
        quorum: decides rounds; on the island's leader only.
        last: the last round that this process has completed, with its outcome.
    """

    outer: OuterState
    island: IslandGroup
    engines: Sequence[Engine]
    snapshots: Snapshots
    quorum: Quorum | None
    clock: Clock
    last: tuple[Attempt, OutcomeRecord] | None = None
    _before: tuple[Attempt, OutcomeRecord] | None = None
    _stranded: tuple[int, float] = (-1, 0.0)  # the round after which nobody holds a later state, and since when

    def __post_init__(self) -> None:
        self.config = self.outer.config
        self.is_direct = self.config.is_direct
        self._notes = WaitNotes(self.config.island, clock=self.clock)

    def engine_of(self, number: int) -> Engine:
        """Returns the engine of the fragment that round `number` synchronises."""
        return self.engines[(number - 1) % len(self.engines)]

    # Writing for other islands

    def complete(self, planned: Attempt, outcome: OutcomeRecord) -> None:
        """Records a committed round.

        A process uploads the average of a round that it committed before it offers for the next one. So the average
        of the round before needs checking only if the process that committed it does not take part in this one.
        """
        self._before = self.last if self.last and not _has_author_of(planned, *self.last) else None
        self.last = planned, outcome

    def write_snapshot(self, folder: str = "") -> None:
        """Writes this island's outer state into the store, by default into this process's own folder."""
        self.snapshots.wait()
        states = self.outer.states
        self.island.on_leader(lambda: self.snapshots.clear(folder) if folder else None)
        self.island.on_all(lambda: self.snapshots.write(self.outer.round, self.outer.outer_hash, states, folder))

    def write_snapshot_if_due(self) -> None:
        """Starts to write a snapshot, if one is due after the last round and this island is its first participant."""
        assert self.last is not None
        planned, _ = self.last
        if planned.round % self.config.snapshot_every == 0 and min(planned.participants) == self.config.island:
            self.snapshots.write_behind(
                planned.round, self.outer.outer_hash, self.outer.states, self.config.keep_rounds
            )

    def rescue_start(self) -> None:
        """Rewrites the snapshot that the run starts from, if this island wrote it and it has become corrupt."""

        def find() -> str:
            start = self.snapshots.own_start(self.outer.round)
            return start if start and not self.snapshots.is_readable(start) else ""

        if folder := self.island.on_leader(find):
            self.write_snapshot(folder)

    def rescue_snapshot(self, is_first: Callable[[], bool], is_awaited: Callable[[], bool]) -> None:
        """After a missed round: writes a missing or corrupt snapshot that joining or late islands need.

        Otherwise those islands may wait for a snapshot while this island waits for them.

        Args:
            is_first: whether this island is to write the snapshot; called on the leader. The snapshot that the run
                starts from is rewritten by its author instead.
            is_awaited: whether another island is joining, and may have found that snapshot corrupt; called likewise.
        """

        def find() -> str:
            number, start = self.outer.round, self.snapshots.start()
            if start is not None and round_of(start) == number:
                return self.snapshots.own_start(number) if is_awaited() else ""
            is_missing = is_first() and self.snapshots.newest(number - 1) is None
            return self.snapshots.folder(number) if is_missing else ""

        if folder := self.island.on_leader(find):
            logger.info("others may wait for a snapshot of round %d: writing one", self.outer.round)
            self.write_snapshot(folder)

    def rescue_checkpoint(self, number: int) -> None:
        """Does `rescue_average` for an island that resumes from a checkpoint of round `number`.

        All islands may have been killed. Those that resume from earlier rounds need this state before they can take
        part.
        """

        def is_missing() -> bool:
            is_known = self.snapshots.newest(number - 1) is not None
            return not is_known and not all(map(self._has_average, range(max(1, number - 1), number + 1)))

        if number and self.is_direct and self.island.on_leader(is_missing):
            self._replace_average(number)

    def _has_average(self, number: int) -> bool:
        assert self.quorum is not None
        try:
            attempt = self.quorum.current(number)
        except PayloadError:
            return False
        return attempt.outcome is None or self.engine_of(number).has_average(attempt)

    def rescue_average(self) -> None:
        """Writes a snapshot if the average of one of the last two rounds is not in the store."""
        if self.last is not None and self.island.on_leader(partial(self._must_replace_average, self.last[0])):
            self._replace_average(self.outer.round)

    def _replace_average(self, number: int) -> None:
        logger.info("an average up to round %d is not in the store: writing a snapshot", number)
        self.write_snapshot()

    def _must_replace_average(self, planned: Attempt) -> bool:
        """Whether an average of the last rounds, up to `planned`, is missing, and it is for this island to replace."""
        assert self.quorum is not None
        alive = self.quorum.processes()
        left = {offer.island for offer in planned.offers if alive.get(offer.island) == offer.incarnation}
        for one, outcome in filter(None, (self._before, self.last)):
            who = outcome.by if outcome.by in left else min(left, default=-1)
            if who == self.config.island and not self.engine_of(one.round).has_average(one):
                return True
        return False

    # Reading for this island

    def await_average(self, planned: Attempt) -> bool:
        """Waits for the average of a committed round in the store; returns whether it is there. On the leader.

        Returns False if a later snapshot appears, the timeout passes, or no island holds the average any more, so that
        the round is repeated; see `Quorum.revoke`.
        """
        engine = self.engine_of(planned.round)
        assert self.quorum is not None
        deadline = self.clock.now() + self.config.exchange_timeout
        wait = self._notes.begin(self.config.exchange_timeout, f"catching up with round {planned.round}")
        islands = [offer.island for offer in planned.offers]
        while not engine.has_average(planned):
            if self.snapshots.newest(self.outer.round) is not None or self.clock.now() >= deadline:
                return False
            if self.quorum.revoke(planned):
                return False
            wait.look(f"its average in the store, from {name_all(islands)}")
            self.clock.sleep(LOOK_SECONDS)
        return True

    def skip_to_snapshot(self, planned: Attempt, error: PayloadError, part: Part, is_resuming: bool) -> None:
        """Loads a later snapshot, and drops this island's progress that the skipped rounds have used.

        Args:
            planned: the round that cannot be carried out.
            part: how much of this island's progress it has used.
            is_resuming: the progress comes from a checkpoint, and any of the skipped rounds may have used it.

        Raises:
            IslandLostError: there is no later snapshot yet.
        """
        self._load_later_snapshot(error)
        offer, fragment = planned.offer_by(self.config.island), self.outer.fragment_of(planned.round)
        if is_resuming or part is Part.WHOLE:
            if offer is None:
                self.outer.drop_progress(fragment)
            else:
                self.outer.use_up(fragment)
        elif part is Part.SOME and offer is not None:
            self.outer.shrink(fragment, offer.steps)
        if is_resuming:
            self._drop_after(planned.round)

    def skip(self, number: int, error: PayloadError, is_resuming: bool, may_be_used: bool) -> None:
        """Does `skip_to_snapshot` for a committed round with a corrupt record, whose participants are unknown.

        Args:
            is_resuming: see `skip_to_snapshot`.
            may_be_used: this island had offered for the round, and its progress must not count twice.
        """
        self._load_later_snapshot(error)
        if self.island.is_leader:
            logger.warning("round %d is skipped: %s", number, error)
        if may_be_used:
            self.outer.drop_progress(self.outer.fragment_of(number))
        if is_resuming:
            self._drop_after(number)

    def _load_later_snapshot(self, error: PayloadError) -> None:
        if not self.load_snapshot(lambda: getattr(self.snapshots.newest(self.outer.round), "folder", None)):
            raise NoLaterStateError(f"{error}: there is no later snapshot yet to go on from")

    def is_stranded(self) -> bool:
        """Whether no live island has held a later state for `join_timeout` seconds. On the leader, when it is missing.

        A live one writes a snapshot sooner or later.
        """
        assert self.quorum is not None
        number, now = self.outer.round, self.clock.now()
        try:
            others = self.quorum.members.others().values()
        except StoreError:
            return False
        if self._stranded[0] != number or any(heartbeat.round > number for heartbeat in others):
            self._stranded = number, now
        return now - self._stranded[1] >= self.config.join_timeout

    def _drop_after(self, number: int) -> None:
        """Drops progress from a checkpoint that rounds after `number` may have used."""
        last = min(self.outer.round, number + len(self.outer.fragments) - 1)
        for later in range(number + 1, last + 1):
            self.outer.drop_progress(self.outer.fragment_of(later))

    def load_snapshot(self, find: Callable[[], str | None]) -> bool:
        """Loads the outer state of the snapshot in the folder from `find`; returns whether there is one.

        If the snapshot is deleted while it is read, there is a newer one, and `find` is called again. A corrupt
        snapshot is skipped: an older one, and the rounds since, lead to the same state.
        """
        tried = None
        while (folder := self.island.on_leader(find)) is not None:
            try:
                self._load(folder)
                return True
            except PayloadError as error:
                if folder == tried:
                    if not self.snapshots.shun(folder):
                        raise
                    if self.island.is_leader:
                        logger.warning("the snapshot %s is skipped: %s", folder, error)
                tried = folder
        return False

    def _load(self, folder: str) -> None:
        def fetch() -> tuple[Snapshot, list[dict[str, torch.Tensor]] | None]:
            snapshot = self.snapshots.at(folder)
            holds_it = (snapshot.round, snapshot.state) == (self.outer.round, self.outer.outer_hash)
            return snapshot, None if holds_it else self.snapshots.fetch(snapshot)

        snapshot, states = self.island.on_all(fetch)
        if states is None:
            return
        if self.island.is_leader:
            logger.info("loading the outer parameters of round %d from the store", snapshot.round)
        self.snapshots.wait()
        self.outer.jump(states, snapshot.round)
        if self.outer.outer_hash != snapshot.state:
            raise DivergedError(
                f"the snapshot {folder} does not hold the outer parameters that it announces "
                f"({self.outer.outer_hash[:12]} instead of {snapshot.state[:12]}): delete it, and start again"
            )


def _has_author_of(planned: Attempt, before: Attempt, outcome: OutcomeRecord) -> bool:
    """Whether the process that committed the round `before` takes part in `planned`."""
    author = {(offer.island, offer.incarnation) for offer in before.offers if offer.island == outcome.by}
    return bool(author & {(offer.island, offer.incarnation) for offer in planned.offers})
