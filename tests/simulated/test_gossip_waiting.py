"""What a node says while it waits for others, and when it has nobody left to average with; here each is a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from hf_diloco.errors import ExchangeError, FingerprintError, IslandLostError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.mesh.store import lost_key
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.records import Record
from hf_diloco.inner.island import IslandGroup
from hf_diloco.methods.gossip import make_optimizer
from hf_diloco.methods.topology import make_topology
from hf_diloco.trainer.gossip_start import Beginning
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes
from tests import gossip_meshes
from tests.clocks import LONG, FastClock
from tests.islands import run_islands
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = 2.0


def join(store: KeptStore, node: int, clock: Clock = REAL, **settings: Any) -> MeshNeighbours:
    notes = WaitNotes(node, "node", first=0.2, every=0.2, clock=clock)
    return gossip_meshes.join(store, make_topology("ring", 2), node, notes=notes, **settings)


def test_a_node_that_is_alone_says_for_whom_it_waits(store: KeptStore, caplog: pytest.LogCaptureFixture) -> None:
    with FastClock() as clock, pytest.raises(IslandLostError, match=f"within {LONG:g} s"):
        join(store, 0, clock)
    assert "node 0: waiting for node 1 (" in caplog.text


def test_a_node_that_returns_says_for_whom_it_waits(store: KeptStore, caplog: pytest.LogCaptureFixture) -> None:
    with FastClock() as clock:
        for _ in range(2):
            with pytest.raises(IslandLostError, match=f"within {LONG:g} s"):
                join(store, 1, clock)
    assert "node 1: returning: waiting for node 0 (" in caplog.text


def test_a_step_says_for_whom_it_waits_and_how_the_node_comes_back(
    store: KeptStore, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Barrier(2)

    def run(node: int) -> str:
        neighbours = join(store, node, exchange_timeout=SHORT)
        message = ""
        if node == 1:
            x = torch.zeros(8)
            with pytest.raises(IslandLostError) as caught:
                neighbours.mix([x], [torch.empty(8)], 0)
            message = str(caught.value)
        ended.wait(LONG)
        neighbours.close()
        return message

    _, message = run_islands(2, run)
    assert "node 1: a step: waiting for node 0 (" in caplog.text
    assert "Start node 1 again, alone, by the same command: it returns" in message


def test_a_node_that_hangs_where_all_average_is_waited_for_by_name_and_lost(
    store: KeptStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It was in the group of the average before."""
    ring, ended = make_topology("ring", 3), threading.Barrier(3)

    def run(node: int) -> list[str]:
        notes = WaitNotes(node, "node", first=0.2, every=0.2)
        neighbours = gossip_meshes.join(store, ring, node, notes=notes, exchange_timeout=SHORT)
        neighbours.average(torch.ones(8))
        if node != 2:
            give_up = neighbours._group._give_up

            def look(error: ExchangeError) -> None:
                assert f"node {node}: the average of all nodes: waiting for nodes " in caplog.text
                give_up(error)

            neighbours._group._give_up = look  # type: ignore[method-assign]
            neighbours.average(torch.ones(8))
            assert neighbours._board.has(lost_key(2))  # by which a later group knows that it need not wait for it
        ended.wait(LONG)
        news = neighbours.take_events()
        neighbours.close()
        return news

    lost = (
        "node 2 was lost (it did not join the average of all nodes): its weight stays with this node until it returns"
    )
    without = "the average of all nodes is over nodes 0, 1 from now on, without node 2"
    assert run_islands(3, run) == [[lost, without], [lost, without], []]
    assert "the average of all nodes: waiting for node 2 (" in caplog.text


def test_the_node_that_keeps_the_rendezvous_says_that_it_cannot_return(store: KeptStore) -> None:
    connected, ended = threading.Barrier(2), threading.Barrier(2)

    def run(node: int) -> str:
        neighbours = join(store, node)
        connected.wait(LONG)
        if node == 1:
            neighbours.close()
            ended.wait(LONG)
            return ""
        with pytest.raises(IslandLostError) as caught:
            neighbours.mix([torch.zeros(8)], [torch.empty(8)], 0)
        ended.wait(LONG)
        neighbours.close()
        return str(caught.value)

    message, _ = run_islands(2, run)
    assert "Node 0 keeps the rendezvous" in message
    assert "then start all nodes again" in message


def test_who_shows_no_record_is_named(store: KeptStore, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Barrier(2)

    def run(node: int) -> None:
        neighbours = join(store, node, clock)
        if node == 0:
            with pytest.raises(IslandLostError, match=f"did not publish the record 'join' within {LONG:g} s"):
                neighbours.share("join", {})
        ended.wait(LONG)
        neighbours.close()

    with FastClock() as clock:
        run_islands(2, run)
    assert "node 0: waiting for node 1 (" in caplog.text


def test_nobody_ends_before_all_have_read_why_they_do_not_train_together(store: KeptStore, tmp_path: Path) -> None:
    """Else who reads after node 0 has ended finds no rendezvous, instead of the reason."""
    topology, has_ended = make_topology("ring", 2), threading.Event()

    class Slow(MeshNeighbours):
        def share(self, topic: str, record: Record) -> list[Record]:
            if self.node == 1 and topic == "join":
                self._board.put(f"share/{topic}/1/{self.node}", record)
                has_ended.wait(SHORT)
                assert not has_ended.is_set(), "what this one is about to read has gone"
            return super().share(topic, record)

    def run(number: int) -> str:
        client = store.client()
        members = gossip_meshes.members_of(client, number)
        mesh = Slow(client, topology, number, "127.0.0.1", members, connect_timeout=LONG, exchange_timeout=LONG)
        node, model = NodeNeighbours(mesh, topology, number, IslandGroup()), torch.nn.Linear(1, 1)
        optimizer = make_optimizer("dsgd", model.parameters(), node, 0.1)
        config = GossipConfig(num_nodes=2, node=number, rendezvous=store.url)
        beginning = Beginning(config, topology, {}, node, optimizer, IslandGroup())
        with pytest.raises(FingerprintError) as caught:
            beginning.begin(model, TrainerState(max_steps=1), None, tmp_path / str(number), {})
        if number == 0:
            has_ended.set()
        node.close()
        return str(caught.value)

    first, second = run_islands(2, run)
    assert first == second
    assert "do not train the same thing" in first
