"""How a node finds its neighbours and connects to them, at the start and after one of the two was lost.

Processes claim their node's number, and send heartbeats, as islands do (`membership.heartbeats`). A heartbeat tells
which start of the node this is, whether it takes steps, and which nodes it misses. A node that looks for others sends
heartbeats repeatedly. A node that is gone sends nothing new, whatever it sent last; so nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.edges import Edge, Endpoint, connect_edges, edge_life
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.mesh.store import Board, asking, company_key, greeting_key, lost_key
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import HeartbeatRecord
from hf_diloco.store.long_poll import looking_once
from hf_diloco.store.tcp_store import who_did_not_fit
from hf_diloco.utils.text import name_all
from hf_diloco.utils.waiting import WaitNotes

LOOK_SECONDS = 0.5
"""How often a node looks for the nodes that it misses."""

MIN_GREETING_SECONDS = 2.5
"""How long a restarted node waits at least for neighbours that have not yet seen it."""

MIN_CONNECT_SECONDS = 10.0
"""Minimum timeout for connecting, once all nodes are present: over slow links it takes many round trips."""

MAX_AGAIN_SECONDS = 15.0
"""Maximum timeout for reconnecting to a node that goes on: a further attempt follows."""


class Announcement(NamedTuple):
    """A node's start number, from 1, and its latest heartbeat."""

    start: int
    said: HeartbeatRecord


