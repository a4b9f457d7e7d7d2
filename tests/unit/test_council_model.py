"""The agreement explored: any order of the islands' operations, deaths between any two of them, virtual time."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from hf_diloco.agreement.council import Rules
from hf_diloco.agreement.objects import open_object_store
from tests.islands_model import World

TARGET = 5


def explore(
    num_islands: int,
    min_islands: int,
    seed: int,
    prefix: list[int],
    kills: dict[int, int],
    with_stranger: bool = False,
    is_direct: bool = False,
) -> World:
    """Runs islands under a schedule: `prefix` first, then at random; checks what must hold in any case."""
    rules = Rules(min_islands=min_islands, grace=2.0, patience=8.0, needs_presence=is_direct)
    world = World(open_object_store(f"memory://{uuid.uuid4().hex}"), num_islands, rules, TARGET, with_stranger)
    world.run(_choices(prefix, seed), kills)
    assert all(len(seen) == 1 for seen in world.decided.values()), "a plan or an outcome was seen with two contents"
    assert sorted(world.states) == list(range(1, TARGET + 1))
    assert all(len(states) == 1 for states in world.states.values()), "islands differ after a committed round"
    assert all(len(plan.participants) >= 1 for plan in world.plans.values())
    return world


def _choices(prefix: list[int], seed: int) -> Iterator[int]:
    yield from prefix
    chance = random.Random(seed)
    while True:
        yield chance.randrange(1 << 16)


@settings(max_examples=80)
@given(
    num_islands=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
    prefix=st.lists(st.integers(0, 3), max_size=200),
    kills=st.dictionaries(st.integers(0, 3000), st.integers(0, 3), max_size=6),
    data=st.data(),
)
def test_any_schedule_and_any_deaths(
    num_islands: int, seed: int, prefix: list[int], kills: dict[int, int], data: st.DataObject
) -> None:
    min_islands = data.draw(st.integers(1, num_islands))
    with_stranger, is_direct = data.draw(st.booleans()), data.draw(st.booleans())
    explore(num_islands, min_islands, seed, prefix, kills, with_stranger, is_direct)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("start", range(0, 400, 100))
def test_a_death_between_any_two_operations(victim: int, start: int, is_direct: bool) -> None:
    """Two islands in step: one is killed at every turn of their first rounds, one try a turn."""
    for turn in range(start, start + 100, 3):
        explore(2, 2, seed=7, prefix=[], kills={turn: victim}, is_direct=is_direct)


@pytest.mark.parametrize("seed", range(20))
def test_an_island_does_not_commit_what_the_other_cannot_read(seed: int) -> None:
    """Its own values it takes from memory: it would not see that they are damaged in the store."""
    rules = Rules(min_islands=2, grace=1000.0, patience=1000.0)
    world = World(open_object_store(f"memory://{uuid.uuid4().hex}"), 2, rules, 2)
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
