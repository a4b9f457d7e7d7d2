"""Brings an island to the state of the other islands of its run, and keeps its schedule aligned with theirs.

Before an island trains it needs the run's outer state. At the start of a run it takes the state from which all islands
start; if it joins late, a snapshot; if it resumes, its checkpoint. It then carries out the rounds since that state. If
its inner steps are out of step, it aligns its next round with the other islands, so that no island waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, IslandLostError, PayloadError, RendezvousError, StopRequested, StoreError
from hf_diloco.membership.heartbeats import UNDER_WAY, Members
from hf_diloco.membership.member_records import Phase
from hf_diloco.membership.round_records import round_of
from hf_diloco.membership.run import RunRecord, check_welcome
from hf_diloco.outer.schedule import steps_before
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.catch_up import LOOK_SECONDS, START_ALL
from hf_diloco.rounds.elastic_rounds import ElasticRounds
from hf_diloco.rounds.round import SyncClock
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import Wait, WaitNotes

logger = logging.getLogger("hf_diloco")

_LONGEST_PAUSE_SECONDS = 20.0  # between two attempts at a round; each attempt may read all values


class Pace:
    """Sets when the next round is due, from the heartbeats of the other islands.

    Args:
        members: the islands; on the island's leader only.
    """

    def __init__(self, outer: OuterState, members: Members | None) -> None:
        self.config, self.outer, self.island = outer.config, outer, outer.island
        if members is not None:
            self.members = members

    def align_to_others(self) -> None:
        """Aligns an island that joins in the middle of a round with the others, if there is time for a step.

        If it resumes ahead of them, it keeps its schedule: their heartbeats may be stale.
        """
        steps = self.island.on_leader(self._others_steps)
        if self.outer.steps < steps < self._length:
            self.outer.set_due_in(self._length - steps)

    def align(self) -> bool:
        """Makes the next round due when the others reach it, so that no island waits.

        If they have reached it already, postpones it.

        Returns:
            Whether the others have yet to reach it.
        """
        steps = self.island.on_leader(self._others_steps)
        left = self._length - min(steps, self._length)
        if left:
            self.outer.set_due_in(left)
        else:
            self.postpone()
        return left > 0

    def postpone(self) -> None:
        """Postpones the next round to the time when the one after it would have been due."""
        self.outer.set_due_in(max(1, self.config.sync_every // self.config.num_fragments))

    def others_convene(self) -> bool:
        """Whether other islands are about to plan the next round, and are a quorum without this island."""
        others = self.members.others_under_way()
        is_any = any(heartbeat.phase == "syncing" and heartbeat.round >= self.outer.round for heartbeat in others)
        return is_any and len(others) + len(self.members.spent()) >= self.config.quorum

    def others_join(self) -> bool:
        """Whether another island is joining, and does not have the run's state yet."""
        return any(heartbeat.phase == "joining" for heartbeat in self.members.others().values())

    def is_first(self) -> bool:
        """Whether this island is the most advanced one in training; ties go to the lowest number."""
        own = -self.outer.round, self.config.island
        others = self.members.others().items()
        return all(own < (-one.round, island) for island, one in others if one.phase in UNDER_WAY)

    def _others_steps(self) -> int:
        """Returns the inner steps of the most advanced other island in the current round.

        Without any other island it is the whole round; 0 if the store does not answer, or all others are behind.
        """
        try:
            others = self.members.others_under_way()
        except StoreError:
            return 0
        current = [heartbeat.steps for heartbeat in others if heartbeat.round >= self.outer.round]
        return max(current, default=0 if others else self._length)

    @property
    def _length(self) -> int:
        return steps_before(self.config, self.outer.round + 1)


