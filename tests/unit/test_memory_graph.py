"""Nodes as threads of one process: who leaves when."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.methods.topology import make_topology
from tests.clocks import LONG
from tests.islands import run_islands

NUM_NODES = 4


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_who_leaves_after_an_exchange_spoils_it_for_nobody() -> None:
    """Also for those who have not woken up from it yet."""
    for _ in range(100):
        graph = MemoryGraph(make_topology("ring", NUM_NODES))

        def run(number: int, graph: MemoryGraph = graph) -> float:
            end, vector = graph.node(number), torch.tensor([float(number)])
            end.average(vector)
            end.close()
            return float(vector)

        assert run_islands(NUM_NODES, run) == [1.5] * NUM_NODES


def test_who_leaves_before_is_named_to_all() -> None:
    graph = MemoryGraph(make_topology("ring", NUM_NODES))

    def run(number: int) -> None:
        if number == 2:
            graph.node(number).close()
            return
        with pytest.raises(IslandLostError, match="did not join the exchange") as caught:
            graph.node(number).average(torch.zeros(1))
        assert 2 in caught.value.islands, "perhaps among others, who had yet to come"

    run_islands(NUM_NODES, run)


def test_who_has_left_waits_for_nobody() -> None:
    end, begun = MemoryGraph(make_topology("ring", NUM_NODES), timeout=LONG).node(0), time.monotonic()
    end.close()
    with pytest.raises(IslandLostError, match="nodes 1-3 did not join"):
        end.average(torch.zeros(1))
    assert time.monotonic() - begun < LONG / 2
