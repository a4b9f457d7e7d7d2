"""Islands as threads that a schedule runs one store operation at a time, in virtual time, and kills where it likes.

What runs is the package's own `Members` and `Quorum`; only the payload is left out: an island's outer state is a hash
of the plans that it has carried out.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hf_diloco.errors import DuplicateIslandError, IslandLostError, PayloadError, StoreError
from hf_diloco.membership.candidates import Rules
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OfferRecord, PlanRecord
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.utils.clock import Clock

OPERATION_SECONDS = 0.01
BEAT, LEASE = 1.0, 4.0


class Killed(BaseException):
    """The schedule has killed this island."""


class HasTime(Protocol):
    """Where virtual time passes."""

    now: float


class Turn:
    """One island's thread: waits for its turns, of which each is one operation on the store or one sleep."""

    def __init__(self, world: HasTime) -> None:
        self._world = world
        # Locks that one thread takes and another gives back: cheaper than a Semaphore, and there are many turns.
        self.granted, self.yielded = threading.Lock(), threading.Lock()
        self.granted.acquire()
        self.yielded.acquire()
        self.wakes_at = 0.0
        self.is_killed = False
        self.has_ended = False

    def start(self, call: Callable[[], object], failures: list[BaseException]) -> None:
        """Begins the thread, which waits for its first turn; an error that ends it is added to `failures`."""

        def live() -> None:
            try:
                self.wait()
                call()
            except Killed:
                pass
            except BaseException as error:
                failures.append(error)
            finally:
                self.has_ended = True
                self.yielded.release()

        threading.Thread(target=live, daemon=True).start()
        self.yielded.acquire()

    def grant(self) -> None:
        """One turn; returns when it is over."""
        self.granted.release()
        self.yielded.acquire()

    def kill(self) -> None:
        """Ends the thread where it stands."""
        self.is_killed = True
        while not self.has_ended:
            self.grant()

    def wait(self) -> None:
        """Gives the turn back, and returns when the schedule grants the next one."""
        self.yielded.release()
        self.granted.acquire()
        if self.is_killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.wakes_at = self._world.now + seconds
        self.wait()


class WorldClock(Clock):
    """Virtual time, of which one island sleeps some."""

    def __init__(self, world: World, sleep: Callable[[float], None]) -> None:
        self._world = world
        self._sleep = sleep

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._sleep(seconds)


class ScheduledStore:
    """A store of which every operation is a turn of its own; an island may be killed before it or after it."""

    tells_changes = False
    is_near = True  # one after the other: an island has one turn at a time

    def __init__(self, store: ObjectStore, turn: Turn) -> None:
        self._store = store
        self._turn = turn

    def decide(self, path: str, data: bytes, limit: int) -> object:
        """Two turns: others may act in between."""
        return data if self.create(path, data) else self.get(path, limit)

    def __getattr__(self, name: str) -> Callable[..., object]:
        operation = getattr(self._store, name)

        def run(*args: object) -> object:
            self._turn.wait()
            answer = operation(*args)
            self._turn.wait()  # the answer is on its way: meanwhile others act, or this island dies
            return answer

        return run


@dataclass
class Disk:
    """What survives an island's death: round and state of its last checkpoint."""

    round: int = 0
    state: str = "00"


