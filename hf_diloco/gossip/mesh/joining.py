"""How a node finds its neighbours, at the start and when one of the two was lost, and connects to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from hf_diloco.gossip.mesh.discovery import Discovery
from hf_diloco.gossip.mesh.edges import Edge, Endpoint, broken_off, connect_edges, edge_life, not_connected
from hf_diloco.gossip.mesh.entry import Greetings
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.mesh.rejoin import starts_key
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.utils.waiting import WaitNotes

MIN_GREETING_SECONDS = 2.5
"""How long a node that returns waits at least for those of its neighbours that have not yet seen it."""

MIN_CONNECT_SECONDS = 10.0
"""What connecting may take at least, once all are there: over slow links it takes many round trips."""

MAX_AGAIN_SECONDS = 15.0
"""What connecting to one that goes on may take: a further attempt follows."""


class Joining:
    """One node's. Counts its starts: beyond the first it joins others that go on.

    Args:
        endpoint: this node's; connecting to one that returns may take as long as an exchange.
        board: where nodes meet.
        peers: its neighbours.
        connect_timeout: seconds to wait for all neighbours.
        notes: say for whom this node waits.

    Attributes:
        start: which of this node's starts this is, from 1.
        starts: how often each neighbour was started when they met.
        discovery: how this node says that it misses others.
    """

    def __init__(
        self, endpoint: Endpoint, board: Board, peers: list[int], connect_timeout: float, notes: WaitNotes
    ) -> None:
        self._notes = notes
        self._endpoint = endpoint
        self._board = board
        self._node = endpoint.node
        self._peers = peers
        self._connect_timeout = connect_timeout
        self._late = max(MIN_CONNECT_SECONDS, endpoint.timeout)
        self.start = board.count(starts_key(self._node), 1)
        self.starts: dict[int, int] = {}
        self.discovery = Discovery(board, self._node, self.start)

    def meet(self) -> dict[int, Edge]:
        """Connects to all neighbours, or where others go on to those that are there.

        Raises:
            IslandLostError: neighbours did not connect in time; names them.
        """
        self.starts = self._count_starts(self._peers)
        return self._return() if self.start > 1 else self._meet_all()

    def _meet_all(self) -> dict[int, Edge]:
        wait, begun = self._notes.begin(self._connect_timeout), time.monotonic()
        keys = {peer: starts_key(peer) for peer in self._peers}
        missing: Collection[int] = sorted(self._board.await_all(keys, self._connect_timeout, wait))
        edges: dict[int, Edge] = {}
        if not missing:
            seconds = max(MIN_CONNECT_SECONDS, self._connect_timeout - (time.monotonic() - begun))
            edges, missing = self._connect_all(self._peers, seconds)
        if missing:
            for edge in edges.values():
                edge.close()  # or those neighbours would wait for this node, which ends
            if (took := time.monotonic() - begun) < self._connect_timeout:
                raise broken_off(missing, took)
            raise not_connected(missing, self._endpoint.address, self._connect_timeout)
        return edges

    def _return(self) -> dict[int, Edge]:
        greetings = Greetings(self.discovery, self.starts)
        wait = self._notes.begin(self._connect_timeout, "returning")
        patience_with_others = max(MIN_GREETING_SECONDS, self._endpoint.timeout / 2)
        there = greetings.wait(self._connect_timeout, patience_with_others, wait)
        edges, _ = self._connect_all(there, self._late)
        if not edges and self._peers:
            raise not_connected(self._peers, self._endpoint.address, self._connect_timeout)
        return edges

    def _connect_all(self, there: Collection[int], seconds: float) -> tuple[dict[int, Edge], list[int]]:
        self.starts |= self._count_starts(there)  # of others as before: who starts meanwhile is new
        lives = {peer: self._life(peer, self.starts[peer]) for peer in there}
        with self._notes.begin(seconds, f"connecting from {self._endpoint.address}").blocking(there):
            return self._connect(lives, seconds)

    def connect_again(
        self, peer: int, start: int, attempt: int, published: MeshPublished | None, meanwhile: Callable[[], None]
    ) -> Edge:
        """Connects to a neighbour that was started so many times.

        Args:
            peer: the neighbour.
            start: which of its starts this is.
            attempt: 0 if it returns; which attempt this is if it goes on, as this node does.
            published: where nodes take what others published; links are then made, too.
            meanwhile: called now and then while the neighbour is waited for; what it raises ends that.

        Raises:
            IslandLostError: it did not connect in time.
        """
        seconds, life = self._late, self._life(peer, start)
        if attempt:
            seconds, life = min(seconds, MAX_AGAIN_SECONDS), f"{life}.{attempt}"
        edges, missing = self._connect({peer: life}, seconds, meanwhile)
        if missing:
            raise not_connected(missing, self._endpoint.address, seconds)
        if published is not None:
            try:
                self.link(published, edges[peer])
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
        self, lives: Mapping[int, str], seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> tuple[dict[int, Edge], list[int]]:
        return connect_edges(self._endpoint, self._board.name, lives, seconds, meanwhile)

    def _count_starts(self, peers: Collection[int]) -> dict[int, int]:
        return {peer: self._board.count(starts_key(peer)) for peer in peers}

    def _life(self, peer: int, start: int) -> str:
        return edge_life({self._node: self.start, peer: start})
