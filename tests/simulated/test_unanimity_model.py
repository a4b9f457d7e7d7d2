"""Rounds that need all islands, explored: any order of operations, messages that are lost, deaths, disks that lie."""

from __future__ import annotations

import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.errors import DiLoCoError, StoreError
from hf_diloco.membership import unanimity as membership_unanimity
from hf_diloco.membership.all_gather import AllGather
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.membership.unanimity import MAX_TRIES, Unanimity
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from hf_diloco.utils.clock import Clock
from tests.islands_model import OPERATION_SECONDS, ScheduledStore, Turn

TARGET = 3
PATIENCE, VOTE_PATIENCE = 10.0, 2.0
MAX_TURNS = 20_000
FEW, MANY = 40, 400

_here = threading.local()


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        kills: turn -> island to kill then. With island 0 the store goes.
        stops: turn -> island that is asked to stop.
        junk: turn -> name of a decision of the newest attempt, in whose place there is no record then.
        lost: of 16 messages so many do not come.
        late: seconds by which some of what nobody waits for comes into the store later.
        wrong: island and attempt in which it computes a wrong average.
        damaged: likewise, what comes damaged.
        short: islands that end a round earlier.
        cut: pairs of islands between which nothing comes, from some turn on.
    """

    kills: Mapping[int, int] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    junk: Mapping[int, str] = field(default_factory=dict)
    lost: int = 0
    late: float = 0.0
    wrong: Collection[tuple[int, int, int]] = ()
    damaged: Collection[tuple[int, int, int]] = ()
    short: Collection[int] = ()
    cut: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class World:
    """The islands, their store, virtual time, and what was seen of it all."""

    def __init__(self, num_islands: int, seed: int, faults: Faults) -> None:
        self.num_islands = num_islands
        self.faults = faults
        self.random = random.Random(seed)
        self.store = ObjectStore(f"memory://{uuid.uuid4().hex}")
        self.now = 0.0
        self.turns: list[tuple[int, Turn]] = []
        self.dead: set[int] = set()
        self.closed: set[int] = set()
        self.stopping: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.lives: list[Life] = []
        self.present: defaultdict[str, set[int]] = defaultdict(set)
        self.votes: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.sent: defaultdict[int, dict[tuple[int, int], bytes]] = defaultdict(dict)
        self.decided: defaultdict[str, set[tuple[str, str, bool]]] = defaultdict(set)
        self.failures: list[BaseException] = []

    def start(self, island: int, call: Callable[[], object]) -> Turn:
        """A thread of an island, that waits for its turns."""
        turn = Turn(self)

        def live() -> None:
            _here.world, _here.island, _here.turn = self, island, turn
            call()

        turn.start(live, self.failures)
        self.turns.append((island, turn))
        return turn

    def run(self) -> None:
        self.lives = [Life(self, island) for island in range(self.num_islands)]
        for life in self.lives:
            life.turn = self.start(life.island, life.run)
        for number in range(MAX_TURNS):
            self._harm(number)
            active = [turn for island, turn in self.turns if not turn.has_ended and island not in self.dead]
            if not active:
                break
            if all(turn.wakes_at > self.now for turn in active):
                self.now = min(turn.wakes_at for turn in active)
            self.random.choice([turn for turn in active if turn.wakes_at <= self.now]).grant()
            self.now += OPERATION_SECONDS
        stuck = [island for island, turn in self.turns if not turn.has_ended and island not in self.dead]
        for _, turn in self.turns:
            turn.kill()
        if self.failures:
            raise self.failures[0]
        assert not stuck, f"islands {stuck} do not end"

    def _harm(self, number: int) -> None:
        faults = self.faults
        for happens, whom in ((faults.kills, self.dead), (faults.stops, self.stopping)):
            if happens.get(number, self.num_islands) < self.num_islands:
                whom.add(happens[number])
        if number in faults.cut:
            self.cut.add(frozenset(faults.cut[number]))
        if number in faults.junk and self.decided:
            self.store.put(f"{max(self.decided)}/{faults.junk[number]}.json", b"")

    def is_gone(self, island: int) -> bool:
        return island in self.dead or island in self.closed

    def broken(self, island: int) -> list[int]:
        """Islands to which one has no connection."""
        others = (other for other in range(self.num_islands) if other != island)
        return [other for other in others if self.is_gone(other) or frozenset((island, other)) in self.cut]


class WorldClock(Clock):
    """Virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        _here.turn.sleep(seconds)

    def event(self) -> Any:
        return WorldEvent(self._world)


