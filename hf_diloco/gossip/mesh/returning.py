"""How a node comes back while the others go on: the side of its neighbours.

Nothing here waits for a returning node before it is there, and nothing is done while nobody is lost.

    starts/NODE                        how often a node was started
    greet/NODE/START/PEER              a neighbour has seen that NODE is back, and connects

Where nodes are in step:

    entry/NODE/START/at/PEER           the step that a neighbour is at
    entry/NODE/START/proposal          at which step NODE would like to enter: the round of asking, and the step
    entry/NODE/START/ROUND/PEER        whether that step is yet to come, for a neighbour
    entry/NODE/START/ROUND/decision    whether it is for all: the first word counts

At the beginning of the step that is decided each neighbour sends its parameters over the new edge, waits for one byte
back, and from then on the edge is as any other.

Where each steps at its own pace, and takes what others published:

    entry/NODE/START/asks/PEER         NODE is ready to receive from a neighbour

At the beginning of its next step the neighbour sends the number of that step and its parameters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from hf_diloco.errors import DiLoCoError
from hf_diloco.exchange.connections import Deadline
from hf_diloco.gossip.mesh.average import lost_key
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.store import Board

LOOK_SECONDS = 0.5
"""How often neighbours look for those that were lost."""

Connect = Callable[[int, int], Edge]
"""Makes the edge to a neighbour that was started so many times, and what else connects the two."""


def greeting_key(node: int, start: int, peer: int) -> str:
    """Where `peer` says that it has seen `node`'s start."""
    return f"greet/{node}/{start}/{peer}"


def entry_key(node: int, start: int, what: str) -> str:
    """Where `node` and its neighbours agree on the step at which it enters."""
    return f"entry/{node}/{start}/{what}"


def decide(board: Board, key: str, node: int, is_on: bool) -> bool:
    """Writes a decision about the entry of `node` unless there is one; returns the one that is there."""
    board.put_first(key, {"is_on": is_on})
    return (board.read(key, node) or {}).get("is_on") is True


@dataclass
class _Returning:
    """A neighbour that is back and connected, but does not take part yet."""

    edge: Edge
    start: int
    round: int = 0
    step: int | None = None


