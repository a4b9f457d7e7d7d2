"""One exchange with all neighbours: pieces to and from all of them are in flight at once, and used as they arrive.

When a node stops, its neighbours wait for it until their timeout; but their own neighbours have been waiting for them
as long, and would drop them at the same moment. So a node that waits writes this to the store every half second, and
nodes that wait for it extend its timeout by the same time again: `StragglerTimeout`.

    waits/NODE             the node that NODE waits for, and an increasing number

A process may itself be paused: stopped, swapped out, or blocked by a slow name service. After such a pause it must not
drop its neighbours at once, so the pause does not count towards their timeout.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hf_diloco.errors import DiLoCoError, IslandLostError
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.store import BROKEN, KEEPER, Board
from hf_diloco.gossip.neighbours import Piece
from hf_diloco.gossip.records import Record
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.transfers import Deadline, Transfers
from hf_diloco.utils.waiting import WaitNotes

BYTES_IN_FLIGHT = 64 << 20
"""Bytes that a node has in flight from all neighbours together, within the limits on the number of pieces below."""

MIN_PIECES_IN_FLIGHT, MAX_PIECES_IN_FLIGHT = 2, 8

PAUSE_SECONDS = 1.0
"""A longer time between two checks means that this process was paused; checks follow each other twice as fast."""

SILENCE_SECONDS = 300.0
"""How long a store that did not answer is left alone; finding that out may take a tenth of this time."""


class StragglerTimeout:
    """The timeout for late neighbours, of one exchange or other wait at a time.

    Args:
        board: the records in which nodes report that they wait.
        seconds: timeout of an exchange; as an attribute, of the current wait.
        notes: log for which nodes this node waits, and supply the clock.
    """

    def __init__(self, board: Board, node: int, num_nodes: int, seconds: float, notes: WaitNotes) -> None:
        self._notes = notes
        self._clock = notes.clock
        self._step_seconds = seconds
        self._board = board
        self._node = node
        self._num_nodes = num_nodes
        self._tick = 0
        self._asks_from = -math.inf
        self._has_given_up = False
        self._is_extended = False
        self.begin()

    def begin(self) -> None:
        """Starts the timeout of an exchange."""
        self.begin_other("a step", self._step_seconds)
        if self._is_extended:
            self.renew(2)
        self._is_extended = False

    def begin_other(self, what: str, seconds: float | None = None) -> None:
        """Starts the timeout of another wait for neighbours, for a reason in words; default: as for an exchange."""
        self.seconds = self._step_seconds if seconds is None else seconds
        self._num_excuses = 0
        self._seen: dict[int, Record | None] = {}
        self._limit = Deadline((self._num_nodes + 2) * self.seconds)  # for Gloo: never expires before ours
        self._wait = self._notes.begin(self.seconds, what)
        self.renew()

    def extend(self) -> None:
        """Doubles the next exchange's timeout: after an average, neighbours may still wait in it for a lost node."""
        self._is_extended = True

    def give_up(self) -> None:
        """Stops all waiting. May be called from another thread; an exchange in flight then ends soon."""
        self._has_given_up = True

    @property
    def limit(self) -> Deadline:
        """The deadline of a transfer."""
        return Deadline(0) if self._has_given_up else self._limit

    def renew(self, factor: float = 1) -> None:
        """Restarts the timeout, times `factor`: others waited for a dropped neighbour too, or one made progress."""
        self._looked_at = self._clock.now()
        self._ends_at = self._looked_at + factor * self.seconds

    @property
    def reason(self) -> str:
        """Why the neighbour that this node waited for was lost, in words."""
        return f"it did not come within {self.seconds:g} s" if self._is_over else BROKEN

    def wait_for(self, edge: Edge, transfers: Transfers) -> Traffic:
        """Like `Edge.wait`, with this timeout."""
        return edge.wait(transfers, self.limit, self.watch(edge.peer))

    def watch(self, peer: int) -> Callable[[], None]:
        """Returns a function to poll while waiting for `peer`; it raises `IslandLostError` after the timeout."""

        def look() -> None:
            if self._has_given_up:
                raise IslandLostError(f"no longer waiting for node {peer}", [peer])
            self.exclude_own_pause()
            self._wait.look([peer])
            self._say(peer)
            if peer not in self._seen:
                self._seen[peer] = self._read(peer)
            elif self._is_over and not self._is_excused(peer):
                raise IslandLostError(f"node {peer} did not come within {self.seconds:g} s", [peer])

        return look

    @property
    def _is_silent(self) -> bool:
        return self._clock.now() < self._asks_from

    @property
    def _is_over(self) -> bool:
        return self._clock.now() >= self._ends_at

    def exclude_own_pause(self) -> None:
        """Extends the timeout by a pause of this process. Call it at least twice in `PAUSE_SECONDS`, and between two
        requests to the store: each takes a round trip, which is not a pause."""
        now = self._clock.now()
        if (pause := now - self._looked_at) > PAUSE_SECONDS:
            self._ends_at += pause
        self._looked_at = now

    def _is_excused(self, peer: int) -> bool:
        """Whether `peer` has reported since that it waits for another node; if so, restarts the timeout."""
        before, self._seen[peer] = self._seen[peer], self._read(peer)
        now = self._seen[peer]
        if self._is_silent:  # node 0, which hosts the store, is the late one
            is_excused = peer != KEEPER and not self._num_excuses
        else:
            is_excused = now is not None and now != before and now.get("for") != self._node
        if is_excused and self._num_excuses < self._num_nodes:
            self._num_excuses += 1
            self.renew()
            return True
        return False

    def _say(self, peer: int) -> None:
        self._tick += 1
        if not self._is_silent:
            self._try(lambda: self._board.put(f"waits/{self._node}", {"for": peer, "tick": self._tick}))

    def _read(self, peer: int) -> Record | None:
        return None if self._is_silent else self._try(lambda: self._board.read(f"waits/{peer}", peer))

    def _try(self, call: Callable[[], Record | None]) -> Record | None:
        """Calls the store. If it is gone, with node 0, returns None: that does not end the wait."""
        try:
            return call()
        except DiLoCoError:
            self._asks_from = self._clock.now() + SILENCE_SECONDS
            return None
        finally:
            self.exclude_own_pause()


