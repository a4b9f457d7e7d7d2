"""How long a node waits for a neighbour that does not come, when that may be waiting for yet another one.

When a node stops, its neighbours wait for it until their time is over; but their own neighbours have been waiting for
them as long, and would give them up at the same moment. So whoever waits says so in the store every half second, and
is given as much time again by those who wait for it.

A process may stand still itself: it is stopped, swapped out, or asks a slow name service. Who comes back from that
must not give up its neighbours at once, so such a pause is no part of the time that they have.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_diloco.errors import DiLoCoError, IslandLostError
from hf_diloco.gossip.mesh.store import KEEPER, Board
from hf_diloco.gossip.records import Record
from hf_diloco.transport.transfers import Deadline
from hf_diloco.utils.waiting import WaitNotes

PAUSE_SECONDS = 1.0
"""Between two looks, which follow each other twice as fast: a longer pause says that this process stood still."""


class StragglerTimeout:
    """One node's, for one exchange, or one other wait, at a time.

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
        self._is_silent = False
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

    def watch(self, peer: int) -> Callable[[], None]:
        """What to call now and then while this node waits for `peer`; raises `IslandLostError` once it is too late."""

        def look() -> None:
            if self._has_given_up:
                raise IslandLostError(f"node {peer} is waited for no more", [peer])
            self._leave_out_own_pause()
            self._wait.look([peer])
            self._say(peer)
            if peer not in self._seen:
                self._seen[peer] = self._read(peer)
            elif self._is_over and not self._is_excused(peer):
                raise IslandLostError(f"node {peer} did not come within {self.seconds:g} s", [peer])

        return look

    @property
    def _is_over(self) -> bool:
        return self._clock.now() >= self._ends_at

    def _leave_out_own_pause(self) -> None:
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
        """A store that is gone, with node 0, ends nothing here; it is asked no more."""
        try:
            return call()
        except DiLoCoError:
            self._is_silent = True
            return None
