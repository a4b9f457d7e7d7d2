"""How long a node waits for a neighbour that is late, by a clock that the test turns."""

from __future__ import annotations

import pytest

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.mesh.straggler_timeout import StragglerTimeout
from hf_diloco.store.torch_store import ValueStore
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


def look_for(timeout: StragglerTimeout, clock: StillClock, seconds: float, every: float = 0.5) -> None:
    """Looks as often as a wait for a transfer does."""
    look, ends_at = timeout.watch(LATE), clock.time + seconds
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
