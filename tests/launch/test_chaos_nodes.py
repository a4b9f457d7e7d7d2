"""Nodes of a graph, each by its own command: one hangs and starts again alone; one is lost, and all start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos_nodes import NUM_NODES, Graph, finish, run_file

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_long_stop_a_lost_node_and_a_start_of_all(tmp_path: Path) -> None:
    lost, others = 3, [0, 1, 2]
    with Graph(tmp_path, run_file(tmp_path)) as graph:
        graph.start()
        graph.stop_for_long(2)
        graph.bring_back(2)
        graph.kill([lost])
        before = graph.newest(lost)
        graph.wait_until("checkpoints", lambda: all(graph.newest(node) > before for node in others))
        graph.kill(others)
        finish(graph)
        figures = graph.judge()
    assert not graph.problems
    assert figures["of these with nodes that lacked the checkpoint"] == 1
    assert figures["kills"] == NUM_NODES
