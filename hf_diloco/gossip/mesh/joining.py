"""How a node finds its neighbours, at the start and when one of the two was lost, and connects to them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch.distributed import Store

from hf_diloco.exchange.rate import RateLimit
from hf_diloco.gossip.mesh.edges import Edge, connect_edges, edge_life, not_connected
from hf_diloco.gossip.mesh.entry import await_greetings
from hf_diloco.gossip.mesh.published import MeshPublished
from hf_diloco.gossip.mesh.store import Board

MIN_CONNECT_SECONDS = 5.0
"""What connecting may take at least, once all are there."""


class Joining:
    """One node's. Counts its starts: beyond the first it joins others that go on.

    Args:
        store: where nodes find each other.
        board: where they meet.
        node: this node.
        peers: its neighbours.
        address: local address to listen on.
        connect_timeout: seconds to wait for all neighbours.
        exchange_timeout: seconds that connecting to one that returns may take.
        rate_limit: for all that is sent.

    Attributes:
        start: which of this node's starts this is, from 1.
        starts: how often each neighbour was started when it was met.
    """

    def __init__(
        self,
        store: Store,
        board: Board,
        node: int,
        peers: list[int],
        address: str,
        connect_timeout: float,
        exchange_timeout: float,
        rate_limit: RateLimit,
    ) -> None:
        self._store = store
        self._board = board
        self._node = node
        self._peers = peers
        self._address = address
        self._connect_timeout = connect_timeout
        self._late = max(MIN_CONNECT_SECONDS, exchange_timeout)
        self._rate_limit = rate_limit
        self.start = board.count(_starts_key(node), 1)
        self.starts: dict[int, int] = {}

    def meet(self) -> dict[int, Edge]:
        """Connects to all neighbours, or where others go on to those that are there.

        Raises:
            IslandLostError: neighbours did not connect in time; names them.
        """
        begun = time.monotonic()
        if self.start > 1:
            there = await_greetings(self._board, self._node, self.start, self._peers, self._connect_timeout)
            missing = [] if there else self._peers
        else:
            there = self._peers
            keys = {peer: _starts_key(peer) for peer in there}
            missing = sorted(self._board.await_all(keys, self._connect_timeout))
        edges: dict[int, Edge] = {}
        self.starts = {peer: self._board.count(_starts_key(peer)) for peer in self._peers}
        if not missing:
            seconds = max(MIN_CONNECT_SECONDS, self._connect_timeout - (time.monotonic() - begun))
            edges, missing = self._connect({peer: self.starts[peer] for peer in there}, seconds)
        if missing:
            raise not_connected(missing, self._address, self._connect_timeout)
        return edges

    def connect_again(self, peer: int, start: int, published: MeshPublished | None) -> Edge:
        """Connects to a neighbour that returns, having been started so many times.

        Raises:
            IslandLostError: it did not connect in time.
        """
        edges, missing = self._connect({peer: start}, self._late)
        if missing:
            raise not_connected(missing, self._address, self._late)
        self.starts[peer] = start
        if published is not None:
            try:
                self.link(published, peer, edges[peer])
            except BaseException:
                edges[peer].close()
                raise
        return edges[peer]

    def link(self, published: MeshPublished, peer: int, edge: Edge) -> None:
        """Makes the links over which the two take what the other published; ends if the edge breaks meanwhile.

        Raises:
            IslandLostError: the neighbour did not connect in time.
        """
        published.connect(peer, self._life(peer, self.starts[peer]), self._connect_timeout, edge.check)

    def _connect(self, starts: Mapping[int, int], seconds: float) -> tuple[dict[int, Edge], list[int]]:
        lives = {peer: self._life(peer, start) for peer, start in starts.items()}
        return connect_edges(
            lives, self._store, self._board.name, self._node, self._address, seconds, self._rate_limit
        )

    def _life(self, peer: int, start: int) -> str:
        return edge_life({self._node: self.start, peer: start})


def _starts_key(node: int) -> str:
    return f"starts/{node}"
