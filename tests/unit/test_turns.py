"""Nodes as threads of one process, one of which computes at a time."""

from __future__ import annotations

import random
import threading
import time
from itertools import groupby

import pytest

from hf_diloco.gossip.threads import Turns
from tests.islands import run_islands

NUM_NODES, NUM_TURNS = 4, 200


def take_turns() -> list[int]:
    """Which node had each turn."""
    turns, barrier, taken = Turns(), threading.Barrier(NUM_NODES), list[int]()

    def run(node: int) -> None:
        with turns.mine():
            with turns.others():
                barrier.wait(30)
            for _ in range(NUM_TURNS):
                taken.append(node)
                time.sleep(0.0005)  # it computes, and whoever has just had a turn comes to ask for the next
                with turns.others():
                    pass

    run_islands(NUM_NODES, run)
    return taken


def test_nobody_has_several_turns_while_others_wait() -> None:
    """Who comes a moment late to ask may miss turns; a lock that is not fair gives one node dozens in a row."""
    taken = take_turns()
    assert sorted(taken) == sorted(list(range(NUM_NODES)) * NUM_TURNS)
    all_are_there = max(taken.index(node) for node in range(NUM_NODES))
    first_is_done = min(len(taken) - taken[::-1].index(node) for node in range(NUM_NODES))
    in_a_row = [len(list(turns)) for _, turns in groupby(taken[all_are_there:first_is_done])]
    assert max(in_a_row) < 3


def test_each_node_draws_its_own_numbers() -> None:
    turns, drawn = Turns(), dict[int, list[float]]()

    def run(node: int) -> None:
        with turns.mine():
            random.seed(node)
            drawn[node] = []
            for _ in range(20):
                drawn[node].append(random.random())
                with turns.others():
                    pass

    run_islands(3, run)
    for node, numbers in drawn.items():
        alone = random.Random(node)
        assert numbers == [alone.random() for _ in range(20)]


def test_the_turn_is_given_on_when_a_node_fails() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="mine"), turns.mine():
        raise ValueError("mine")
    with turns.mine():
        with pytest.raises(ValueError, match="others"), turns.others():
            raise ValueError("others")
        with turns.others():
            pass
