"""What the other islands hear of this one: where it stands, and how fast it is."""

from __future__ import annotations

import time

from hf_diloco.membership.heartbeats import Members, Phase
from hf_diloco.outer.state import OuterState


class Presence:
    """Brings this island's next sign of life up to date; used by its leader only.

    Args:
        members: the islands.
        outer: this rank's outer state.
        num_ranks: of the island.
        tokens_per_step: of the whole island; 0 if unknown.
    """

    def __init__(self, members: Members, outer: OuterState, num_ranks: int, tokens_per_step: int) -> None:
        self._standing = members.standing
        self._nudge = members.nudge
        self._outer = outer
        self._tokens_per_step = tokens_per_step
        self._last_speed = 0.0
        self._standing.num_ranks = num_ranks
        self.go_on()

    def go_on(self) -> None:
        """Training goes on after a round."""
        self._went_on = time.monotonic(), self._outer.num_steps

    def stand(self, phase: Phase) -> None:
        """What the next sign of life says; it is given at once, because others may wait to hear it."""
        self.refresh()  # how fast it was until now
        self._standing.phase = phase
        self._nudge()

    def refresh(self) -> None:
        """Called before each sign of life."""
        self._standing.round, self._standing.steps = self._outer.round, self._outer.steps
        self._standing.tokens_per_second = self._speed()

    def _speed(self) -> float:
        """Tokens a second since the last round; before the first step after it, and in a round, as it was before."""
        since, num_steps = self._went_on
        elapsed, taken = time.monotonic() - since, self._outer.num_steps - num_steps
        if taken and elapsed > 0 and self._standing.phase != "syncing":
            self._last_speed = taken * self._tokens_per_step / elapsed
        return self._last_speed
