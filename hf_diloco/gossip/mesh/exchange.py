"""One exchange with all neighbours: pieces on their way to and from each at once, used as they arrive.

When a node stops, its neighbours wait for it until their time is over; but their own neighbours have been waiting for
them as long, and would give them up at the same moment. So whoever waits says so in the store every half second, and
is given as much time again by those who wait for it: `StragglerTimeout`.

    waits/NODE             for whom a node waits, and a number that grows

A process may stand still itself: it is stopped, swapped out, or asks a slow name service. Who comes back from that
must not give up its neighbours at once, so such a pause is no part of the time that they have.
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
from hf_diloco.gossip.mesh.store import KEEPER, Board
from hf_diloco.gossip.neighbours import Piece
from hf_diloco.gossip.records import Record
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.connections import Transfers
from hf_diloco.transport.waiting import Deadline
from hf_diloco.utils.waiting import WaitNotes

BYTES_IN_FLIGHT = 64 << 20
"""What a node has on its way from all neighbours together, if pieces are few enough."""

MIN_PIECES_IN_FLIGHT, MAX_PIECES_IN_FLIGHT = 2, 8

PAUSE_SECONDS = 1.0
"""Between two looks, which follow each other twice as fast: a longer pause says that this process stood still."""

SILENCE_SECONDS = 300.0
"""A store that did not answer is asked no more for so long: to find that out may take a tenth of it."""


class StragglerTimeout:
    """How long a node waits for a neighbour that does not come, for one exchange, or one other wait, at a time.

    Args:
        board: where nodes say that they wait.
        node: this node.
        num_nodes: n.
        seconds: that an exchange may take.
        notes: say for whom this node waits, and have the clock by which it does.

    Attributes:
        seconds: that the wait which began last may take.
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
        """An exchange begins."""
        self.begin_other("a step", self._step_seconds)
        if self._is_extended:
            self.renew(2)
        self._is_extended = False

    def begin_other(self, what: str, seconds: float | None = None) -> None:
        """Another wait for neighbours begins.

        Args:
            what: it is for, in words.
            seconds: that it may take. Default: as an exchange.
        """
        self.seconds = self._step_seconds if seconds is None else seconds
        self._num_excuses = 0
        self._seen: dict[int, Record | None] = {}
        self._limit = Deadline((self._num_nodes + 2) * self.seconds)  # Gloo's own: never before ours
        self._wait = self._notes.begin(self.seconds, what)
        self.renew()

    def extend(self) -> None:
        """After an average of all: in the next exchange, neighbours may still wait there for one that is lost."""
        self._is_extended = True

    def give_up(self) -> None:
        """Stops waiting for anybody. May be called from another thread; an exchange under way then ends soon."""
        self._has_given_up = True

    @property
    def limit(self) -> Deadline:
        """How long a transfer may take."""
        return Deadline(0) if self._has_given_up else self._limit

    def renew(self, factor: float = 1) -> None:
        """After a neighbour was given up, as those who waited for it too are late for that reason; or was heard of.

        Args:
            factor: by which the time that is given is longer.
        """
        self._looked_at = self._clock.now()
        self._ends_at = self._looked_at + factor * self.seconds

    @property
    def reason(self) -> str:
        """Why a neighbour was lost that was waited for, in words."""
        return f"it did not come within {self.seconds:g} s" if self._is_over else "its connection broke"

    def wait_for(self, edge: Edge, transfers: Transfers) -> Traffic:
        """As `Edge.wait`, until it is too late."""
        return edge.wait(transfers, self.limit, self.watch(edge.peer))

    def watch(self, peer: int) -> Callable[[], None]:
        """What to call now and then while this node waits for `peer`; raises `IslandLostError` once it is too late."""

        def look() -> None:
            if self._has_given_up:
                raise IslandLostError(f"node {peer} is waited for no more", [peer])
            self.leave_out_own_pause()
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

    def leave_out_own_pause(self) -> None:
        """To be called twice as often as `PAUSE_SECONDS`, and between two questions to the store: each takes a round
        trip, which is no pause."""
        now = self._clock.now()
        if (pause := now - self._looked_at) > PAUSE_SECONDS:
            self._ends_at += pause
        self._looked_at = now

    def _is_excused(self, peer: int) -> bool:
        """Whether `peer` said meanwhile that it waits for another one; then it is given as much time again."""
        before, self._seen[peer] = self._seen[peer], self._read(peer)
        now = self._seen[peer]
        if self._is_silent:  # node 0 is the one that is late, and with it the store
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
        """A store that is gone, with node 0, ends nothing here."""
        try:
            return call()
        except DiLoCoError:
            self._asks_from = self._clock.now() + SILENCE_SECONDS
            return None
        finally:
            self.leave_out_own_pause()


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
        lose: is told whom the node has just lost.
    """

    def __init__(
        self, edges: dict[int, Edge], straggler_timeout: StragglerTimeout, lose: Callable[[int], None]
    ) -> None:
        self._edges = edges
        self._straggler_timeout = straggler_timeout
        self._lose = lose
        # By neighbour and slot, used again at every exchange: fresh memory costs eight times what used memory does.
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._pipeline: deque[_Flight] = deque()

    def run(self, pieces: Sequence[Piece]) -> Traffic:
        """Sends each piece, and has it use what comes.

        Where something else than a loss ends that, as a second Ctrl-C does, all edges are closed: what is in flight
        would be taken for the next exchange.
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
        """Starts the transfers; receives first, as a rate limit takes its time with what is sent."""
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
        """Waits for the first piece's transfers, and has it use what has come."""
        flight, traffic = self._pipeline[0], Traffic()
        for peer, transfers in flight.transfers.items():
            if peer in self._edges:
                with self._unless_lost(peer):
                    traffic += self._straggler_timeout.wait_for(self._edges[peer], transfers)
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
            self._let_go(peer)

    def _let_go(self, peer: int) -> None:
        self._edges.pop(peer).close()
        for flight in self._pipeline:
            if peer in flight.transfers:
                flight.transfers[peer].drop()  # or they would keep the sockets open
        # Nobody may write to what was to be received.
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
