"""Groups of nodes that average: a node that stops between its votes, and groups that do not come about.

When a node stops between its votes, some of the others have all votes of an average, and some have not.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from hf_diloco.errors import IslandLostError, PayloadError
from hf_diloco.gossip.mesh.average import MAX_ATTEMPTS, GroupAverage
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.methods.topology import make_topology
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Lane, RateLimit, Traffic
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import LONG
from tests.gossip_meshes import LOCALHOST, join
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread", "compiled_averages")

SHORT = 3.0
NUM_NODES, STOPPED, AHEAD = 4, 3, 1
"""Node 1 has two neighbours, 0 and 2, and so has node 3."""


class Stopped(Exception):
    """The node does nothing more, but its connections stand."""


class OneVoteArrives(MeshExchange):
    """In the first vote of a group of four, the stopped node's vote comes to one node only."""

    def __init__(self, lane: Lane, **settings: Any) -> None:
        super().__init__(lane, **settings)
        self._is_first = lane.num_islands == NUM_NODES
        self._place = lane.island

    def average(self, values: torch.Tensor, *args: Any, **settings: Any) -> Traffic:
        if values.numel() > 1 or not self._is_first:
            return super().average(values, *args, **settings)
        self._is_first = False
        if self._place == AHEAD:
            return Traffic()
        if self._place == STOPPED:
            raise Stopped
        time.sleep(SHORT)
        raise IslandLostError("no vote", [STOPPED])


def test_others_keep_the_mean_and_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_diloco.gossip.mesh.average.MeshExchange", OneVoteArrives)
    store = KeptStore()
    have_ended = threading.Barrier(NUM_NODES)

    def run(node: int) -> tuple[float, tuple[int, ...], set[int]]:
        neighbours = join(store, make_topology("ring", NUM_NODES), node, exchange_timeout=SHORT)
        x, out = torch.full((8,), float(node)), torch.empty(8)
        with suppress(Stopped):
            neighbours.average(x)
            for step in range(4):
                neighbours.mix([x], [out], step)
                x.copy_(out)
            neighbours.average(x)
        have_ended.wait(2 * LONG)
        lost = set(neighbours.lost)
        neighbours.close()
        return float(x[0]), neighbours.averaged_over, lost

    for mean, members, lost in run_islands(NUM_NODES, run)[:STOPPED]:
        assert (mean, members, lost) == (1.5, (0, 1, 2), {STOPPED})


def average_as_node_0(decided: dict[int, object]) -> None:
    """Node 0 of two comes to an average; somebody has decided who is in the group of these attempts."""
    store = ValueStore.in_memory()
    board = Board(store, "test")
    for attempt, nodes in decided.items():
        board.put(f"average{attempt}/group", {"nodes": nodes})
    endpoint = Endpoint(store, 0, LOCALHOST, 0.2, RateLimit(), None)
    GroupAverage(endpoint, board, 2, list, False, WaitNotes(0, "node")).average(torch.ones(8))


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ("all", PayloadError, "the list of nodes that average is invalid"),
        ([0, 9], PayloadError, "the list of nodes that average is invalid"),
        ([1], IslandLostError, "node 1 average without this one, node 0, which came too late"),
        ([0], IslandLostError, "node 1 did not join the average. No other is left"),
    ],
)
def test_a_group_that_a_node_cannot_average_in(nodes: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        average_as_node_0({1: nodes})


def test_nodes_that_never_reach_each_other_give_up() -> None:
    """Each sees that the other has come, and then waits for it in vain."""
    with pytest.raises(IslandLostError, match=f"form a group to average in {MAX_ATTEMPTS} attempts: check the links"):
        average_as_node_0({attempt: [0, 1] for attempt in range(1, MAX_ATTEMPTS + 1)})
