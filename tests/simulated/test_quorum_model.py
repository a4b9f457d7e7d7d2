"""The agreement explored: any order of the islands' operations, deaths between any two of them, virtual time."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.membership.candidates import Rules
from hf_diloco.membership.round_records import Attempt, VoteRecord
from hf_diloco.membership.voting import winner
from hf_diloco.store.objects import ObjectStore
from tests.islands_model import World

TARGET = 5
FEW, MANY = 40, 120  # examples of each kind


def explore(
    num_islands: int,
    min_islands: int,
    seed: int,
    prefix: list[int],
    kills: dict[int, int],
    with_stranger: bool = False,
    is_direct: bool = False,
    junk: Mapping[int, Sequence[str]] | None = None,
    wrong: Callable[[int, Attempt, int], bool] | None = None,
    target: int = TARGET,
) -> World:
    """Runs islands under a schedule: `prefix` first, then at random; checks what must hold in any case."""
    rules = Rules(min_islands=min_islands, grace=2.0, patience=8.0, needs_presence=is_direct)
    world = World(ObjectStore(f"memory://{uuid.uuid4().hex}"), num_islands, rules, target, with_stranger)
    if wrong:
        world.wrong = wrong
    world.run(_choices(prefix, seed), kills, junk=junk)
    if wrong:
        check_votes(world)
    else:
        assert not world.unverified
    if not junk:
        assert all(len(seen) == 1 for seen in world.decided.values()), (
            "a plan or an outcome was seen with two contents"
        )
    assert sorted(world.states) == list(range(1, target + 1))
    assert all(len(states) == 1 for states in world.states.values()), "islands differ after a committed round"
    assert all(len(plan.participants) >= 1 for plan in world.plans.values())
    return world


def check_votes(world: World) -> None:
    """What was committed had more than half of the votes, as they lie in the store for ever."""
    for path, seen in world.decided.items():
        outcome = json.loads(next(iter(seen)))
        if not path.endswith("/outcome") or outcome["kind"] == "abort":
            continue
        folder = path.removesuffix("/outcome")
        found = [world.log.read(vote, VoteRecord) for vote in world.log.list(f"{folder}/votes/")]
        means = [vote.mean for vote in found if vote is not None and vote.mean]
        assert 2 * means.count(outcome["mean"]) > len(means), f"{path}: {means}"


def _choices(prefix: list[int], seed: int) -> Iterator[int]:
    yield from prefix
    chance = random.Random(seed)
    while True:
        yield chance.randrange(1 << 16)


SCHEDULES = {
    "num_islands": st.integers(1, 4),
    "seed": st.integers(0, 1 << 32),
    "prefix": st.lists(st.integers(0, 3), max_size=200),
    "kills": st.dictionaries(st.integers(0, 3000), st.integers(0, 3), max_size=6),
    "data": st.data(),
}


@settings(max_examples=FEW)
@given(**SCHEDULES)
def test_any_schedule_and_any_deaths(
    num_islands: int, seed: int, prefix: list[int], kills: dict[int, int], data: st.DataObject
) -> None:
    min_islands = data.draw(st.integers(1, num_islands))
    with_stranger, is_direct = data.draw(st.booleans()), data.draw(st.booleans())
    explore(num_islands, min_islands, seed, prefix, kills, with_stranger, is_direct)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in (100, 200))])
def test_a_death_between_any_two_operations(victim: int, start: int, is_direct: bool) -> None:
    """Two islands in step: one is killed at every turn of their first rounds, one try a turn."""
    for turn in range(start, start + 100, 3):
        explore(2, 2, seed=7, prefix=[], kills={turn: victim}, is_direct=is_direct, target=2)


@pytest.mark.parametrize("seed", range(6))
def test_an_island_does_not_commit_what_the_other_cannot_read(seed: int) -> None:
    """Its own values it takes from memory: it would not see that they are damaged in the store."""
    rules = Rules(min_islands=2, grace=1000.0, patience=1000.0)
    world = World(ObjectStore(f"memory://{uuid.uuid4().hex}"), 2, rules, 2)
    world.faults = lambda island, attempt: attempt.number == 0 and island == 1
    world.run(_choices([], seed), {})
    outcomes = {path: json.loads(*seen)["kind"] for path, seen in world.decided.items() if path.endswith("outcome")}
    assert {path[-10:]: kind for path, kind in outcomes.items()} == {"00/outcome": "abort", "01/outcome": "commit"}
    assert len(outcomes) == 4


def test_the_model_meets_what_it_is_meant_to_explore() -> None:
    """Among a handful of schedules there are aborted attempts, and islands that miss a quorum."""
    worlds = [explore(3, 2, seed, [], {40 * seed + 10: seed % 3}, is_direct=seed % 2 > 0) for seed in range(12)]
    assert any(len(present) < 3 for world in worlds for present in world.exchanging.values())
    assert sum(world.num_aborted for world in worlds) > 0
    assert any(len(plan.participants) < 3 for world in worlds for plan in world.plans.values())


# Islands that compute wrong averages


WRONG_AVERAGES = {
    "num_islands": st.integers(2, 4),
    "seed": st.integers(0, 1 << 32),
    "kills": st.dictionaries(st.integers(0, 3000), st.integers(0, 3), max_size=4),
    "wrong": st.sets(st.tuples(st.integers(0, 3), st.integers(1, TARGET), st.integers(0, 1)), max_size=8),
    "is_direct": st.booleans(),
    "data": st.data(),
}


@settings(max_examples=FEW)
@given(**WRONG_AVERAGES)
def test_no_schedule_commits_what_no_majority_of_the_votes_holds(
    num_islands: int,
    seed: int,
    kills: dict[int, int],
    wrong: set[tuple[int, int, int]],
    is_direct: bool,
    data: st.DataObject,
) -> None:
    def is_wrong(island: int, attempt: Attempt, count: int) -> bool:
        return (island, attempt.round, attempt.number) in wrong and count == 0

    explore(num_islands, data.draw(st.integers(1, num_islands)), seed, [], kills, is_direct=is_direct, wrong=is_wrong)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("num_islands", [2, 4])
def test_votes_that_are_split_commit_nothing(num_islands: int, is_direct: bool) -> None:
    """Half of the islands are wrong in the first attempt of each round: and never is it committed."""
    for seed in range(4):
        world = explore(
            num_islands,
            num_islands,
            seed,
            [],
            {},
            is_direct=is_direct,
            wrong=lambda island, attempt, count: attempt.number == 0 and island % 2 == 1,
        )
        outcomes = [seen for path, seen in world.decided.items() if path.endswith("/00/outcome")]
        first = [json.loads(next(iter(seen)))["kind"] for seen in outcomes]
        assert len(first) == TARGET
        assert set(first) == {"abort"}
        assert not world.unverified
        assert world.num_split > 0


def test_one_of_three_that_is_wrong_is_outvoted_and_reads_again() -> None:
    world = explore(3, 3, 1, [], {}, wrong=lambda island, attempt, count: island == 2 and count == 0)
    assert not world.unverified
    assert world.num_outvoted > 0
    assert world.num_split == 0


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ({}, None),
        ({0: "a"}, None),
        ({0: "a", 1: "b"}, ""),
        ({0: "a", 1: ""}, "a"),
        ({0: "a", 1: "a"}, "a"),
        ({0: "", 1: ""}, ""),
        ({1: "b", 7: "a", 8: "a"}, None),
    ],
)
def test_who_wins_among_two(votes: dict[int, str], expected: str | None) -> None:
    assert winner([0, 1], votes) == expected


@given(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=6), st.permutations(range(6)))
def test_a_winner_stays_the_winner_whatever_comes(places: list[str], order: list[int]) -> None:
    """Places are written once, in any order: who counts early and late never finds two winners."""
    votes: dict[int, str] = {}
    winners = []
    for island in (island for island in order if island < len(places)):
        winners.append(winner(range(len(places)), votes))
        votes[island] = places[island]
    winners.append(winner(range(len(places)), votes))
    assert winners[-1] is not None
    first = next(found for found in winners if found is not None)
    assert all(found == first for found in winners[winners.index(first) :])


# Records that somebody has written, or a disk damaged, at any time

DECISIONS = [
    f"rounds/{number:08d}/{attempt:02d}/{name}.json"
    for number in range(1, TARGET + 1)
    for attempt in (0, 1)
    for name in ("plan", "outcome", "outcome-2")
]
RUBBISH = [
    "incarnations/0/999999.json",
    "incarnations/1/000002.json",
    f"incarnations/1/{'9' * 480}.json",
    "heartbeats/0/999999.json",
    "heartbeats/1/000001.json",
    f"heartbeats/1/{'9' * 480}.json",
    "heartbeats/00/000001.json",
    "rounds/00000002/00/offers/00000-000001-000000.json",
    "rounds/00000003/00/offers/zzz.json",
    "rounds/00000002/00/votes/00001.json",
]


DAMAGES = {
    "num_islands": st.integers(1, 4),
    "seed": st.integers(0, 1 << 32),
    "junk": st.dictionaries(st.integers(0, 1500), st.lists(st.sampled_from(DECISIONS), max_size=2), max_size=3),
    "is_direct": st.booleans(),
    "data": st.data(),
}


@settings(max_examples=FEW)
@given(**DAMAGES)
def test_decisions_that_are_damaged_at_any_time_divide_nobody(
    num_islands: int, seed: int, junk: dict[int, list[str]], is_direct: bool, data: st.DataObject
) -> None:
    """An abort that was read while it was whole may become a commit, but all carry out one plan, with one average."""
    explore(num_islands, data.draw(st.integers(1, num_islands)), seed, [], {}, is_direct=is_direct, junk=junk)


RUBBISH_AND_DEATHS = {
    "seed": st.integers(0, 1 << 32),
    "paths": st.lists(st.sampled_from(DECISIONS + RUBBISH), max_size=12),
    "kills": st.dictionaries(st.integers(0, 2000), st.integers(0, 2), max_size=4),
}


@settings(max_examples=FEW)
@given(**RUBBISH_AND_DEATHS)
def test_rubbish_where_records_will_be_stops_no_run_in_which_islands_die(
    seed: int, paths: list[str], kills: dict[int, int]
) -> None:
    explore(3, 1, seed, [], kills, junk={0: paths})


@pytest.mark.parametrize("kills", [{}, {40: 1}, {60: 1, 90: 0, 200: 1}])
def test_rubbish_in_place_of_a_vote_as_well_stops_no_run(kills: dict[int, int]) -> None:
    """Who could have given that vote, and has not, says so: nobody can have committed by it."""
    attempt = "rounds/00000002/00"
    rubbish = [f"{attempt}/plan.json", f"{attempt}/outcome.json", f"{attempt}/votes/00001.json"]
    for seed in range(3):
        explore(3, 1, seed, [], kills, junk={0: rubbish})


@pytest.mark.parametrize("min_islands", [1, 3])
def test_who_has_read_a_decision_that_is_damaged_with_its_plan_says_it_again(min_islands: int) -> None:
    """Those who have voted cannot carry the attempt out any more, and nobody else may say that it is aborted."""
    attempt = "rounds/00000003/00"
    junk = {623: [f"{attempt}/plan.json", f"{attempt}/outcome.json"]}
    world = explore(3, min_islands, 2, [], {}, is_direct=True, junk=junk)
    assert {json.loads(it)["kind"] for it in world.decided[f"{attempt}/outcome"]} == {"abort"}


@pytest.mark.parametrize("name", ["plan", "outcome"])
def test_an_empty_decision_is_decided_under_another_name(name: str) -> None:
    world = explore(2, 2, 7, [], {}, junk={0: [f"rounds/00000002/00/{name}.json"]})
    assert "rounds/00000002/00/outcome" in world.decided or name == "plan"
    paths = {path for path, _ in world.store.list("rounds/00000002")}
    assert (f"rounds/00000002/00/{name}-2.json" in paths) == (name == "outcome")
    assert ("rounds/00000002/01/plan.json" in paths) == (name == "plan")


def test_rubbish_among_incarnations_and_heartbeats_makes_nobody_dead_or_double() -> None:
    """Two islands that need each other: no round is missed, though rubbish looks newer than each of their records."""
    world = explore(2, 2, 3, [], {}, junk=dict.fromkeys((0, 200, 400), RUBBISH))
    assert world.num_missed == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("test", "strategies"),
    [
        (test_any_schedule_and_any_deaths, SCHEDULES),
        (test_no_schedule_commits_what_no_majority_of_the_votes_holds, WRONG_AVERAGES),
        (test_decisions_that_are_damaged_at_any_time_divide_nobody, DAMAGES),
        (test_rubbish_where_records_will_be_stops_no_run_in_which_islands_die, RUBBISH_AND_DEATHS),
    ],
)
def test_the_same_with_many_examples(test: Any, strategies: dict[str, Any]) -> None:
    settings(max_examples=MANY)(given(**strategies)(test.hypothesis.inner_test))()
