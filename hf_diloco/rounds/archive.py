"""What islands that come late find in the store of rounds that are over: averages, and snapshots of outer states."""

from __future__ import annotations

import logging
from collections.abc import Set

from hf_diloco.membership.round_records import OutcomeRecord
from hf_diloco.rounds.context import RoundContext
from hf_diloco.rounds.round_plan import PlannedRound

logger = logging.getLogger("hf_diloco")


class Archive:
    """One rank's part in it. What writes is collective over the island's ranks.

    Args:
        context: of the island's rounds.

    Attributes:
        last: the round that this process has completed last, and how it was decided.
    """

    def __init__(self, context: RoundContext) -> None:
        self.config = context.config
        self.outer = context.outer
        self.island = context.island
        self._context = context
        self._snapshots = context.snapshots
        self.last: tuple[PlannedRound, OutcomeRecord] | None = None
        self._before: tuple[PlannedRound, OutcomeRecord] | None = None

    def complete(self, planned: PlannedRound, outcome: OutcomeRecord) -> None:
        """A round is committed.

        Who offers for it has put its average of the one before into the store, if that was on it: so that one is only
        looked for later if the process that was to do so does not take part any more.
        """
        self._before = self.last if self.last and not _has_author_of(planned, *self.last) else None
        self.last = planned, outcome

    def write_snapshot(self) -> None:
        """Writes this island's outer state into the store."""
        states = self.outer.states
        self.island.on_all(lambda: self._snapshots.write(self.outer.round, self.outer.outer_hash, states))

    def write_snapshot_if_due(self) -> None:
        """Begins to write the outer state into the store, if that is due after the last round, and on this island."""
        assert self.last is not None
        planned, _ = self.last
        if planned.number % self.config.snapshot_every == 0 and min(planned.participants) == self.config.island:
            self._snapshots.write_behind(
                planned.number, self.outer.outer_hash, self.outer.states, self.config.keep_rounds
            )

    def rescue_average(self) -> None:
        """Where nobody has put the average of one of the last rounds into the store, a snapshot takes its place."""
        if self.island.on_leader(self._is_average_missing):
            logger.info("an average up to round %d is not in the store: writing a snapshot", self.outer.round)
            self._snapshots.wait()
            self.write_snapshot()

    def _is_average_missing(self) -> bool:
        """Whether nobody can catch up with one of them, and it is on this island, of those left, to change that."""
        if self.last is None or not self._context.engines[0].needs_presence:
            return False
        assert self._context.quorum is not None
        alive = self._context.quorum.processes()
        left = {offer.island for offer in self.last[0].offers if alive.get(offer.island) == offer.incarnation}
        return any(self._is_missing(*one, left) for one in (self._before, self.last) if one)

    def _is_missing(self, planned: PlannedRound, outcome: OutcomeRecord, left: Set[int]) -> bool:
        if self.config.island != (outcome.by if outcome.by in left else min(left, default=-1)):
            return False
        return not self._context.engine_of(planned.number).has_average(planned)


def _has_author_of(planned: PlannedRound, before: PlannedRound, outcome: OutcomeRecord) -> bool:
    """Whether the process that has committed a round takes part in the next one."""
    author = {(offer.island, offer.incarnation) for offer in before.offers if offer.island == outcome.by}
    return bool(author & {(offer.island, offer.incarnation) for offer in planned.offers})