@dataclass(eq=False, repr=False)
class Joining:
    """One rank's part in joining. Every method is collective over the island's ranks.

    Attributes:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        set_phase: sets this island's phase in its heartbeats.
    """

    run: RunRecord
    rounds: ElasticRounds
    pace: Pace
    should_stop: Callable[[], bool]
    set_phase: Callable[[Phase], None]

    def __post_init__(self) -> None:
        self.config = self.rounds.config
        self.outer = self.rounds.outer
        self.island = self.rounds.island
        self._snapshots = self.rounds.archive.snapshots
        self._clock = self.rounds.archive.clock

    def take_state(self, is_new: bool, parent: str, from_checkpoint: bool) -> bool:
        """Brings this island to the newest outer state of the run; returns whether the masters were replaced.

        Args:
            is_new: this island began the run.
            parent: the run of the island's checkpoint; "" without one.
            from_checkpoint: the island has restored a checkpoint.
        """
        before = self.outer.outer_hash
        self.outer.run = self.run.run
        if is_new:
            self._offer_start()
        if from_checkpoint and parent == self.run.run:
            self.island.on_leader(self._refuse_other_life)
            if self.outer.steps_left < 0:  # rounds were missed: else all fragments stay due together
                self.outer.set_due_in(0)
            number = self.outer.round
            self._catch_up(is_resuming=True)
            self.rounds.archive.rescue_checkpoint(number)
        elif from_checkpoint and not is_new and parent != self.run.parent:
            raise CheckpointError(
                f"the checkpoint belongs to run {parent or '(none)'}, and {self.config.rendezvous} holds run "
                f"{self.run.run}: resume with the rendezvous of that run, or start in another run folder"
            )
        else:
            self._start_from_snapshot()
        return self.outer.outer_hash != before

    def _refuse_other_life(self) -> None:
        """Raises `CheckpointError` if the run in the store has never had the state of the checkpoint.

        An island that resumed from it would plan rounds that others plan from another state.
        """
        number = self.outer.round
        with suppress(PayloadError):  # corrupt: the round is skipped later
            if not self._run_came_to(number, self.outer.outer_hash):
                raise CheckpointError(
                    f"the checkpoint's round {number} differs from that of the run at {self.config.rendezvous}, or "
                    "the run has not reached it: one of the two was restored from a copy. Move this island's "
                    f"checkpoints from round {number} on away, and it goes on from the others' state; or stop all "
                    "islands, and start them with an empty rendezvous: they go on from their checkpoints in a new run"
                )

    def _run_came_to(self, number: int, state: str) -> bool:
        """Whether the run in the store had `state` after round `number`; also True if the store cannot tell."""
        following = self.rounds.decider.current(number + 1)
        if following.plan and following.outcome:
            return following.plan.state == state
        newest = self._snapshots.newest(number - 1)
        if newest and newest.round == number:
            return newest.state == state
        if following.plan or newest or number == 0:  # the run went on, and the old state is not kept
            return True
        return self.rounds.decider.current(number).plan is not None

    def _start_from_snapshot(self) -> None:
        """Starts from a snapshot, as an island that has not taken part in the run so far."""
        before = self.outer.round, self.outer.outer_hash
        if not self.rounds.archive.load_snapshot(self._find_snapshot):
            self._offer_start()
            self.rounds.archive.load_snapshot(self._snapshots.start)
        if (self.outer.round, self.outer.outer_hash) != before:
            self.outer.write_masters()
            self.pace.postpone()  # no fragment has taken a step, so the checkpoint's schedule does not apply
        self._catch_up()

    def _catch_up(self, is_resuming: bool = False) -> None:
        """Carries out all rounds that have a plan, and drops progress that this island has contributed to them.

        Retries a round that the others have not decided yet, or whose average is not in the store yet.

        Raises:
            IslandLostError: a round stays so for `join_timeout` seconds.
        """
        last, since, pause = -1, self._clock.now(), LOOK_SECONDS
        while True:
            if self.outer.round != last:
                last, since, pause = self.outer.round, self._clock.now(), LOOK_SECONDS
            try:
                planned = self.rounds.find(is_resuming)
                if planned is None:
                    return
                self.rounds.follow(planned, SyncClock(), is_resuming)
            except IslandLostError as error:
                if self.island.is_leader:
                    logger.info("still catching up: %s", error)
                if not self.island.on_leader(partial(self._may_try_again, since, pause)):
                    raise IslandLostError(f"{error}. {START_ALL}") from None
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _may_try_again(self, since: float, pause: float) -> bool:
        """Waits `pause` seconds, or until there is a later snapshot; returns whether time is left for a retry."""
        until = self._clock.now() + pause
        while True:
            if self.should_stop():
                raise StopRequested
            self._clock.sleep(LOOK_SECONDS)
            if self._clock.now() >= until or self._snapshots.newest(self.outer.round) is not None:
                break
        return self._clock.now() < since + self.config.join_timeout

    def _offer_start(self) -> None:
        """Writes a snapshot of this island's outer state, and makes the run start from it unless it has a start."""
        self.rounds.archive.write_snapshot()
        self.island.on_leader(lambda: self._snapshots.decide_start(self._snapshots.folder(self.outer.round)))

    def _find_snapshot(self) -> str | None:
        """Waits for a snapshot, and returns the folder of the newest; None if no island is about to write one."""
        members = self.pace.members
        wait = WaitNotes(members.island, clock=self._clock).begin(math.inf, "start of the run")
        deadline = self._clock.now() + members.lease  # for the first heartbeat of the island that began the run
        again_at = self._clock.now() + self.config.sync_timeout  # others rewrite the start after a missed round
        while True:
            start, others = self._snapshots.start(), members.others()
            is_under_way = any(heartbeat.phase in UNDER_WAY for heartbeat in others.values())
            if start is None:
                may_come = not members.incarnation_of(self.run.by) and self._clock.now() < deadline
                is_coming = self.run.by != members.island and (self.run.by in others or may_come)
                if is_under_way or not is_coming:
                    start = self._decide_start_anew()
                    if start is None and not is_under_way:
                        return None
            if start is not None:
                newest = self._snapshots.newest()
                if newest and newest.round > round_of(start):
                    return newest.folder
                if self._clock.now() >= again_at:
                    self._snapshots.forgive(start)
                may_be_written_again = is_under_way or self.run.by in others
                if self._snapshots.is_readable(start) or not may_be_written_again:
                    return start
            is_decided = is_under_way or start is not None
            self._pause(wait, "a sound snapshot" if is_decided else f"the outer parameters of island {self.run.by}")

    def _decide_start_anew(self) -> str | None:
        """Makes the run start from the newest snapshot, because `start.json` is gone, or its writer died before it
        was written. Returns the folder of the snapshot that was chosen; None if there is no snapshot."""
        if newest := self._snapshots.newest():
            self._snapshots.decide_start(newest.folder)
        return self._snapshots.start() if newest else None

    def _pause(self, wait: Wait, missing: str) -> None:
        """Waits for a moment, and logs what is missing."""
        if self.should_stop():
            raise StopRequested
        wait.look(missing)
        self._clock.sleep(LOOK_SECONDS)

    def await_islands(self) -> None:
        """Waits for all islands at the start or restart of a run, so that no round takes place without them."""
        has_progress = self.outer.steps > 0
        self.island.on_leader(
            lambda: await_islands(self.config, self.pace.members, self.should_stop, has_progress, self._clock)
        )
        self.rounds.archive.rescue_start()

    def skip_imminent_round(self) -> None:
        """Skips a round that the others are about to plan, so that they need not wait for this island to train."""
        if self.outer.round == 0:  # at the start of the run all take part
            return
        deadline = self._clock.now() + self.config.grace  # after which they plan it anyway, if they can
        notes = WaitNotes(self.config.island, clock=self._clock)
        note = notes.begin(self.config.grace, f"round {self.outer.round + 1}")

        def has_plan() -> bool:
            try:
                return self.rounds.decider.current(self.outer.round + 1).plan is not None
            except PayloadError:  # committed, but corrupt
                return True

        def wait() -> bool:
            while self.pace.others_convene() and self._clock.now() < deadline:
                if self.pace.members.standing.phase != "passing":
                    self.set_phase("passing")
                if has_plan():
                    return True
                self._pause(note, "the others, which begin it without this island")
            return has_plan()  # they were faster

        while self.island.on_leader(wait):
            self._catch_up()


