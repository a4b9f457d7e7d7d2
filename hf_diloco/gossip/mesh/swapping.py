"""One exchange with all neighbours: pieces on their way to and from each at once, used as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.straggler_timeout import StragglerTimeout
from hf_diloco.gossip.neighbours import Piece
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.transfers import Transfers

BYTES_IN_FLIGHT = 64 << 20
"""What a node has on its way from all neighbours together, if pieces are few enough."""

MIN_PIECES_IN_FLIGHT, MAX_PIECES_IN_FLIGHT = 2, 8


class Buffers:
    """The host's memory, used again at every exchange: fresh memory costs eight times what used memory does."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bool], torch.Tensor] = {}

    def take(self, peer: int, slot: int, num_bytes: int, is_pinned: bool) -> torch.Tensor:
        """So many bytes."""
        key = (peer, slot, is_pinned)
        known = self._known.get(key)
        if known is None or known.numel() < num_bytes:
            known = self._known[key] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return known[:num_bytes]

    def forget(self, peer: int) -> None:
        """After a transfer that failed: nobody may write to what was to be received."""
        self._known = {key: buffer for key, buffer in self._known.items() if key[0] != peer}


@dataclass
class _Flight:
    """What is in flight for one piece."""

    piece: Piece
    slot: int
    transfers: dict[int, Transfers] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)


class Swapping:
    """Exchanges of pieces over the edges of one node.

    A neighbour whose transfer fails is left out from that piece on, and its edge closed.

    Args:
        edges: the node's, by neighbour; whoever is lost is taken out.
        straggler_timeout: how long this node waits for those that do not come.
        lose: is told whom the node has lost, and why, in words.
        buffers: for what comes.
    """

    def __init__(
        self,
        edges: dict[int, Edge],
        straggler_timeout: StragglerTimeout,
        lose: Callable[[int, str], None],
        buffers: Buffers,
    ) -> None:
        self._edges = edges
        self._straggler_timeout = straggler_timeout
        self._lose = lose
        self._buffers = buffers
        self._pipeline: deque[_Flight] = deque()

    def run(self, pieces: Sequence[Piece]) -> Traffic:
        """Sends each piece, and has it use what comes."""
        self._straggler_timeout.begin()
        self._pipeline.clear()
        traffic = Traffic()
        num_slots = _num_in_flight(pieces)
        for number, piece in enumerate(pieces):
            if len(self._pipeline) == num_slots:
                traffic += self._finish()
            flight = _Flight(piece, number % num_slots)
            self._pipeline.append(flight)
            self._begin(flight)
        while self._pipeline:
            traffic += self._finish()
        return traffic

    def _begin(self, flight: _Flight) -> None:
        """Starts the transfers; receives first, as a rate limit takes its time with what is sent."""
        piece = flight.piece
        for peer in sorted({*piece.bytes_from, *piece.bytes_to} & self._edges.keys()):
            flight.transfers[peer] = self._edges[peer].begin()
        for peer, num_bytes in piece.bytes_from.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    taken = self._buffers.take(peer, flight.slot, num_bytes, piece.is_pinned)
                    flight.received[peer] = taken
                    self._edges[peer].receive(taken, flight.transfers[peer])
        for peer, given in piece.give(flight.slot).items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    self._edges[peer].send(given, flight.transfers[peer])

    def _finish(self) -> Traffic:
        """Waits for the first piece's transfers, and has it use what has come."""
        flight, traffic = self._pipeline[0], Traffic()
        for peer, transfers in flight.transfers.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    edge, look = self._edges[peer], self._straggler_timeout.watch(peer)
                    traffic += edge.wait(transfers, self._straggler_timeout.limit, look)
            traffic += transfers.take_traffic()  # of those who are lost
        self._pipeline.popleft()
        flight.piece.finish({peer: taken for peer, taken in flight.received.items() if peer in self._edges})
        return traffic

    @contextmanager
    def _unless_lost(self, peer: int) -> Iterator[None]:
        """Takes a neighbour out if its transfer fails inside, and goes on without."""
        try:
            yield
        except IslandLostError:
            reason = self._straggler_timeout.reason
            self._edges.pop(peer).close()
            for flight in self._pipeline:
                if peer in flight.transfers:
                    flight.transfers[peer].drop()  # or they would keep the sockets open
            self._buffers.forget(peer)
            self._straggler_timeout.renew()
            self._lose(peer, reason)


def _num_in_flight(pieces: Sequence[Piece]) -> int:
    largest = max((sum(piece.bytes_from.values()) for piece in pieces), default=0)
    return max(MIN_PIECES_IN_FLIGHT, min(MAX_PIECES_IN_FLIGHT, BYTES_IN_FLIGHT // max(1, largest)))