@dataclass
class World:
    """The islands, their store, virtual time, and what was seen of it all."""

    store: ObjectStore
    num_islands: int
    rules: Rules
    target: int
    with_stranger: bool = False
    """One more island offers pseudo-gradients that start from other outer parameters."""
    faults: Callable[[int, Attempt], bool] = lambda island, attempt: (
        attempt.number == 0 and attempt.round % 3 == 0 and island == attempt.round % 2
    )
    """Whether an island cannot read an object of an attempt: by default some cannot, once, in some rounds."""
    wrong: Callable[[int, Attempt, int], bool] = lambda island, attempt, count: False
    """Whether an island computes a wrong average of an attempt, the `count`-th time that it does."""
    unverified: set[int] = field(default_factory=set)
    """Rounds of which the committed average is wrong: whoever could tell was gone or late."""
    exchanging: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Who has come to exchange directly in an attempt: island and incarnation."""
    now: float = 0.0
    states: dict[int, set[str]] = field(default_factory=dict)
    """All states that any island has held after a round."""
    decided: dict[str, set[str]] = field(default_factory=dict)
    """All contents that any island has seen of a plan or outcome."""
    plans: dict[int, PlanRecord] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    num_missed: int = 0
    num_aborted: int = 0
    num_skipped: int = 0
    num_split: int = 0
    num_outvoted: int = 0

    @property
    def log(self) -> RunLog:
        """What all of them have written."""
        return RunLog(self.store, Seal(b"", "run"))

    def run(
        self,
        choices: Iterator[int],
        kills: dict[int, int],
        max_turns: int = 40_000,
        junk: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """Runs all islands to the last round.

        Args:
            choices: which of the islands that can act does so, turn by turn.
            kills: turn -> island to kill then; it is started again at once, from its last checkpoint.
            max_turns: more is a failure to make progress.
            junk: turn -> paths that then hold what is no record, whether there was one or not.
        """
        disks = [Disk() for _ in range(self.num_islands)]
        turns = [self._start(island, disks[island]) for island in range(self.num_islands)]
        if self.with_stranger:
            turns.append(self._start(self.num_islands, Disk()))
        for number in range(max_turns):
            for path in (junk or {}).get(number, ()):
                self.store.put(path, b"")
            if kills.get(number, self.num_islands) < self.num_islands:
                island = kills[number]
                turns[island].kill()
                turns[island] = self._start(island, disks[island])
            active = [turn for turn in turns if not turn.has_ended]
            if not active:
                break
            if all(turn.wakes_at > self.now for turn in active):
                self.now = min(turn.wakes_at for turn in active)
            ready = [turn for turn in active if turn.wakes_at <= self.now]
            ready[next(choices) % len(ready)].grant()
            self.now += OPERATION_SECONDS
        stuck = [island for island, turn in enumerate(turns) if not turn.has_ended]
        for turn in turns:
            turn.kill()
        if self.failures:
            raise self.failures[0]
        assert not stuck, f"islands {stuck} made no progress in {max_turns} turns"

    def _start(self, island: int, disk: Disk) -> Turn:
        turn = Turn(self)
        kind = Stranger if island == self.num_islands else Life
        turn.start(lambda: kind(self, turn, island, disk).run(), self.failures)
        return turn


class Life:
    """One process of an island: joins, then offers and carries out plans until the last round."""

    def __init__(self, world: World, turn: Turn, island: int, disk: Disk) -> None:
        self._world = world
        self._turn = turn
        self._island = island
        self._disk = disk
        self._log = RunLog(ScheduledStore(world.store, turn), Seal(b"", "run"))  # type: ignore[arg-type]
        self._members = Members(self._log, island, lease=LEASE, clock=WorldClock(world, turn.sleep))
        self._quorum = Quorum(self._members, world.rules, clock=WorldClock(world, self._sleep))
        self._heartbeat_at = world.now
        self.round, self.state = disk.round, disk.state
        self._num_averages: dict[str, int] = {}
        self._is_connected = False  # with the last round's participants: then it does not look before it offers

    def run(self) -> None:
        while True:
            try:
                self._members.enter()
                break
            except DuplicateIslandError:
                self._turn.sleep(LEASE)  # the predecessor's last heartbeat was seen late
        self._set_phase("training")
        try:
            while self.round < self._world.target:
                self._try_round()
        except DuplicateIslandError:
            return
        self._members.leave("finished")

    def _sleep(self, seconds: float) -> None:
        """Who waits gives signs of life."""
        self._turn.sleep(seconds)
        if self._world.now - self._heartbeat_at >= BEAT:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._members.heartbeat()
        self._heartbeat_at = self._world.now

    def _set_phase(self, phase: str) -> None:
        self._members.standing.phase = phase  # type: ignore[assignment]
        self._members.standing.round = self.round
        if phase == "syncing" and self.round % 2:  # the sign of life may come behind the offer
            self._heartbeat_at = -BEAT
        else:
            self._heartbeat()

    def _try_round(self) -> None:
        self._set_phase("syncing")
        has_looked, self._is_connected = not self._is_connected, False
        try:
            attempt = self._quorum.current(self.round + 1) if has_looked else Attempt(self.round + 1, 0)
            if attempt.plan is None:
                attempt = self._quorum.convene(attempt, self._offer())
            self._carry_out(attempt)
        except PayloadError:  # a decision that is damaged: the others' state is in a snapshot
            self._world.num_skipped += 1
            newest = max(self._world.states, default=0)
            if newest > self.round:
                self.round, (self.state,) = newest, self._world.states[newest]
            self._sleep(1.0)
        except (IslandLostError, StoreError):
            self._world.num_missed += 1
            self._sleep(0.1)

    def _offer(self) -> OfferRecord:
        return OfferRecord(
            island=self._island,
            incarnation=self._members.incarnation,
            serial=0,
            steps=1,
            weight=1.0,
            norm=1.0,
            state=self.state,
            objects=[{}],
        )

    def _carry_out(self, attempt: Attempt) -> None:
        world, plan = self._world, attempt.plan
        assert plan is not None
        world.decided.setdefault(f"{attempt.path}/plan", set()).add(plan.model_dump_json())
        assert plan.state == self.state
        found = self._quorum.with_offers(attempt, self.state)
        if found is None:
            return
        attempt, offers = found, found.offers
        assert {offer.state for offer in offers} == {self.state}
        mean = _hash("".join(participant.offer for participant in plan.participants))
        outcome, is_connected = attempt.outcome, False
        if world.rules.needs_presence and outcome is None:
            if (self._island, self._members.incarnation) not in {
                (offer.island, offer.incarnation) for offer in offers
            }:
                try:
                    self._quorum.await_outcome(attempt, patience=20.0)
                except IslandLostError:
                    world.num_missed += 1
                return
            lost = self._exchange(attempt, offers)
            if lost is not None:
                outcome = self._quorum.abort(attempt, plan.participants[lost].offer, "lost")
            is_connected = lost is None
        if outcome is None and world.faults(self._island, attempt):
            outcome = self._quorum.abort(attempt, plan.participants[-1].offer, "unreadable")
        count = self._num_averages[attempt.path] = self._num_averages.get(attempt.path, -1) + 1
        own = _hash(f"{mean} {self._island} {count}") if world.wrong(self._island, attempt, count) else mean
        outcome = outcome or self._quorum.commit(attempt, own)
        decision = outcome.model_dump_json(include={"kind", "mean"})
        world.decided.setdefault(f"{attempt.path}/outcome", set()).add(decision)
        if outcome.kind == "abort":
            world.num_aborted += 1
            world.num_split += outcome.is_split
            return
        if outcome.mean != own and count < 2:  # it computes the average again
            world.num_outvoted += 1
            return
        if outcome.mean != mean:
            world.unverified.add(attempt.round)
            mean = outcome.mean
        self._quorum.remember(attempt)
        self._is_connected = is_connected
        self.round += 1
        self.state = _hash(self.state + mean)
        world.states.setdefault(self.round, set()).add(self.state)
        known = world.plans.setdefault(self.round, plan)
        assert known == plan
        if self.round % 2 == 0:
            self._disk.round, self._disk.state = self.round, self.state
        self._set_phase("training")

    def _exchange(self, attempt: Attempt, offers: Sequence[OfferRecord]) -> int | None:
        """Meets the other participants; returns the place of one that does not come."""
        present = self._world.exchanging.setdefault(attempt.path, set())
        present.add((self._island, self._members.incarnation))
        deadline = self._world.now + self._world.rules.grace
        while True:
            missing = [place for place, offer in enumerate(offers) if (offer.island, offer.incarnation) not in present]
            if not missing:
                return None
            if self._world.now >= deadline:
                return missing[0]
            self._sleep(0.3)


class Stranger(Life):
    """An island that believes that it holds the run's state, and does not."""

    def run(self) -> None:
        self._members.enter()
        self.state = "ff"
        while self.round < self._world.target:
            self._set_phase("training")
            attempt = self._quorum.current(self.round + 1)
            if attempt.plan is None:
                self._quorum.offer(attempt, self._offer())
            if attempt.outcome is not None:
                self.round += 1
            self._turn.sleep(0.5)
        self._members.leave("left")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
