"""Two nodes that go on agree on a step to come, however their steps and their questions fall."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hf_diloco.errors import IslandLostError, PayloadError
from hf_diloco.gossip.mesh import entry
from hf_diloco.gossip.mesh.entry import Proposer, Responder
from hf_diloco.gossip.mesh.joining import Discovery
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.membership.heartbeats import Members
from hf_diloco.store.values import ValueStore

ASKING, ASKED = 0, 1
MAX_GAP = 5


def sides() -> tuple[Proposer, Responder]:
    board = Board(ValueStore.in_memory(), "test")
    return Proposer(board, "x", ASKING, ASKED, MAX_GAP), Responder(board, "x", ASKED, ASKING)


@given(first=st.tuples(st.integers(0, 50), st.integers(0, 5)), turns=st.lists(st.booleans(), max_size=200))
def test_both_find_the_same_step_or_none(first: tuple[int, int], turns: list[bool]) -> None:
    """Who has found its step waits there, as in an exchange, for the other one."""
    proposals, answers = sides()
    steps = [first[0], first[0] + first[1]]
    found: list[int | None] = [None, None]
    for is_asked in turns:
        side = int(is_asked)
        if found[side] is None:
            asked = answers if is_asked else proposals
            try:
                if asked.is_now(steps[side]):
                    found[side] = steps[side]
            except IslandLostError:
                break
            steps[side] += 1
    for side, other in (ASKING, ASKED), (ASKED, ASKING):
        step = found[side]
        if step is not None:
            assert found[other] == step or (found[other] is None and steps[other] <= step), "it is still to come"


@pytest.mark.parametrize("gap", range(-MAX_GAP + 1, MAX_GAP + 1))
def test_it_comes_about_where_both_go_on_in_turn(gap: int) -> None:
    """Who is ahead waits, once they have agreed."""
    proposals, answers = sides()
    asking, asked = 20, 20 + gap
    for _ in range(40):
        is_now = proposals.is_now(asking), answers.is_now(asked)
        if all(is_now):
            break
        asking += not is_now[ASKING]
        asked += not is_now[ASKED]
    assert asking == asked <= 20 + 2 * MAX_GAP


def test_who_never_hears_in_time_asks_for_later_and_later_steps_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "MAX_ROUNDS", 5)
    proposals, answers = sides()
    monkeypatch.setattr(answers, "_answer", lambda step: None)
    proposed: list[int] = []

    def go_on() -> None:
        for step in range(1000):
            assert not proposals.is_now(step)
            assert not answers.is_now(step)
            if proposals._step is not None and proposals._step not in proposed:
                proposed.append(proposals._step)

    with pytest.raises(IslandLostError, match="node 1 is at step"):
        go_on()
    assert len(proposed) == 5
    margins = [later - earlier for earlier, later in pairwise(proposed)]
    assert margins == sorted(set(margins)), "longer each time"


def test_too_far_apart() -> None:
    proposals, answers = sides()
    answers.is_now(10 + MAX_GAP + 1)
    with pytest.raises(IslandLostError, match="node 1 is at step 16, this one at 10"):
        proposals.is_now(10)


def test_only_what_changes_is_heard() -> None:
    """What a node said before it was lost is there for good."""
    log = ValueStore.in_memory().log

    def enter(node: int) -> tuple[Members, Discovery]:
        members = Members(log, node, lease=0, unit="node")
        members.enter()
        return members, Discovery(members)

    def heard(discovery: Discovery, start: int) -> tuple[int, str, list[int]]:
        (announcement,) = discovery.listen({1: start}).values()
        return announcement.start, announcement.said.phase, announcement.said.misses

    _, ours = enter(0)
    its_members, its = enter(1)
    assert ours.listen({1: 1}) == {}
    its.announce([2, 0])
    assert ours.listen({1: 1}) == {}, "it may be gone: nobody knows how old this is"
    its.announce([2, 0])
    assert heard(ours, 1) == (1, "joining", [0, 2])
    assert ours.listen({1: 1}) == {}
    its_members.set_phase("training")
    its.announce([])
    assert heard(ours, 1) == (1, "training", [])
    _, again = enter(1)
    again.announce([0])
    assert heard(ours, 1) == (2, "joining", [0])
    assert heard(Discovery(its_members), 1) == (2, "joining", [0]), "it was not there before"
    assert Discovery(its_members).listen({1: 2}) == {}
    its_members.leave("left")
    assert ours.listen({1: 2}) == {}, "an earlier process of it"


def test_who_has_left_is_not_there() -> None:
    log = ValueStore.in_memory().log
    ours, theirs = (Members(log, node, unit="node") for node in range(2))
    discovery = Discovery(ours)
    theirs.enter()
    theirs.heartbeat()
    assert discovery.listen({1: 1}) == {}
    theirs.leave("left")
    assert discovery.listen({1: 1}) == {}


@pytest.mark.parametrize("record", [{}, {"round": 1}, {"round": 1, "step": "soon"}, {"round": None, "step": 3}])
def test_a_proposal_that_makes_no_sense_is_refused(record: dict[str, object]) -> None:
    board = Board(ValueStore.in_memory(), "test")
    board.put("x/proposal", record)
    with pytest.raises(PayloadError, match="node 0 published a record without a whole number"):
        Responder(board, "x", ASKED, ASKING).is_now(0)
    board.put(f"x/at/{ASKED}", {"step": 1.5})
    with pytest.raises(PayloadError, match="node 1 published"):
        Proposer(board, "x", ASKING, ASKED, MAX_GAP).is_now(0)
