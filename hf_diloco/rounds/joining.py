"""How an island comes to where the others of its run are, and keeps in step with them.

Before it trains it needs their outer state, and their time. An island that begins takes the state from which all
start; one that joins late, that of a snapshot; one that resumes, its own. Rounds since then it carries out like
everybody else, only later. One that is out of step synchronises when the others do, so that nobody waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, IslandLostError, PayloadError, RendezvousError, StopRequested, StoreError
from hf_diloco.membership.heartbeats import UNDER_WAY, Members
from hf_diloco.membership.member_records import HeartbeatRecord, Phase
from hf_diloco.membership.round_records import round_of
from hf_diloco.membership.run import RunRecord, check_welcome
from hf_diloco.outer.schedule import steps_before
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.catch_up import LOOK_SECONDS
from hf_diloco.rounds.elastic_rounds import ElasticRounds
from hf_diloco.rounds.round import SyncClock
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import Wait, WaitNotes

logger = logging.getLogger("hf_diloco")

_LONGEST_PAUSE_SECONDS = 20.0  # between two attempts at a round, each of which may read all its values


class Pace:
    """Sets when the next round is due by what the other islands say of themselves.

    Args:
        members: the islands; on the island's leader only.
    """

    def __init__(self, outer: OuterState, members: Members | None) -> None:
        self.config = outer.config
        self.outer = outer
        self.island = outer.island
        if members is not None:
            self.members = members

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

    def others_join(self) -> bool:
        """Whether another island has yet to come to the run's state."""
        joining = (island for island, heartbeat in self.members.alive().items() if heartbeat.phase == "joining")
        return any(island != self.config.island for island in joining)

    def is_first(self) -> bool:
        """Whether no island is ahead of this one, and of those that are as far none has a lower number."""
        others = [
            (-heartbeat.round, island)
            for island, heartbeat in self.members.alive().items()
            if island != self.config.island and heartbeat.phase in UNDER_WAY
        ]
        return all((-self.outer.round, self.config.island) < other for other in others)

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