class Reception:
    """Looks for lost neighbours in a thread of its own, and lets them in.

    Args:
        board: the mesh's.
        node: this node.
        starts: how often each neighbour was started when its edge was made.
        connect: see `Connect`; called in the thread.
        timeout: seconds that an exchange may take.

    Attributes:
        is_given_up: others have noted, while this node looked for lost ones, that they have lost it.
    """

    def __init__(self, board: Board, node: int, starts: dict[int, int], connect: Connect, timeout: float) -> None:
        self.is_given_up = False
        self._board = board
        self._node = node
        self._starts = starts
        self._connect = connect
        self._timeout = timeout
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._returning: dict[int, _Returning] = {}
        self._thread: threading.Thread | None = None
        self._has_begun = False
        self._is_closed = False

    def begin(self) -> None:
        """This node takes steps: from now on it connects to those who return."""
        if not self._has_begun:
            self._has_begun = True
            self.look_for([])

    def look_for(self, peers: Collection[int]) -> None:
        """From now on these are looked for, too."""
        with self._lock:
            self._lost.update(peers)
            if self._thread is None and self._lost and self._has_begun:
                self._thread = threading.Thread(target=self._look, name="hf-diloco-returns", daemon=True)
                self._thread.start()

    @property
    def is_anyone_back(self) -> bool:
        """Whether `let_in` has anything to do."""
        return bool(self._returning)

    def let_in(self, x: torch.Tensor, step: int, is_in_step: bool) -> dict[int, Edge]:
        """Talks to those who are back.

        Args:
            x: this node's parameters.
            step: the step that begins.
            is_in_step: whether nodes take their steps together; all then let a node in at the same one.

        Returns:
            The edges to those who enter at this step.
        """
        entered: dict[int, Edge] = {}
        for peer, one in list(self._returning.items()):
            try:
                one.edge.check()
                is_in = (self._talk if is_in_step else self._give_if_asked)(peer, one, x, step)
            except DiLoCoError:  # gone again; or the store, which is said where it is needed
                self.turn_away([peer])
                continue
            if is_in:
                entered[peer] = one.edge
                del self._returning[peer]
        return entered

    def turn_away(self, peers: Collection[int]) -> None:
        """Those of them who are back, but do not take part yet, have to be started again."""
        for peer in set(peers) & self._returning.keys():
            self._returning.pop(peer).edge.close()
            self.look_for([peer])

    def close(self) -> None:
        """Looks for nobody any more."""
        with self._lock:
            self._is_closed = True
            returning, self._returning = self._returning, {}
        for one in returning.values():
            one.edge.close()

    # In the thread.

    def _look(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or not self._lost:
                    self._thread = None
                    return
                lost = sorted(self._lost)
            try:
                self.is_given_up = self._board.has(lost_key(self._node))
                for peer in lost:
                    self._greet(peer)
            except DiLoCoError:  # without the store nobody finds the way back
                return
            time.sleep(LOOK_SECONDS)

    def _greet(self, peer: int) -> None:
        start = self._board.count(f"starts/{peer}")
        if start <= self._starts[peer]:
            return
        self._starts[peer] = start
        self._board.put(greeting_key(peer, start, self._node), {})
        try:
            edge = self._connect(peer, start)
        except (DiLoCoError, RuntimeError):
            return
        with self._lock:
            if self._is_closed:
                edge.close()
                return
            self._lost.discard(peer)
            self._returning[peer] = _Returning(edge, start)

    # At the beginning of a step.

    def _talk(self, peer: int, one: _Returning, x: torch.Tensor, step: int) -> bool:
        """Whether the node enters at this step."""
        self._board.put(entry_key(peer, one.start, f"at/{self._node}"), {"step": step})
        self._answer(peer, one, step)
        while one.step is not None and one.step <= step:
            if self._is_on(peer, one):
                self._give(one.edge, x)
                return True
            one.step = None
            self._answer(peer, one, step)
        return False

    def _answer(self, peer: int, one: _Returning, step: int) -> None:
        proposal = self._board.read(entry_key(peer, one.start, "proposal"), peer)
        if proposal is None or int(proposal["round"]) <= one.round:
            return
        one.round = int(proposal["round"])
        is_to_come = int(proposal["step"]) > step
        one.step = int(proposal["step"]) if is_to_come else None
        self._board.put(entry_key(peer, one.start, f"{one.round}/{self._node}"), {"is_to_come": is_to_come})

    def _is_on(self, peer: int, one: _Returning) -> bool:
        """Whether all have said that the step is yet to come.

        Where that is not decided by now, it is off: to wait here could be to wait for one who waits for this node.
        """
        return decide(self._board, entry_key(peer, one.start, f"{one.round}/decision"), peer, is_on=False)

    def _give(self, edge: Edge, x: torch.Tensor) -> None:
        deadline = Deadline(self._timeout)
        host, transfers = x.cpu(), edge.begin()
        edge.send(host, transfers)
        edge.wait(transfers, deadline)
        transfers = edge.begin()
        edge.receive(torch.empty(1, dtype=torch.uint8), transfers)
        edge.wait(transfers, deadline)

    # At the beginning of a step, where each node takes its own.

    def _give_if_asked(self, peer: int, one: _Returning, x: torch.Tensor, step: int) -> bool:
        """Whether the node was ready, and so has been given the parameters: nobody waits but for the wire."""
        if not self._board.has(entry_key(peer, one.start, f"asks/{self._node}")):
            return False
        host, transfers = x.cpu(), one.edge.begin()
        one.edge.send(torch.tensor([step]), transfers)
        one.edge.send(host, transfers)
        one.edge.wait(transfers, Deadline(self._timeout))
        self._board.count("returned", 1)  # before this node's next average, which is with the one that is back
        return True