class WorldEvent:
    """For which one thread waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: Turn | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting:
            self._waiting.wakes_at = self._world.now

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            self._waiting = _here.turn
            self._waiting.sleep(timeout)
            self._waiting = None
        return self._is_set


class KeptStore(ScheduledStore):
    """A store that is gone with island 0."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Callable[..., object]:
        operation = getattr(self._world.store, name)

        def wait() -> None:
            _here.turn.wait()
            if self._world.is_gone(0):
                raise StoreError("gone")

        def run(*args: object) -> object:
            wait()
            answer = operation(*args)
            wait()
            return answer

        return run


class ModelLinks:
    """Messages of one island, of which some are lost."""

    def __init__(self, world: World, island: int) -> None:
        self._world = world
        self._island = island
        self._number = 0

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        world, self._number = self._world, self._number + 1
        if self._island in world.closed:
            return False
        for other in range(world.num_islands):
            if other != self._island and world.random.randrange(16) >= world.faults.lost:
                world.sent[self._number][self._island, other] = message
                world.lives[other].all_gather.news.set()
        return True

    def messages(self) -> dict[int, bytes]:
        world = self._world
        broken = world.broken(self._island)
        sent = world.sent[self._number].items()
        return {by: message for (by, to), message in sent if to == self._island and by not in broken}

    def find_broken(self) -> Collection[int]:
        return self._world.broken(self._island)


class SeenUnanimity(Unanimity):
    """Notes what it takes for decided."""

    world: World

    def _decide(self, attempt: Attempt, wish: OutcomeRecord) -> OutcomeRecord:
        outcome = super()._decide(attempt, wish)
        self.world.decided[attempt.path].add((outcome.kind, outcome.mean, outcome.is_split))
        return outcome


class Life:
    """One process of an island, from the first round to the last."""

    turn: Turn

    def __init__(self, world: World, island: int) -> None:
        self.world = world
        self.island = island
        self.round = 0
        self.num_tries = 0
        self.error: DiLoCoError | None = None
        clock = WorldClock(world)
        store: Any = KeptStore(world)
        unused: Any = None
        self.all_gather = AllGather(unused, island, world.num_islands, lambda: island in world.stopping, clock=clock)
        self.unanimity = SeenUnanimity(
            self.all_gather,
            RunLog(store, Seal(b"", "run")),
            PATIENCE,
            VOTE_PATIENCE,
            [ModelLinks(world, island)],
        )
        self.unanimity.world = world

    def run(self) -> None:
        world, last = self.world, TARGET - (self.island in self.world.faults.short)
        try:
            while self.round < last:
                self.turn.sleep(world.random.choice([0.0, 0.1, 1.0]))
                self._try_round()
        except DiLoCoError as error:
            self.error = error
        if world.is_gone(0) and self.island:
            world.closed.add(self.island)
            return
        with suppress(DiLoCoError):
            self.unanimity.leave(self.round + 1, finished=self.error is None)
        if self.island:
            world.closed.add(self.island)
        else:
            self._stay()

    def _stay(self) -> None:
        """Island 0 keeps the store until the others have ended."""
        while any(not self.world.is_gone(other) for other in range(1, self.world.num_islands)):
            self.turn.sleep(1.0)
        self.world.closed.add(0)

    def _try_round(self) -> None:
        world, one = self.world, self.unanimity
        number = self.round + 1
        self.num_tries += 1
        state = f"{self.round:02x}"
        offer = OfferRecord(
            island=self.island, incarnation=1, serial=number, steps=1, weight=1.0, norm=1.0, state=state
        )
        attempt = one.agree(number, offer)
        assert attempt.plan is not None
        assert attempt.plan.islands == set(range(world.num_islands))
        place = self.island, number, attempt.number
        failure = self._exchange(attempt)
        if failure or place in world.faults.damaged:
            outcome = one.abort(attempt, "" if failure else "the offer", failure or "damaged")
            if not outcome.is_split:
                assert outcome.kind == "abort"
                raise DiLoCoError(failure or "damaged again and again")
            return
        mean = f"{number:02x}" if place not in world.faults.wrong else f"{number:02x}{self.island:02x}"
        world.votes[attempt.path][self.island] = mean
        outcome = one.commit(attempt, mean)
        if outcome.kind == "commit":
            assert list(world.votes[attempt.path].values()) == [mean] * world.num_islands
            self.round = number
        elif attempt.number + 1 >= MAX_TRIES:
            raise DiLoCoError("diverged")

    def _exchange(self, attempt: Attempt) -> str:
        """Meets the others; returns why that failed."""
        world, deadline = self.world, self.world.now + VOTE_PATIENCE
        world.present[attempt.path].add(self.island)
        while absent := set(range(world.num_islands)) - world.present[attempt.path]:
            gone = absent.intersection(world.broken(self.island))
            if gone or world.now >= deadline:
                return f"{gone or absent} lost"
            self.turn.sleep(0.3)
        return ""