def await_islands(
    config: DiLoCoConfig,
    members: Members,
    should_stop: Callable[[], bool],
    has_progress: bool = False,
    clock: Clock = REAL,
) -> None:
    """Waits until all islands are there, or others are training already.

    Islands that have finished are not waited for, unless this island `has_progress` of missed rounds, there is no
    quorum for it without them, and they may bring progress, too. After `config.join_timeout` seconds a quorum is
    enough.

    Raises:
        StopRequested: `should_stop` returns true.
        RendezvousError: fewer than `config.quorum` islands came within `config.join_timeout` seconds.
    """
    wait = WaitNotes(members.island, clock=clock).begin(config.join_timeout, where=config.rendezvous)
    deadline = clock.now() + config.join_timeout
    told: set[int] = set()
    while True:
        heartbeats = members.look()
        alive = members.alive()
        gone = {island for island, heartbeat in heartbeats.items() if heartbeat.phase == "left"} & members.heard
        for island in gone - told:  # such as a refused island, whose own log has the reason
            logger.warning("island %d joined and left again: its own log says why", island)
        told = gone
        check_welcome(members, clock)
        under_way = {island for island, heartbeat in alive.items() if heartbeat.phase in UNDER_WAY}
        doubtful = under_way - members.heard  # all may have been killed and be restarting
        here = alive.keys() - doubtful
        ended = {island for island, heartbeat in heartbeats.items() if heartbeat.phase == "finished"}
        if has_progress and len(here) < config.quorum:
            ended &= members.heard | members.spent()  # these came back, or have nothing more to bring
        if under_way - doubtful or len(here | ended) >= config.num_islands:
            return
        if should_stop():
            raise StopRequested
        if clock.now() > deadline:
            break
        wait.look(set(range(config.num_islands)) - alive.keys() - ended)
        clock.sleep(LOOK_SECONDS)
    if len(alive.keys() | members.spent()) < config.quorum:
        missing = sorted(set(range(config.num_islands)) - alive.keys())
        raise RendezvousError(
            f"islands {missing} have not joined within {config.join_timeout:g} s (join_timeout), and no round "
            f"takes place with fewer than {config.quorum} (min_islands): start them, with the same rendezvous"
        )
    logger.warning("starting with islands %s of %d", sorted(alive), config.num_islands)
