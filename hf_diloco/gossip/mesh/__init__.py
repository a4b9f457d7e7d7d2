"""Nodes in processes of their own: one pair of sockets per edge of the graph, and a store for small records.

If a node is lost, its neighbours leave it out of their sums, add its weight to their own, and go on. An average over
all nodes is then over the remaining ones. When the node is restarted, it begins with the mean of its neighbours. Two
running nodes that have lost only each other reconnect.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from hf_diloco.errors import ConfigError, DiLoCoError, IslandLostError
from hf_diloco.gossip.mesh.average import GroupAverage
from hf_diloco.gossip.mesh.edges import Endpoint
from hf_diloco.gossip.mesh.entry import Entry, FreeEntry
from hf_diloco.gossip.mesh.exchange import StragglerTimeout, Swapping
from hf_diloco.gossip.mesh.joining import Joining
from hf_diloco.gossip.mesh.published import ENDED, MeshPublished
from hf_diloco.gossip.mesh.rejoin import Reception
from hf_diloco.gossip.mesh.store import BROKEN, KEEPER, Board, lost_key
from hf_diloco.gossip.neighbours import Neighbours, Piece
from hf_diloco.gossip.published import Published
from hf_diloco.gossip.records import Record
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.topology import Topology
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import RateLimit, Traffic
from hf_diloco.utils.text import name_all
from hf_diloco.utils.waiting import WaitNotes

_MISSED_AVERAGE = "it did not join the average of all nodes"


class MeshNeighbours(Neighbours):
    """One process's end of the graph.

    A neighbour whose connection breaks, or that is later than `exchange_timeout`, is lost: from then on `mix` leaves
    it out, and raises an error only if no neighbour is left. `close` may be called while another thread is in `mix`.

    After a call of `published`, nodes are not in lockstep, and a node without neighbours goes on alone. If all
    neighbours have lost a node that still runs, its `offer` or `average` raises an `IslandLostError`.

    Args:
        store: the rendezvous, hosted by node 0; see `store.tcp_store.meet`.
        address: local address to listen on, as the neighbours see it.
        members: heartbeats of this node, which enters here and leaves at `close`, and of the others.
        connect_timeout: seconds to wait for all neighbours at the start, and for shared records.
        exchange_timeout: seconds that a neighbour may be late in an exchange. A neighbour that itself waits for a lost
            node is given more.
        rate_limit: limit on all that this node sends. Default: none.
        name: identifies the mesh in the store.
        notes: log for which nodes this node waits.
        key: authenticates nodes to each other, and encrypts their traffic. Default: none.

    Attributes:
        peers: all nodes with which this node mixes at some step.
        lost: the nodes that this one has lost, each with the reason in words.

    Raises:
        ConfigError: the graph has no such node.
        DuplicateIslandError: another process runs as this node.
        IslandLostError: neighbours did not connect within the timeout; names them.
        ForgedError: a process that answered as a neighbour does not hold the key.
    """

    is_on_host = True

    def __init__(
        self,
        store: ValueStore,
        topology: Topology,
        node: int,
        address: str,
        members: Members,
        *,
        connect_timeout: float,
        exchange_timeout: float,
        rate_limit: RateLimit | None = None,
        name: str = "gossip",
        notes: WaitNotes | None = None,
        key: LinkKey | None = None,
    ) -> None:
        if not 0 <= node < topology.num_nodes:
            raise ConfigError(
                f"node {node}: {topology.name} has nodes 0 to {topology.num_nodes - 1}; give one of them"
            )
        self.node = node
        self.num_nodes = topology.num_nodes
        self.topology = topology
        self.lost: dict[int, str] = {}
        self._news: list[str] = []
        self._endpoint = Endpoint(store, node, address, exchange_timeout, rate_limit or RateLimit(), key)
        self._connect_timeout = connect_timeout
        self._notes = notes or WaitNotes(node, "node")
        self._board = Board(store, name, self._notes.clock)
        self._num_shared: dict[str, int] = {}
        self._published: MeshPublished | None = None
        self._is_swapping = threading.Lock()
        self._is_closed = False
        self.peers = list(topology.peers(node))
        self._members = members
        self._joining = Joining(self._endpoint, self._board, members, self.peers, connect_timeout, self._notes)
        self.is_returning = self._joining.start > 1
        try:
            self._edges = self._joining.meet()
        except BaseException:
            members.leave("left")
            raise
        self._straggler_timeout = StragglerTimeout(self._board, node, self.num_nodes, exchange_timeout, self._notes)
        self._reception = Reception(self._joining, self.num_nodes, self._straggler_timeout)
        for peer in self.peers:
            if peer not in self._edges:
                self._lose(peer, "it was not there when this node returned")
        self._swapping = Swapping(self._edges, self._straggler_timeout, self._give_up)
        self._group = GroupAverage(
            self._endpoint, self._board, self.num_nodes, self._find_lost, self.is_returning, self._notes
        )

    # Exchanges.

    def swap(self, pieces: Sequence[Piece]) -> Traffic:
        num_bytes = sum(sum(piece.bytes_to.values()) for piece in pieces)
        what, otherwise = "node sends in a step", "choose a graph with fewer neighbours"
        self._endpoint.rate_limit.check(num_bytes, what, self._endpoint.timeout, otherwise)
        has_company = any(piece.bytes_to or piece.bytes_from for piece in pieces)
        if has_company:
            self._check_peers_left()
        with self._is_swapping:
            traffic = self._swapping.run(pieces)
        if has_company:
            self._check_peers_left()
        return traffic

    def life(self, peer: int) -> str | None:
        return self._edges[peer].life if peer in self._edges else None

    def check_average(self, vector: torch.Tensor) -> None:
        self._group.check(vector)

    def average(self, vector: torch.Tensor) -> Traffic:
        if self.num_nodes == 1:
            return Traffic()
        before = self._group.members
        traffic = self._group.average(vector)
        self._straggler_timeout.extend()
        if self._group.members != before:
            self._note_members(before)
        return traffic

    @property
    def averaged_over(self) -> tuple[int, ...]:
        return self._group.members if self.num_nodes > 1 else (self.node,)

    def share(self, topic: str, record: Record) -> list[Record]:
        number = self._num_shared[topic] = self._num_shared.get(topic, 0) + 1
        keys = {node: f"share/{topic}/{number}/{node}" for node in range(self.num_nodes)}
        self._board.put(keys[self.node], record)
        wait = self._notes.begin(self._connect_timeout)

        def look(missing: Collection[int]) -> None:
            wait.look(missing)
            if not self._reception.has_begun:
                self._refuse_gone(missing)

        records = self._board.await_all(keys, self._connect_timeout, look)
        if missing := keys.keys() - records.keys():
            remedy = "Check that all nodes run, and start those that do not"
            if self._reception.has_begun:
                remedy = f"A further training begins on all nodes alike. If they go on with this one: {self._remedy()}"
            raise IslandLostError(
                f"{name_all(missing, 'node')} did not publish the record {topic!r} within {self._connect_timeout:g} "
                f"s. {remedy}",
                missing,
            )
        return list(records.values())

    def _refuse_gone(self, missing: Collection[int]) -> None:
        """Raises `IslandLostError` if one of these nodes is gone before training begins, as it cannot rejoin then.

        Neighbours notice a broken connection, and tell the others through the store.
        """
        for node in missing:
            try:
                if node in self._edges:
                    self._edges[node].check()
                    continue
            except IslandLostError:
                self._board.put(lost_key(node), {"by": self.node, "reason": "it went away before training began"})
            if self._board.has(lost_key(node)):
                raise IslandLostError(
                    f"node {node} went away before training began: look at what ended it, and start all nodes again",
                    [node],
                )

    def published(self) -> Published:
        """Like `Neighbours.published`. From then on nodes are not in lockstep, and a restarted node enters at once."""
        if self.coding is not None:
            self.coding.refuse_published()
        self._group.is_in_step = False
        published = MeshPublished(self._endpoint, self.peers, f"{self._board.name}/published")
        for peer, edge in sorted(self._edges.items()):
            try:
                self._joining.link(published, edge)
            except IslandLostError:
                if not self.is_returning:
                    published.close()
                    raise
                self._lose(peer, BROKEN)
        self._published = self._joining.published = published
        return published

    def recall(self, topic: str) -> list[Record]:
        def read(number: int) -> list[Record]:
            others = (node for node in range(self.num_nodes) if node != self.node)
            return list(self._board.read_all({node: f"share/{topic}/{number}/{node}" for node in others}).values())

        number = self._num_shared.get(topic, 0)
        while read(number + 1):
            number += 1
        self._num_shared[topic] = number
        return read(number)

    def offer(self, x: torch.Tensor, step: int) -> None:
        self._note_lost()
        self._reception.begin()
        if self._published is not None:
            self._reception.reject(self._published.lost)
        for peer, one in self._reception.admit(x, step, is_in_step=self._published is None).items():
            self._edges[peer] = one.edge
            self.lost.pop(peer, None)
            what = "has returned" if one.is_new else "is connected again"
            self._news.append(f"node {peer} {what}: it takes part from step {step} on")

    def enter(self, x: torch.Tensor) -> int:
        host = x.cpu()
        kind, timeout = Entry, self._endpoint.timeout
        if self._published is not None:
            kind, timeout = FreeEntry, timeout + self._connect_timeout  # a step of a neighbour may take long
        entry = kind(self._joining, self._edges, self._straggler_timeout, timeout, self._give_up)
        with self._is_swapping:
            step = entry.take(host)
        if host is not x:
            x.copy_(host)
        self.is_returning = False
        return step

    def take_events(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        was_closed, self._is_closed = self._is_closed, True
        self._straggler_timeout.give_up()
        with self._is_swapping:  # not before an exchange in flight has ended
            for edge in self._edges.values():
                edge.close()
            self._edges.clear()
        self._reception.close()
        self._group.close()
        if self._published is not None:
            self._published.close()
        if not was_closed:
            self._members.leave("finished" if self._members.standing.phase == "finished" else "left")

    # Nodes come and go.

    def _give_up(self, peer: int) -> None:
        """Drops a neighbour that did not answer; gives the others more time, as they may have waited for it too."""
        self._lose(peer, self._straggler_timeout.reason)
        self._straggler_timeout.renew()

    def _lose(self, node: int, reason: str) -> None:
        """Marks a node as lost: disconnects, and reports the loss to the log and to all nodes."""
        if node in self._edges:
            self._edges.pop(node).close()
        if self._is_closed:  # this node is the one that leaves
            return
        self.lost[node] = reason
        what = "has ended" if reason == ENDED else f"was lost ({reason})"
        self._news.append(f"node {node} {what}: its weight stays with this node until it returns")
        if self._published is not None:
            self._published.drop(node)
        with suppress(DiLoCoError):  # calls that need the store report its loss
            self._board.put(lost_key(node), {"by": self.node, "reason": reason})
        self._reception.look_for([node])  # after the put: a node that returns removes the key

    def _note_lost(self) -> None:
        """Marks neighbours as lost whose links for published payloads have broken, if there are such links."""
        if self._published is None:
            return
        for peer, reason in self._published.take_lost().items():
            if peer in self._edges:
                self._lose(peer, reason)
        if self.peers and not self._edges and self._reception.is_given_up:
            raise IslandLostError(
                f"all neighbours have given up node {self.node}, which took too long to answer, and go on without it. "
                f"{self._remedy()}",
                self.peers,
            )

    def _find_lost(self) -> list[int]:
        """The neighbours that this node is not connected to."""
        self._note_lost()
        return [peer for peer in self.peers if peer not in self._edges]

    def _note_members(self, before: Collection[int]) -> None:
        members = self._group.members
        absent = set(range(self.num_nodes)) - set(members)
        for node in absent - self.lost.keys():
            if node not in self._edges:
                self.lost[node] = _MISSED_AVERAGE
            elif self._published is None:  # else the node is late, but others can still read its published payload
                self._lose(node, _MISSED_AVERAGE)
        for node in set(members) & self.lost.keys() - set(self.peers):
            del self.lost[node]
        if absent:
            self._news.append(
                f"the average of all nodes is over {name_all(members, 'node')} from now on, without "
                f"{name_all(absent, 'node')}"
            )
        elif before:
            self._news.append("the average of all nodes includes all of them again")

    def _check_peers_left(self) -> None:
        """Raises `IslandLostError` if no neighbour is left."""
        if self._edges or not self.peers:
            return
        reasons = "; ".join(f"node {peer}: {self.lost[peer]}" for peer in self.peers if peer in self.lost)
        raise IslandLostError(
            f"all neighbours of node {self.node} are lost ({reasons or 'it was closed'}). {self._remedy()}",
            self.peers,
        )

    def _remedy(self) -> str:
        """Advice for a node that has no node left to average with."""
        if self.node == KEEPER:
            return (
                f"Node {KEEPER} keeps the rendezvous, without which no node returns: end the others, if they still go "
                "on (each writes a checkpoint), then start all nodes again"
            )
        return (
            f"Start node {self.node} again, alone, by the same command: it returns to the nodes that go on. Start all "
            "nodes again only if none does"
        )
