"""How long a node waits for a neighbour that is late, by a clock that the test turns."""

from __future__ import annotations

import pytest

from hf_diloco.errors import IslandLostError, StoreError
from hf_diloco.gossip.mesh.exchange import SILENCE_SECONDS, StragglerTimeout
from hf_diloco.gossip.mesh.store import KEEPER, Board
from hf_diloco.gossip.records import Record
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import StillClock

SECONDS, LATE = 3.0, 1


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def board() -> Board:
    return Board(ValueStore.in_memory(), "gossip")


@pytest.fixture
def timeout(board: Board, clock: StillClock) -> StragglerTimeout:
    return StragglerTimeout(board, node=0, num_nodes=3, seconds=SECONDS, notes=WaitNotes(0, "node", clock=clock))


def look_for(
    timeout: StragglerTimeout, clock: StillClock, seconds: float, every: float = 0.5, late: int = LATE
) -> None:
    """Looks as often as a wait for a transfer does."""
    look, ends_at = timeout.watch(late), clock.time + seconds
    look()
    while clock.time < ends_at:
        clock.sleep(every)
        look()


def test_a_late_neighbour_is_given_up_when_its_time_is_over(timeout: StragglerTimeout, clock: StillClock) -> None:
    look_for(timeout, clock, SECONDS - 0.5)
    assert timeout.reason == "its connection broke"
    with pytest.raises(IslandLostError, match="node 1 did not come within 3 s"):
        look_for(timeout, clock, 0.5)
    assert timeout.reason == "it did not come within 3 s"


def test_a_node_that_stood_still_itself_gives_up_nobody_for_that(timeout: StragglerTimeout, clock: StillClock) -> None:
    look_for(timeout, clock, 1.0)
    look_for(timeout, clock, 60.0, every=60.0)
    look_for(timeout, clock, SECONDS - 1.5)
    with pytest.raises(IslandLostError, match="did not come"):
        look_for(timeout, clock, 0.5)


def test_what_the_store_takes_to_answer_is_no_pause(board: Board, clock: StillClock) -> None:
    class SlowBoard(Board):
        def put(self, key: str, record: Record) -> None:
            clock.sleep(0.8)

    slow = SlowBoard(ValueStore.in_memory(), "gossip")
    timeout = StragglerTimeout(slow, 0, 3, SECONDS, WaitNotes(0, "node", clock=clock))
    with pytest.raises(IslandLostError, match="node 1 did not come within 3 s"):
        look_for(timeout, clock, SECONDS)


def test_a_neighbour_that_waits_for_another_one_has_as_much_time_again(
    timeout: StragglerTimeout, clock: StillClock, board: Board
) -> None:
    look_for(timeout, clock, SECONDS - 0.5)
    board.put(f"waits/{LATE}", {"for": 2, "tick": 1})
    look_for(timeout, clock, SECONDS)
    with pytest.raises(IslandLostError, match="did not come"):
        look_for(timeout, clock, 0.5)


def test_a_neighbour_that_waits_for_this_node_has_no_excuse(
    timeout: StragglerTimeout, clock: StillClock, board: Board
) -> None:
    look_for(timeout, clock, SECONDS - 0.5)
    board.put(f"waits/{LATE}", {"for": 0, "tick": 1})
    with pytest.raises(IslandLostError, match="did not come"):
        look_for(timeout, clock, 0.5)


class GoneBoard(Board):
    """Of a store that was lost with the node that keeps it."""

    num_asked = 0

    def put(self, key: str, record: Record) -> None:
        self.num_asked += 1
        raise StoreError("it does not answer")


@pytest.mark.parametrize(("late", "times"), [(2, 2), (KEEPER, 1)])
def test_without_the_store_all_but_its_keeper_have_as_much_time_again(
    late: int, times: int, clock: StillClock
) -> None:
    """They may be waiting for the keeper, and can no longer say so."""
    board = GoneBoard(ValueStore.in_memory(), "gossip")
    timeout = StragglerTimeout(board, 1, 3, SECONDS, WaitNotes(1, "node", clock=clock))
    look_for(timeout, clock, times * SECONDS - 0.5, late=late)
    with pytest.raises(IslandLostError, match=f"node {late} did not come"):
        look_for(timeout, clock, 0.5, late=late)
    assert board.num_asked == 1, "it is not asked again"


def test_a_store_that_was_away_for_a_moment_is_told_again(clock: StillClock) -> None:
    """Or neighbours would give this node up for the rest of the run, whenever it waits for another one."""

    class AwayBoard(Board):
        is_away = True

        def put(self, key: str, record: Record) -> None:
            if self.is_away:
                raise StoreError("it does not answer")
            super().put(key, record)

    away = AwayBoard(ValueStore.in_memory(), "gossip")
    timeout = StragglerTimeout(away, 1, 3, SECONDS, WaitNotes(1, "node", clock=clock))
    look_for(timeout, clock, 1.0, late=2)
    away.is_away = False
    timeout.begin()
    look_for(timeout, clock, 1.0, late=2)
    assert not away.has("waits/1"), "not yet"
    clock.sleep(SILENCE_SECONDS)
    timeout.begin()
    look_for(timeout, clock, 1.0, late=2)
    record = away.read("waits/1")
    assert record is not None
    assert record["for"] == 2


def test_who_gives_up_waits_for_nobody(timeout: StragglerTimeout) -> None:
    look = timeout.watch(LATE)
    look()
    timeout.give_up()
    with pytest.raises(IslandLostError, match="no longer waiting for node 1"):
        look()
    assert timeout.limit.is_over
