"""When an island that is out of step with the others synchronises next: when they do, so that nobody waits."""

from __future__ import annotations

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import StoreError
from hf_diloco.membership.heartbeats import HeartbeatRecord, Members
from hf_diloco.outer.schedule import steps_before
from hf_diloco.outer.state import OuterState


class Pace:
    """Sets when the next round is due by what the other islands say of themselves.

    Args:
        config: the outer loop's settings.
        outer: this rank's outer state.
        members: the islands; on the island's leader only.
    """

    def __init__(self, config: DiLoCoConfig, outer: OuterState, members: Members | None) -> None:
        self.config = config
        self.outer = outer
        self.island = outer.island
        self._members = members

    @property
    def members(self) -> Members:
        """The islands; asked by the leader only."""
        assert self._members is not None
        return self._members

    def align_to_others(self) -> None:
        """An island that joins in the middle of a round syncs with the others, if it has time for a step.

        If it resumes ahead of them, it keeps its schedule: their heartbeats may be stale.
        """
        steps = self.island.on_leader(self._others_steps)
        if self.outer.steps < steps < self._length:
            self.outer.set_due_in(self._length - steps)

    def align(self) -> bool:
        """Makes the next round due when the others reach it, so that nobody waits for anybody.

        Returns:
            Whether that is later than now.
        """
        steps = self.island.on_leader(self._others_steps)
        left = self._length - min(steps, self._length)
        if left:
            self.outer.set_due_in(left)
        else:
            self.postpone()
        return left > 0

    def postpone(self) -> None:
        """Makes the next round due when the one after it would have been."""
        self.outer.set_due_in(max(1, self.config.sync_every // self.config.num_fragments))

    def others_convene(self) -> bool:
        """Whether others have offered for the next round, and are enough for it without this island."""
        others = self._others_under_way()
        is_any = any(heartbeat.phase == "syncing" and heartbeat.round >= self.outer.round for heartbeat in others)
        return is_any and len(others) >= self.config.quorum

    def _others_under_way(self) -> list[HeartbeatRecord]:
        alive = self.members.alive()
        here = self.config.island
        return [
            heartbeat
            for island, heartbeat in alive.items()
            if island != here and heartbeat.phase not in ("joining", "passing")
        ]

    def _others_steps(self) -> int:
        """How far the furthest of the other islands is in the round."""
        try:
            others = self._others_under_way()
        except StoreError:
            return 0
        current = [heartbeat.steps for heartbeat in others if heartbeat.round >= self.outer.round]
        return max(current, default=0 if others else self._length)

    @property
    def _length(self) -> int:
        return steps_before(self.config, self.outer.round + 1)
