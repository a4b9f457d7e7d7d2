"""A node that returns to a mesh while a neighbour of it is started again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh import joining
from hf_diloco.gossip.mesh.edges import Edge, connect_edges
from hf_diloco.gossip.mesh.store import Board, greeting_key
from hf_diloco.methods.topology import make_topology
from tests.clocks import AT_ONCE
from tests.gossip_meshes import join, members_of
from tests.tcp_stores import KeptStore


def test_who_returns_does_not_wait_for_a_start_of_a_neighbour_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour had seen the node come back, but was started again before the two connected."""
    store, returning, restarted = KeptStore(), 0, 1
    for node in (returning, restarted):
        members = members_of(store.client(), node)
        members.enter()
        members.leave("left")
    Board(store.client(), "gossip").put(greeting_key(returning, 2, restarted), {})

    def connect(*arguments: Any) -> tuple[dict[int, Edge], list[int]]:
        members_of(store.client(), restarted).enter()
        return connect_edges(*arguments)

    monkeypatch.setattr(joining, "connect_edges", connect)
    begun = time.monotonic()
    with pytest.raises(IslandLostError, match=f"node {restarted} did not connect"):
        join(store, make_topology("ring", 2), returning)
    assert time.monotonic() - begun < AT_ONCE
