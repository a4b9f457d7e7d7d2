"""Nodes that return while others stop, leave again or wait: who gives up whom, and what is said; each is a thread."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_diloco import GossipCallback
from hf_diloco.errors import DuplicateIslandError, FingerprintError, IslandLostError, RendezvousError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.entry import MAX_ROUNDS, decide
from hf_diloco.gossip.mesh.joining import Discovery, Joining
from hf_diloco.gossip.mesh.store import Board, entry_prefix, greeting_key, lost_key
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.open import open_node
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import MAX_STEPS, join_facts
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.topology import make_topology
from hf_diloco.store.values import ValueStore
from hf_diloco.trainer.gossip_start import make_fingerprint
from hf_diloco.utils.threads import call_within
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import AT_ONCE, LONG
from tests.gossip_meshes import LOCALHOST, join, members_of, talk_together
from tests.islands import run_islands, try_islands
from tests.processes import find_free_port
from tests.small_model import Linear
from tests.tcp_stores import KeptStore

pytestmark = pytest.mark.usefixtures("one_thread", "compiled_averages")

SIZE = 64
N = TypeVar("N", bound=Neighbours)


class Ring:
    """Nodes that take steps together, to the end that the one that returns decides on.

    Attributes:
        topology: of the nodes.
        news: of each node.
    """

    def __init__(self, num_nodes: int, exchange_timeout: float = LONG, connect_timeout: float = LONG) -> None:
        self.news: dict[int, list[str]] = {node: [] for node in range(num_nodes)}
        self.topology = make_topology("ring", num_nodes)
        self._timeout = exchange_timeout
        self._connect_timeout = connect_timeout
        self._store = KeptStore()
        self._joined: list[MeshNeighbours] = []
        self._last: int | None = None
        self._ended = threading.Barrier(num_nodes)
        self._failures: list[BaseException] = []

    def client(self) -> ValueStore:
        return self._store.client()

    def board(self) -> Board:
        return Board(self.client(), "gossip")

    def join(self, node: int) -> MeshNeighbours:
        neighbours = join(
            self._store,
            self.topology,
            node,
            connect_timeout=self._connect_timeout,
            exchange_timeout=self._timeout,
            notes=WaitNotes(node, "node", first=0.2, every=0.2),
        )
        self._joined.append(neighbours)
        return neighbours

    def run(self, live: Callable[[int], Neighbours | None]) -> None:
        """`live` takes a node to the end; none leaves before all are there."""

        def run(node: int) -> None:
            try:
                neighbours = live(node)
                self._ended.wait(LONG)
            except BaseException as error:
                self._failures.append(error)
                self._ended.abort()
                for one in self._joined:
                    one.close()
                raise
            if neighbours is not None:
                neighbours.close()

        try_islands(self.topology.num_nodes, run, timeout=2 * LONG)
        for first in self._failures:  # whose closing made the others fail
            raise first

    def step(self, neighbours: Neighbours, step: int) -> None:
        x = torch.full((SIZE,), float(neighbours.node))
        neighbours.offer(x, step)
        neighbours.mix([x], [torch.empty_like(x)], step)
        self.news[neighbours.node] += neighbours.take_events()

    def end_at(self, step: int) -> None:
        """Called by a node that has entered, before its first step: nobody is there yet."""
        self._last = step

    def go_on(
        self,
        neighbours: N,
        step: int,
        pause: float = 0.01,
        before: Callable[[], None] = lambda: None,
    ) -> N:
        """To the end; calls `before` ahead of each step."""
        deadline = time.monotonic() + LONG
        while self._last is None or step < self._last:
            assert time.monotonic() < deadline, self.news
            time.sleep(pause)
            before()
            self.step(neighbours, step)
            step += 1
        return neighbours


def test_a_node_whose_training_ended_in_an_error_returns_in_the_same_process() -> None:
    """Nobody has closed what it had met the others with, as the Trainer tells no callback of errors."""
    ring, url, begins = Ring(3), f"tcp://{LOCALHOST}:{find_free_port()}", threading.Barrier(3)

    def meet(number: int) -> NodeNeighbours:
        config = GossipConfig(num_nodes=3, node=number, rendezvous=url, exchange_timeout=LONG, join_timeout=LONG)
        return open_node(config, ring.topology, IslandGroup())

    def live(number: int) -> NodeNeighbours:
        node = meet(number)
        begins.wait(LONG)
        for step in range(2):
            ring.step(node, step)
        if number < 2:
            return ring.go_on(node, 2)
        again = meet(number)
        assert again.is_returning
        step = again.enter(x := torch.zeros(SIZE))
        assert x[0] == 0.5, "the mean of the others"
        ring.end_at(step + 3)
        return ring.go_on(again, step)

    ring.run(live)
    for number in (0, 1):
        assert [line.split(":")[0] for line in ring.news[number]] == [
            "node 2 was lost (its connection broke)",
            "node 2 has returned",
        ]


def test_whoever_counts_other_nodes_is_refused_and_delays_nobody() -> None:
    url = f"tcp://{LOCALHOST}:{find_free_port()}"

    def meet(node: int, num_nodes: int) -> NodeNeighbours:
        config = GossipConfig(num_nodes=num_nodes, node=node, rendezvous=url, join_timeout=LONG)
        return open_node(config, make_topology("ring", num_nodes), IslandGroup())

    def run(node: int) -> None:
        if node == 1:
            with pytest.raises(RendezvousError, match=f"node 1 has num_nodes=3, and the run at {url} num_nodes=2"):
                meet(node, num_nodes=3)
        meet(node, num_nodes=2).close()

    run_islands(2, run)


def lost_by(news: list[str]) -> list[str]:
    return [line.split(":")[0] for line in news if "was lost" in line]


def test_who_stops_while_a_node_enters_is_given_up_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """A neighbour of the stopped one has to wait, and so has the other one, which has given already, and its own."""
    seconds, enters, gives, stops = 3.0, 2, 1, 3
    ring = Ring(6, seconds, connect_timeout=3 * LONG)  # others come late who wait for the one that stops
    has_stopped = threading.Event()

    def live(node: int) -> MeshNeighbours | None:
        neighbours = ring.join(node)
        for step in range(3):
            ring.step(neighbours, step)
        if node == enters:
            neighbours.close()
            neighbours = ring.join(node)
            step = neighbours.enter(x := torch.empty(SIZE))
            assert torch.equal(x, torch.full((SIZE,), float(gives)))
            assert neighbours.lost == {stops: f"it did not come within {seconds:g} s"}
            ring.end_at(step + 4)
            return ring.go_on(neighbours, step)
        if node == stops:
            board, prefix, steps = ring.board(), entry_prefix(enters, 2), itertools.count(3)

            def stop() -> None:
                """At the step at which it would give, asked as it asks itself: it stops at no other."""
                step, proposal = next(steps), board.read(f"{prefix}/proposal") or {"step": math.inf}
                if proposal["step"] <= step and decide(board, prefix, proposal["round"], node, is_on=False):
                    has_stopped.set()
                    time.sleep(3 * seconds)

            with pytest.raises(IslandLostError, match="Start node 3 again, alone"):
                ring.go_on(neighbours, 3, 0.2, stop)
            return neighbours
        return ring.go_on(neighbours, 3, 0.2)

    ring.run(live)
    assert has_stopped.is_set()
    assert ring.news[0] == ring.news[5] == []
    assert lost_by(ring.news[gives]) == [f"node {enters} was lost (its connection broke)"]
    assert lost_by(ring.news[4]) == [f"node {stops} was lost (it did not come within {seconds:g} s)"]
    assert f"node {gives}: letting node {enters} in: waiting for node {enters} (" in caplog.text
    assert f"node {enters}: returning: waiting for node {stops} (" in caplog.text


def test_a_node_that_enters_where_nobody_waits_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    ring, enters, computes = Ring(3), 1, 2
    connected, has_ended = threading.Barrier(3), threading.Event()

    def live(node: int) -> MeshNeighbours:
        neighbours = ring.join(node)
        neighbours.published()
        connected.wait(LONG)
        if node == enters:
            neighbours.close()
            neighbours = ring.join(node)
            neighbours.published()
            try:
                neighbours.enter(torch.empty(SIZE))
            finally:
                has_ended.set()
            return neighbours
        deadline, step = time.monotonic() + LONG, 0
        while not has_ended.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.01)
            if node != computes or not neighbours.lost or f"waiting for node {computes} (" in caplog.text:
                neighbours.offer(torch.zeros(SIZE), step)
            step += 1
        return neighbours

    ring.run(live)
    assert f"node {enters}: returning: waiting for node {computes} (" in caplog.text


def test_a_node_that_dies_before_it_connects_costs_its_next_start_nothing() -> None:
    """Its neighbours have greeted it, and wait for it no longer than it waits to be let in."""
    ring, leaver = Ring(3), 1

    def call_and_die() -> None:
        board = ring.board()
        members = members_of(ring.client(), leaver)
        members.enter()
        calls = Discovery(members)
        deadline = time.monotonic() + LONG
        while not all(board.has(f"greet/{leaver}/2/{peer}") for peer in (0, 2)):
            assert time.monotonic() < deadline
            calls.announce([0, 2])
            time.sleep(0.1)

    def live(node: int) -> MeshNeighbours:
        neighbours = ring.join(node)
        for step in range(3):
            ring.step(neighbours, step)
        if node != leaver:
            return ring.go_on(neighbours, 3)
        neighbours.close()
        call_and_die()
        begun = time.monotonic()
        neighbours = ring.join(node)
        step = neighbours.enter(torch.empty(SIZE))
        assert time.monotonic() - begun < AT_ONCE
        assert not neighbours.lost
        ring.end_at(step + 4)
        return ring.go_on(neighbours, step)

    ring.run(live)


def test_a_neighbour_that_dies_after_its_greeting_ends_nobodys_return() -> None:
    """The node enters with those that are there."""
    ring, leaver, dies = Ring(4, exchange_timeout=6.0), 1, 2
    has_left = threading.Event()

    def live(node: int) -> MeshNeighbours | None:
        neighbours = ring.join(node)
        for step in range(3):
            ring.step(neighbours, step)
        if node == dies:
            neighbours.close()
            has_left.wait(LONG)
            ring.board().put(f"greet/{leaver}/2/{dies}", {})
            return None
        if node != leaver:
            return ring.go_on(neighbours, 3)
        neighbours.close()
        has_left.set()
        neighbours = ring.join(node)
        step = neighbours.enter(torch.empty(SIZE))
        assert neighbours.lost.keys() == {dies}
        ring.end_at(step + 4)
        return ring.go_on(neighbours, step)

    ring.run(live)


def enter_alone(ring: Ring, go: Callable[[MeshNeighbours], MeshNeighbours | None], message: str) -> None:
    """Node 1 of a ring of two returns, and is refused; `go` is what node 0 does once they are connected."""
    is_connected = threading.Event()

    def live(node: int) -> MeshNeighbours | None:
        neighbours = ring.join(node)
        ring.step(neighbours, 0)
        if node == 0:
            with pytest.raises(IslandLostError, match="all neighbours of node 0 are lost"):
                ring.go_on(neighbours, 1)
            is_connected.wait(LONG)
            return go(neighbours)
        neighbours.close()
        neighbours = ring.join(node)
        is_connected.set()
        with pytest.raises(IslandLostError, match=message):
            neighbours.enter(torch.empty(SIZE))
        return neighbours

    ring.run(live)


def test_a_node_whose_neighbours_go_while_it_enters_is_told() -> None:
    def leave(neighbours: MeshNeighbours) -> None:
        neighbours.close()

    enter_alone(Ring(2), leave, "node 1 could not return, as none of its neighbours is there")


def test_a_node_whose_neighbour_is_always_past_the_step_is_told() -> None:
    ring = Ring(2)
    board, prefix = ring.board(), entry_prefix(1, 2)
    board.put(f"{prefix}/at/0", {"step": 5})
    for number in range(1, MAX_ROUNDS + 1):
        board.put(f"{prefix}/{number}/0", {"is_to_come": False})
    enter_alone(ring, lambda neighbours: neighbours, "node 1 could not agree with its neighbours on a step")


def test_a_node_that_returns_with_another_number_of_steps_is_refused(tmp_path: Path) -> None:
    """Before it takes part, and so before it takes any step."""
    ring, returns = Ring(2), 1
    config = GossipConfig(method="dsgd", num_nodes=2, node=returns, rendezvous="tcp://127.0.0.1:1")
    facts = join_facts({MAX_STEPS: 3, **make_fingerprint(config, ring.topology, Linear())}, {})
    is_refused = threading.Event()

    def come_back(neighbours: MeshNeighbours) -> None:
        node = NodeNeighbours(neighbours, ring.topology, returns, IslandGroup())
        model, args = Linear(), TrainingArguments(str(tmp_path), max_steps=5, use_cpu=True, report_to="none")
        callback = GossipCallback(config, neighbours=node)
        optimizer = callback.make_optimizer(model, args)
        data = [{"x": torch.ones(4), "y": torch.ones(1)}] * 8
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback])
        message = "trains something else: max_steps is 3 there, and 5 here; set max_steps to one number"
        with pytest.raises(FingerprintError, match=message):
            trainer.train()
        assert node.is_returning, "it has not entered"

    def live(node: int) -> MeshNeighbours:
        neighbours = ring.join(node)
        neighbours.share("join", {"facts": facts})
        if node == returns:
            neighbours.close()
            neighbours = ring.join(node)
            try:
                come_back(neighbours)
            finally:
                is_refused.set()
            return neighbours
        with suppress(IslandLostError):  # it is alone
            ring.step(neighbours, 0)
        while not is_refused.wait(0.05):
            neighbours.offer(torch.zeros(SIZE), 1)
        return neighbours

    ring.run(live)


def test_a_second_process_of_a_node_is_refused_while_the_first_lives() -> None:
    store, topology = KeptStore(), make_topology("ring", 2)

    def talk(node: int, mesh: MeshNeighbours) -> None:
        if node == 1:
            second = Members(mesh._members.log, node, unit="node")
            with pytest.raises(
                DuplicateIslandError,
                match=r"process runs as node 1 of this run \(process \d+ on .*\): give every node its own number",
            ):
                join(store, topology, node, members=second)
        x = torch.full((SIZE,), float(node))
        mesh.mix([x], [out := torch.empty_like(x)], 0)
        assert not mesh.lost
        assert torch.equal(out, torch.full((SIZE,), 0.5))

    talk_together(2, lambda node: join(store, topology, node), talk)


@pytest.mark.parametrize(("by", "there"), [(2, [1, 3]), (0, [3])])
def test_whom_a_node_itself_had_lost_is_waited_for_when_it_returns(by: int, there: list[int]) -> None:
    """It was stopped, gave up a neighbour that goes on, and was started again. What others say of it counts."""
    store = ValueStore.in_memory()
    board = Board(store, "test")
    assert members_of(store, 2).enter() == 1
    endpoint, notes = Endpoint(store, 2, LOCALHOST, 2 * LONG), WaitNotes(2, "node")
    returning = Joining(endpoint, board, members_of(store, 2), [1, 3], LONG, notes)
    returning.starts = {1: 1, 3: 1}
    board.put(lost_key(1), {"by": by, "reason": "it did not come within 12 s"})
    board.put(greeting_key(2, 2, 3), {})
    later = threading.Timer(3.0, lambda: board.put(greeting_key(2, 2, 1), {}))
    later.start()
    assert returning.await_greetings() == there
    later.cancel()


def test_over_a_slow_link_to_the_store_a_neighbour_that_stands_still_is_given_up() -> None:
    """What the store takes to answer is no pause of the node that asks."""
    store, topology = KeptStore(), make_topology("ring", 3)
    have_lost, has_ended = threading.Barrier(3), threading.Event()

    def wait_in_vain() -> None:
        back = join(store, topology, 1, exchange_timeout=0.5)
        read = back._board.read
        back._board.read = lambda *args: time.sleep(0.6) or read(*args)  # type: ignore[method-assign,func-returns-value]
        try:
            with pytest.raises(IslandLostError, match="none of its neighbours is there"):
                call_within(AT_ONCE, lambda: back.enter(torch.zeros(SIZE)))
        finally:
            has_ended.set()
            back.close()

    def run(node: int) -> None:
        neighbours = join(store, topology, node)
        if node == 1:
            neighbours.close()
            have_lost.wait(LONG)
            wait_in_vain()
            return
        neighbours.offer(torch.zeros(SIZE), 0)
        neighbours.mix([torch.zeros(SIZE)], [torch.empty(SIZE)], 0)
        have_lost.wait(LONG)
        has_ended.wait(LONG)
        neighbours.close()

    assert try_islands(3, run) == [None, None, None]
