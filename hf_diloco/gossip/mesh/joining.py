"""How a node finds its neighbours, at the start and when one of the two was lost, and connects to them.

Processes claim their node's number, and give signs of life, as islands do (`membership.heartbeats`): which start of
the node this is, whether it takes steps, and whom it misses. Who looks for others says so again and again. A node that
is gone says nothing new, whatever it said last; so nobody waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.edges import Edge, Endpoint, connect_edges, edge_life
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.mesh.store import Board, asking, company_key, greeting_key, lost_key
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import HeartbeatRecord
from hf_diloco.store.question import looking_once
from hf_diloco.utils.text import numbers, plural
from hf_diloco.utils.waiting import WaitNotes

LOOK_SECONDS = 0.5
"""How often nodes look for those that they miss."""

MIN_GREETING_SECONDS = 2.5
"""How long a node that returns waits at least for those of its neighbours that have not yet seen it."""

MIN_CONNECT_SECONDS = 10.0
"""What connecting may take at least, once all are there: over slow links it takes many round trips."""

MAX_AGAIN_SECONDS = 15.0
"""What connecting to one that goes on may take: a further attempt follows."""


class Announcement(NamedTuple):
    """What a node says of itself: which of its starts this is, from 1, and its sign of life."""

    start: int
    said: HeartbeatRecord


class Discovery:
    """What one node says of itself, and hears of others, with their signs of life.

    Args:
        members: this node and the others.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._heard: dict[int, Announcement] = {}

    def announce(self, misses: Collection[int]) -> None:
        """This node is there, and looks for these, as its further signs of life say too."""
        self.note(misses)
        with asking():
            self._members.heartbeat()

    def note(self, misses: Collection[int]) -> None:
        """As `announce`, with the next sign of life."""
        self._members.standing.misses = sorted(misses)

    def listen(self, starts: Mapping[int, int]) -> dict[int, Announcement]:
        """What those who are there have said since the last call.

        Args:
            starts: of each neighbour the last start that is known. Of that one, only what changes shows that it is
                still there.
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
    """One node's. Claims its number: at a start beyond the first it joins others that go on.

    Args:
        endpoint: this node's; connecting to one that returns may take as long as an exchange.
        board: where nodes meet.
        members: this node and the others; gives signs of life from now on.
        peers: its neighbours.
        connect_timeout: seconds to wait for all neighbours.
        notes: say for whom this node waits.

    Attributes:
        board: where nodes meet.
        node: this node.
        start: which of this node's starts this is, from 1.
        starts: how often each neighbour was started, as far as this node has seen.
        discovery: how this node says that it misses others.
        published: where nodes take what others published; None: they do not.

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
        self.board = board
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
        """This node takes steps now."""
        if self._members.standing.phase == "joining":
            self._members.stand("training")

    def meet(self) -> dict[int, Edge]:
        """Connects to all neighbours, or where others go on to those that are there.

        Raises:
            IslandLostError: neighbours did not connect in time; names them.
        """
        self.starts = self.count_starts(self._peers)
        return self._return() if self.start > 1 else self._meet_all()

    def _meet_all(self) -> dict[int, Edge]:
        wait, begun = self._notes.begin(self._connect_timeout), time.monotonic()
        with asking():
            missing = self._members.await_all(self._peers, self._connect_timeout, wait)
        edges: dict[int, Edge] = {}
        if not missing:
            seconds = max(MIN_CONNECT_SECONDS, self._connect_timeout - (time.monotonic() - begun))
            edges, missing = self._connect_all(self._peers, seconds)
        if missing:
            for edge in edges.values():
                edge.close()  # or those neighbours would wait for this node, which ends
            if (took := time.monotonic() - begun) < self._connect_timeout:
                raise _broken_off(missing, took)
            raise _not_connected(missing, self._endpoint.address, self._connect_timeout)
        return edges

    def _return(self) -> dict[int, Edge]:
        edges, _ = self._connect_all(self.await_greetings(), self._late, self._check_start)
        if not edges and self._peers:
            raise _not_connected(self._peers, self._endpoint.address, self._connect_timeout)
        return edges

    def await_greetings(self) -> list[int]:
        """Waits for the neighbours that see that this node is back, and says to whom it connects next.

        Returns:
            All, but for those that are lost or wait themselves. Who is left out, but goes on, connects again later.
        """
        greeted: set[int] = set()
        waiting: set[int] = set()  # as this one does: they let nobody in
        wait = self._notes.begin(self._connect_timeout, "returning")
        patience_with_others = max(MIN_GREETING_SECONDS, self._endpoint.timeout / 2)
        begun, first_greeted, looked = time.monotonic(), math.inf, -math.inf
        await_news = self.board.news()

        def is_away(peer: int) -> bool:
            """Whether it lets nobody in. That this node itself lost it, before it was started again, says nothing."""
            lost = self.board.read(lost_key(peer), peer)
            return peer in waiting or (lost is not None and lost.get("by") != self.node)

        while True:
            now = time.monotonic()
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
        """Raises `IslandLostError` if a neighbour was started again: it waits to be let in, as this node does."""
        if self.count_starts([peer])[peer] > self.starts[peer]:
            raise IslandLostError(f"node {peer} was started again", [peer])

    def _connect_all(
        self, there: Collection[int], seconds: float, meanwhile: Callable[[int], None] | None = None
    ) -> tuple[dict[int, Edge], list[int]]:
        self.starts |= self.count_starts(there)  # of others as before: who starts meanwhile is new
        lives = {peer: self._life(peer, self.starts[peer]) for peer in there}
        with self._notes.begin(seconds, f"connecting from {self._endpoint.address}").blocking(there):
            return self._connect(lives, seconds, meanwhile)

    def connect_again(self, peer: int, start: int, attempt: int, meanwhile: Callable[[], None]) -> Edge:
        """Connects to a neighbour that was started so many times; links to take what it publishes are made, too.

        Args:
            peer: the neighbour.
            start: which of its starts this is.
            attempt: 0 if it returns; which attempt this is if it goes on, as this node does.
            meanwhile: called now and then while the neighbour is waited for; what it raises ends that.

        Raises:
            IslandLostError: it did not connect in time.
        """
        seconds, life = self._late, self._life(peer, start)
        if attempt:
            seconds, life = min(seconds, MAX_AGAIN_SECONDS), f"{life}.{attempt}"
        edges, missing = self._connect({peer: life}, seconds, lambda _: meanwhile())
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
        """Makes the links over which the two take what the other published; ends if the edge breaks meanwhile.

        Raises:
            IslandLostError: the neighbour did not connect in time.
        """
        published.connect(edge.peer, edge.life, self._connect_timeout, edge.check)

    def _connect(
        self, lives: Mapping[int, str], seconds: float, meanwhile: Callable[[int], None] | None = None
    ) -> tuple[dict[int, Edge], list[int]]:
        return connect_edges(self._endpoint, self.board.name, lives, seconds, meanwhile)

    def count_starts(self, peers: Collection[int]) -> dict[int, int]:
        """How often each of these neighbours was started."""
        with asking():
            return self._members.newest_incarnations(peers)

    def _life(self, peer: int, start: int) -> str:
        return edge_life({self.node: self.start, peer: start})


def _broken_off(missing: Collection[int], seconds: float) -> IslandLostError:
    return IslandLostError(
        f"{plural('node', len(missing))} {numbers(missing)} broke off after {seconds:.1f} s, while connecting to this "
        "node. Look at what ended them, and start all nodes again",
        missing,
    )


def _not_connected(missing: Collection[int], address: str, timeout: float) -> IslandLostError:
    return IslandLostError(
        f"{plural('node', len(missing))} {numbers(missing)} did not connect to this node within {timeout:g} s (this "
        f"one listens on {address}). Check that all nodes were started, that firewalls let their machines reach each "
        "other on all ports, and bind_address",
        missing,
    )