@pytest.fixture(autouse=True)
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody waits for is done in any order."""
    monkeypatch.setattr(membership_unanimity, "call_behind", call_behind)


def call_behind(call: Callable[[], object], passing: type[Exception]) -> None:
    def run() -> None:
        world = _here.world
        _here.turn.sleep(world.random.choice([0.0, 0.0, world.faults.late]))
        with suppress(passing):
            call()

    _here.world.start(_here.island, run)


def explore(num_islands: int, seed: int, faults: Faults) -> World:
    """Runs islands under a schedule, and checks what must hold in any case."""
    world = World(num_islands, seed, faults)
    world.run()
    for path, seen in world.decided.items():
        assert len(seen) == 1, f"{path}: islands saw {seen}"
    for life in world.lives:
        committed = {path for path, seen in world.decided.items() if ("commit" in {kind for kind, *_ in seen})}
        assert life.round <= len(committed)
    return world


PLACES = st.tuples(st.integers(0, 3), st.integers(1, TARGET), st.integers(0, 2))
TURNS = st.integers(0, 600)
SCHEDULES = {
    "num_islands": st.integers(2, 4),
    "seed": st.integers(0, 1 << 32),
    "faults": st.builds(
        Faults,
        kills=st.dictionaries(TURNS, st.integers(0, 3), max_size=1),
        stops=st.dictionaries(TURNS, st.integers(0, 3), max_size=1),
        lost=st.sampled_from([0, 0, 2, 8, 16]),
        late=st.sampled_from([0.0, 0.5, 3.0]),
        wrong=st.sets(PLACES, max_size=3),
        damaged=st.sets(PLACES, max_size=3),
        short=st.sets(st.integers(0, 3), max_size=1),
        cut=st.dictionaries(TURNS, st.sampled_from([(0, 1), (1, 2), (2, 3)]), max_size=1),
    ),
}


DAMAGES = {
    "num_islands": st.integers(2, 4),
    "seed": st.integers(0, 1 << 32),
    "faults": st.builds(
        Faults,
        kills=st.dictionaries(TURNS, st.integers(1, 3), max_size=1),
        junk=st.dictionaries(
            TURNS, st.sampled_from(["plan", "outcome", "outcome-2", "votes/00000", "votes/00001"]), max_size=3
        ),
        lost=st.sampled_from([0, 2, 16]),
        late=st.sampled_from([0.0, 0.5]),
    ),
}


@settings(max_examples=FEW)
@given(**SCHEDULES)
def test_no_schedule_divides_the_islands(num_islands: int, seed: int, faults: Faults) -> None:
    explore(num_islands, seed, faults)


@settings(max_examples=FEW)
@given(**DAMAGES)
def test_decisions_that_are_damaged_divide_nobody(num_islands: int, seed: int, faults: Faults) -> None:
    explore(num_islands, seed, faults)


@pytest.mark.parametrize("lost", [0, 4, 16])
@pytest.mark.parametrize("num_islands", [2, 3, 4])
def test_where_nothing_fails_every_round_takes_one_attempt(num_islands: int, lost: int) -> None:
    """Also where some messages do not come, or none does."""
    for seed in range(3):
        lives = explore(num_islands, seed, Faults(lost=lost)).lives
        assert [(life.round, life.num_tries, life.error) for life in lives] == [(TARGET, TARGET, None)] * num_islands


@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in (120, 240))])
def test_a_death_between_any_two_operations(start: int) -> None:
    for turn in range(start, start + 120, 2):
        explore(3, 5, Faults(kills={turn: 1 + turn // 2 % 2}, lost=2, late=0.5))


def test_the_model_meets_what_it_is_meant_to_explore() -> None:
    wrong, damaged = [(0, 2, 0)], [(1, 1, 0), *((1, 3, number) for number in range(MAX_TRIES))]
    world = explore(3, 1, Faults(wrong=wrong, damaged=damaged))
    kinds = {path: next(iter(seen))[0] for path, seen in world.decided.items()}
    assert [kinds[path] for path in sorted(kinds)] == ["abort", "commit"] * 2 + ["abort"] * MAX_TRIES
    assert [life.round for life in world.lives] == [2] * 3
    assert "1" in str(explore(3, 1, Faults(kills={100: 1})).lives[0].error)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("test", "strategies"),
    [
        (test_no_schedule_divides_the_islands, SCHEDULES),
        (test_decisions_that_are_damaged_divide_nobody, DAMAGES),
    ],
)
def test_the_same_with_many_examples(test: Any, strategies: dict[str, Any]) -> None:
    settings(max_examples=MANY)(given(**strategies)(test.hypothesis.inner_test))()