class Discovery:
    """Announces one node to the others, and listens to them, through heartbeats."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._heard: dict[int, Announcement] = {}

    def announce(self, misses: Collection[int]) -> None:
        """Sends a heartbeat that names the nodes that this node misses; further heartbeats name them too."""
        self.note(misses)
        with asking():
            self._members.heartbeat()

    def note(self, misses: Collection[int]) -> None:
        """Like `announce`, but only with the next regular heartbeat."""
        self._members.standing.misses = sorted(misses)

    def listen(self, starts: Mapping[int, int]) -> dict[int, Announcement]:
        """Returns the new announcements of running nodes since the last call.

        Args:
            starts: the last known start of each neighbour. For that start, only a changed heartbeat shows that the
                node still runs.
        """
        heard: dict[int, Announcement] = {}
        with asking(), looking_once(self._members.log.store, ["heartbeats"]):
            heartbeats = self._members.look()
        for peer in starts.keys() & heartbeats.keys():
            now = Announcement(self._members.incarnation_of(peer), heartbeats[peer])
            before, self._heard[peer] = self._heard.get(peer), now
            is_new = now.start > starts[peer] or (before is not None and now.start == starts[peer])
            if before != now and is_new and now.said.phase not in ("left", "finished"):
                heard[peer] = now
        return heard


class Joining:
    """Connects a node to its neighbours. Claims its number; if this is not its first start, rejoins running nodes.

    Args:
        endpoint: this node's; connecting to a restarted node may take as long as an exchange.
        members: this node and the others; sends heartbeats from now on.
        peers: its neighbours.
        connect_timeout: seconds to wait for all neighbours.

    Attributes:
        start: which of this node's starts this is, from 1.
        starts: how often each neighbour was started, as far as this node has seen.
        published: this node's end of published payloads; None if nodes do not publish.

    Raises:
        DuplicateIslandError: another process runs as this node.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        board: Board,
        members: Members,
        peers: list[int],
        connect_timeout: float,
        notes: WaitNotes,
    ) -> None:
        self.board, self._clock = board, board.clock
        self.node = endpoint.node
        self._members = members
        self._notes = notes
        self._endpoint = endpoint
        self._peers = peers
        self._connect_timeout = connect_timeout
        self._late = max(MIN_CONNECT_SECONDS, endpoint.timeout)
        self.starts: dict[int, int] = {}
        self.discovery = Discovery(members)
        with asking():
            self.start = members.enter()
            members.start_heartbeats()
        self.published: MeshPublished | None = None

    def begin(self) -> None:
        """Reports in heartbeats that this node takes steps now."""
        if self._members.standing.phase == "joining":
            self._members.set_phase("training")

    def meet(self) -> dict[int, Edge]:
        """Connects to all neighbours; on a restarted node, to those that are running.

        Raises:
            IslandLostError: neighbours did not connect within the timeout; names them.
        """
        self.starts = self.count_starts(self._peers)
        return self._return() if self.start > 1 else self._meet_all()

    def _meet_all(self) -> dict[int, Edge]:
        why = partial(who_did_not_fit, self._members.log.store)
        wait, begun = self._notes.begin(self._connect_timeout, why=why), self._clock.now()
        with asking():
            missing = self._members.await_all(self._peers, self._connect_timeout, wait)
        edges: dict[int, Edge] = {}
        if not missing:
            seconds = max(MIN_CONNECT_SECONDS, self._connect_timeout - (self._clock.now() - begun))
            edges, missing = self._connect_all(self._peers, seconds)
        if missing:
            for edge in edges.values():
                edge.close()  # or those neighbours would wait for this node, which is about to end
            if (took := self._clock.now() - begun) < self._connect_timeout:
                raise IslandLostError(
                    f"{name_all(missing, 'node')} broke off after {took:.1f} s, while connecting to this node. Look "
                    "at what ended them, and start all nodes again",
                    missing,
                )
            raise _not_connected(missing, self._endpoint.address, self._connect_timeout)
        return edges

    def _return(self) -> dict[int, Edge]:
        edges, _ = self._connect_all(self.await_greetings(), self._late, self._check_start)
        if not edges and self._peers:
            raise _not_connected(self._peers, self._endpoint.address, self._connect_timeout)
        return edges

    def await_greetings(self) -> list[int]:
        """Waits until neighbours greet this restarted node, and publishes the list of those that it will connect to.

        Returns:
            All neighbours, except lost ones and those that wait themselves. A neighbour that is left out, but goes on,
            reconnects later.
        """
        greeted: set[int] = set()
        waiting: set[int] = set()  # restarted neighbours that wait, as this node does, and let nobody in
        wait = self._notes.begin(self._connect_timeout, "returning")
        patience_with_others = max(MIN_GREETING_SECONDS, self._endpoint.timeout / 2)
        begun, first_greeted, looked = self._clock.now(), math.inf, -math.inf
        await_news = self.board.news()

        def is_away(peer: int) -> bool:
            """Whether `peer` lets nobody in: it waits itself, or a node other than this one has reported its loss."""
            lost = self.board.read(lost_key(peer), peer)
            return peer in waiting or (lost is not None and lost.get("by") != self.node)

        while True:
            now = self._clock.now()
            if now - looked > LOOK_SECONDS:
                looked = now
                self.discovery.announce(self.starts)
                for peer, announcement in self.discovery.listen(self.starts).items():
                    (waiting.add if announcement.said.phase == "joining" else waiting.discard)(peer)
            greeted.update(
                self.board.who_has({peer: greeting_key(self.node, self.start, peer) for peer in self.starts})
            )
            absent = [peer for peer in self.starts if peer not in greeted]
            if greeted:
                first_greeted = min(first_greeted, now)
            is_over = now - begun > self._connect_timeout or now - first_greeted > patience_with_others
            if not absent or is_over or (now - begun > 4 * LOOK_SECONDS and greeted and all(map(is_away, absent))):
                break
            wait.look(absent)
            await_news()
        self.discovery.announce([])
        self.board.put(company_key(self.node, self.start), {"nodes": sorted(greeted)})
        return sorted(greeted)

    def _check_start(self, peer: int) -> None:
        """Raises `IslandLostError` if a neighbour was restarted: it waits to be let in, as this node does."""
        if self.count_starts([peer])[peer] > self.starts[peer]:
            raise IslandLostError(f"node {peer} was started again", [peer])

    def _connect_all(
        self, there: Collection[int], seconds: float, meanwhile: Callable[[int], None] | None = None
    ) -> tuple[dict[int, Edge], list[int]]:
        self.starts |= self.count_starts(there)  # not of the others, so that their restarts are noticed as new
        lives = {peer: self._life(peer, self.starts[peer]) for peer in there}
        with self._notes.begin(seconds, f"connecting from {self._endpoint.address}").blocking(there):
            return connect_edges(self._endpoint, self.board.name, lives, seconds, meanwhile)

    def connect_again(self, peer: int, start: int, attempt: int, meanwhile: Callable[[], None]) -> Edge:
        """Reconnects to a neighbour; also opens the links for published payloads, if nodes publish.

        Args:
            start: the number of the neighbour's current start.
            attempt: 0 if the neighbour was restarted; the number of this attempt if it goes on, as this node does.
            meanwhile: see `Endpoint.lane`.

        Raises:
            IslandLostError: the neighbour did not connect within the timeout.
        """
        seconds, life = self._late, self._life(peer, start)
        if attempt:
            seconds, life = min(seconds, MAX_AGAIN_SECONDS), f"{life}.{attempt}"
        edges, missing = connect_edges(self._endpoint, self.board.name, {peer: life}, seconds, lambda _: meanwhile())
        if missing:
            raise _not_connected(missing, self._endpoint.address, seconds)
        if self.published is not None:
            try:
                self.link(self.published, edges[peer])
            except BaseException:
                edges[peer].close()
                raise
        return edges[peer]

    def link(self, published: MeshPublished, edge: Edge) -> None:
        """Opens the links over which the two nodes read each other's published payloads.

        Raises:
            IslandLostError: the neighbour did not connect within the timeout, or the edge broke meanwhile.
        """
        published.connect(edge.peer, edge.life, self._connect_timeout, edge.check)

    def count_starts(self, peers: Collection[int]) -> dict[int, int]:
        """Returns how often each of these neighbours was started."""
        with asking():
            return self._members.newest_incarnations(peers)

    def _life(self, peer: int, start: int) -> str:
        return edge_life({self.node: self.start, peer: start})


def _not_connected(missing: Collection[int], address: str, timeout: float) -> IslandLostError:
    return IslandLostError(
        f"{name_all(missing, 'node')} did not connect to this node within {timeout:g} s (this one listens on "
        f"{address}). Check that all nodes were started, that firewalls let their machines reach each other on all "
        "ports, and bind_address",
        missing,
    )