@dataclass
class _Flight:
    """The transfers in flight for one piece."""

    piece: Piece
    slot: int
    transfers: dict[int, Transfers] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)


class Swapping:
    """Exchanges of pieces over the edges of one node.

    A neighbour whose transfer fails is left out from that piece on, and its edge is closed and removed from `edges`.
    `lose` is called with it.
    """

    def __init__(
        self, edges: dict[int, Edge], straggler_timeout: StragglerTimeout, lose: Callable[[int], None]
    ) -> None:
        self._edges = edges
        self._straggler_timeout = straggler_timeout
        self._lose = lose
        # By neighbour and slot, reused in every exchange: new memory costs eight times as much as reused memory.
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._pipeline: deque[_Flight] = deque()

    def run(self, pieces: Sequence[Piece]) -> Traffic:
        """Sends each piece, and lets it use the received data.

        If anything other than a lost neighbour interrupts the exchange, such as a second Ctrl-C, closes all edges: the
        next exchange would mistake the data in flight for its own.
        """
        try:
            return self._run(pieces)
        except BaseException:
            for peer in list(self._edges):
                self._let_go(peer)
            raise

    def _run(self, pieces: Sequence[Piece]) -> Traffic:
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
        """Starts the transfers; receives first, as a rate limit may delay the sends."""
        piece = flight.piece
        for peer in sorted({*piece.bytes_from, *piece.bytes_to} & self._edges.keys()):
            flight.transfers[peer] = self._edges[peer].begin()
        for peer, num_bytes in piece.bytes_from.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    taken = flight.received[peer] = self._room(peer, flight.slot, num_bytes)
                    self._edges[peer].receive(taken, flight.transfers[peer])
        for peer, given in piece.give(flight.slot).items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    self._edges[peer].send(given, flight.transfers[peer])

    def _finish(self) -> Traffic:
        """Waits for the transfers of the oldest piece, and lets it use the received data."""
        flight, traffic = self._pipeline[0], Traffic()
        for peer, transfers in flight.transfers.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    traffic += self._straggler_timeout.wait_for(self._edges[peer], transfers)
            traffic += transfers.take_traffic()  # of neighbours that were lost
        self._pipeline.popleft()
        flight.piece.finish({peer: taken for peer, taken in flight.received.items() if peer in self._edges})
        return traffic

    @contextmanager
    def _unless_lost(self, peer: int) -> Iterator[None]:
        """Removes a neighbour if its transfer fails inside, and continues without it."""
        try:
            yield
        except IslandLostError:
            self._let_go(peer)

    def _let_go(self, peer: int) -> None:
        self._edges.pop(peer).close()
        for flight in self._pipeline:
            if peer in flight.transfers:
                flight.transfers[peer].drop()  # or they would keep the sockets open
        # A broken receive may still write to these buffers, so they are not reused.
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != peer}
        self._lose(peer)

    def _room(self, peer: int, slot: int, num_bytes: int) -> torch.Tensor:
        known = self._buffers.get((peer, slot))
        if known is None or known.numel() < num_bytes:
            known = self._buffers[peer, slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return known[:num_bytes]


def _num_in_flight(pieces: Sequence[Piece]) -> int:
    largest = max((sum(piece.bytes_from.values()) for piece in pieces), default=0)
    return max(MIN_PIECES_IN_FLIGHT, min(MAX_PIECES_IN_FLIGHT, BYTES_IN_FLIGHT // max(1, largest)))