@dataclass(eq=False, repr=False)
class Joining:
    """One rank's part in it. Every method is collective over the island's ranks.

    Attributes:
        pace: knows where the others are.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        stand: tells the others what this island does.
    """

    run: RunRecord
    rounds: ElasticRounds
    pace: Pace
    should_stop: Callable[[], bool]
    stand: Callable[[Phase], None]

    def __post_init__(self) -> None:
        self.config = self.rounds.config
        self.outer = self.rounds.outer
        self.island = self.rounds.island
        self._snapshots = self.rounds.archive.snapshots
        self._clock = self.rounds.archive.clock

    def take_state(self, is_new: bool, parent: str, from_checkpoint: bool) -> bool:
        """Comes to the newest outer state of the run; returns whether the masters were replaced."""
        before = self.outer.outer_hash
        self.outer.run = self.run.run
        if is_new:
            self._offer_start()
        if from_checkpoint and parent == self.run.run:
            self.island.on_leader(self._refuse_other_life)
            if self.outer.steps_left < 0:  # rounds were missed: else all fragments would be due at once, ever after
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
        """Raises `CheckpointError` if the run in the store has not come to the state of the checkpoint.

        Whoever went on from there would plan rounds that others have planned, or will plan, from other states.
        """
        number = self.outer.round
        try:
            came_to_it = self._run_came_to(number, self.outer.outer_hash)
        except PayloadError:  # damaged: it is passed over
            return
        if not came_to_it:
            raise CheckpointError(
                f"the checkpoint holds another round {number} than the run at {self.config.rendezvous}, or a later "
                "one than that has come to: either of them was put back from a copy. Move this island's checkpoints "
                f"from round {number} on away, and it goes on from the others' state; or stop all islands, and start "
                "them with an empty rendezvous: they go on from their checkpoints in a new run"
            )

    def _run_came_to(self, number: int, state: str) -> bool:
        """Whether the run in the store was in `state` after round `number`, as far as it can be told."""
        following = self.rounds.decider.current(number + 1)
        if following.plan and following.outcome:
            return following.plan.state == state
        newest = self._snapshots.newest(number - 1)
        if newest and newest.round == number:
            return newest.state == state
        if following.plan or newest or number == 0:  # it went further, and its state of then is not kept
            return True
        return self.rounds.decider.current(number).plan is not None

    def _start_from_snapshot(self) -> None:
        """As an island without a part in the run so far."""
        before = self.outer.round, self.outer.outer_hash
        if not self.rounds.archive.take_over(self._find_snapshot):
            self._offer_start()
            self.rounds.archive.take_over(self._snapshots.start)
        if (self.outer.round, self.outer.outer_hash) != before:
            self.outer.write_masters()
            self.pace.postpone()  # no fragment has taken a step: the checkpoint's do not tell when each is due
        self._catch_up()

    def _catch_up(self, is_resuming: bool = False) -> None:
        """Carries out the rounds that have a plan. What this island had contributed to one is then not its own.

        One that the others have not decided yet, or whose average they have not put into the store, is tried again.

        Raises:
            IslandLostError: that stays so for `join_timeout` seconds.
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
                    raise IslandLostError(
                        f"{error}. It may come from an island that holds a later state: start all. If none does, stop "
                        "all, and start them with an empty rendezvous: they go on from their checkpoints in a new run"
                    ) from None
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _may_try_again(self, since: float, pause: float) -> bool:
        """Waits a while, or until there is a later snapshot; returns whether time is left."""
        until = self._clock.now() + pause
        while True:
            if self.should_stop():
                raise StopRequested
            self._clock.sleep(LOOK_SECONDS)
            if self._clock.now() >= until or self._snapshots.newest(self.outer.round) is not None:
                break
        return self._clock.now() < since + self.config.join_timeout

    def _offer_start(self) -> None:
        """Writes this island's outer state as the one that the run starts from, unless it starts from another's."""
        self.rounds.archive.write_snapshot()
        self.island.on_leader(lambda: self._snapshots.decide_start(self.outer.round))

    def _find_snapshot(self) -> str | None:
        """The folder of the newest snapshot, as soon as there is one; None if nobody is about to write it."""
        members = self.pace.members
        wait = WaitNotes(members.island, clock=self._clock).begin(math.inf, "start of the run")
        deadline = self._clock.now() + members.lease  # for the first sign of life of who has just begun the run
        again_at = self._clock.now() + self.config.sync_timeout  # others that miss a round write the start again
        while True:
            start, alive = self._snapshots.start(), members.alive()
            if start is not None:
                newest = self._snapshots.newest()
                if newest and newest.round > round_of(start):
                    return newest.folder
                if self._clock.now() >= again_at:
                    self._snapshots.forgive(start)
                if self._snapshots.is_readable(start) or not self._may_be_written_again(alive):
                    return start
            else:
                may_come = not members.incarnation_of(self.run.by) and self._clock.now() < deadline
                if self.run.by == members.island or not (self.run.by in alive or may_come):
                    return None
            self._rest(wait, "a sound snapshot" if start else f"the outer parameters of island {self.run.by}")

    def _rest(self, wait: Wait, missing: str) -> None:
        """Waits for a moment, and says for whom; raises `StopRequested` if this island is asked to stop."""
        if self.should_stop():
            raise StopRequested
        wait.look(missing)
        self._clock.sleep(LOOK_SECONDS)

    def _may_be_written_again(self, alive: Mapping[int, HeartbeatRecord]) -> bool:
        """Whether another island holds what a damaged snapshot held, or a later state."""
        others = ((island, heartbeat) for island, heartbeat in alive.items() if island != self.config.island)
        return any(island == self.run.by or heartbeat.phase in UNDER_WAY for island, heartbeat in others)

    def await_islands(self) -> None:
        """Waits for all islands where the run begins, or begins again, so that no round passes without them."""
        self.island.on_leader(lambda: await_islands(self.config, self.pace.members, self.should_stop, self._clock))
        self.rounds.archive.rescue_start()

    def let_round_pass(self) -> None:
        """Lets others take a round that they are about to plan, for which this island has yet to train."""
        if self.outer.round == 0:  # where the run begins, all take part
            return
        deadline = self._clock.now() + self.config.grace  # after which they plan it anyway, if they can
        notes = WaitNotes(self.config.island, clock=self._clock)
        note = notes.begin(self.config.grace, f"round {self.outer.round + 1}")

        def has_plan() -> bool:
            try:
                return self.rounds.decider.current(self.outer.round + 1).plan is not None
            except PayloadError:  # which is damaged
                return True

        def wait() -> bool:
            while self.pace.others_convene() and self._clock.now() < deadline:
                if self.pace.members.standing.phase != "passing":
                    self.stand("passing")
                if has_plan():
                    return True
                self._rest(note, "the others, which begin it without this island")
            return has_plan()  # they were faster

        while self.island.on_leader(wait):
            self._catch_up()


def await_islands(
    config: DiLoCoConfig,
    members: Members,
    should_stop: Callable[[], bool],
    clock: Clock = REAL,
) -> None:
    """Returns when all islands are there, or the others train already; or when enough are, and time is over.

    Args:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.

    Raises:
        RendezvousError: fewer than `config.quorum` came within `config.join_timeout` seconds.
    """
    wait = WaitNotes(members.island, clock=clock).begin(config.join_timeout, where=config.rendezvous)
    deadline = clock.now() + config.join_timeout
    told: set[int] = set()
    while True:
        heartbeats = members.look()
        alive = members.alive()
        gone = {island for island, heartbeat in heartbeats.items() if heartbeat.phase == "left"} & members.heard
        for island in gone - told:  # as who is refused does, which is told there, in its own log
            logger.warning("island %d came, and has left again: its own log says why", island)
        told = gone
        ended = {island for island, heartbeat in heartbeats.items() if heartbeat.phase == "finished"}
        check_welcome(members, clock)
        under_way = {island for island, heartbeat in alive.items() if heartbeat.phase in UNDER_WAY}
        doubtful = under_way - members.heard  # all may have been killed, and begin again
        if under_way - doubtful or len((alive.keys() - doubtful) | ended) >= config.num_islands:
            return
        if should_stop():
            raise StopRequested
        if clock.now() > deadline:
            break
        wait.look(set(range(config.num_islands)) - alive.keys() - ended)
        clock.sleep(LOOK_SECONDS)
    if len(alive) < config.quorum:
        missing = sorted(set(range(config.num_islands)) - alive.keys())
        raise RendezvousError(
            f"islands {missing} have not joined within {config.join_timeout:g} s (join_timeout), and no round "
            f"takes place with fewer than {config.quorum} (min_islands): start them, with the same rendezvous"
        )
    logger.warning("starting with islands %s of %d", sorted(alive), config.num_islands)
