"""How a node comes back while the others go on: the side of its neighbours. And how a link comes back.

Nothing here waits for a returning node before it is there, and nothing is done while nobody is lost. A neighbour that
has greeted it connects when it says so, in a thread of its own: whoever leaves again meanwhile keeps nobody else out.

    greet/NODE/START/PEER              a neighbour has seen that NODE is back
    entry/NODE/START/company           the neighbours to whom NODE connects: those that had greeted it in time
    again/LOW-HIGH/STARTS              how often the lower one of two that both go on has tried to connect again

Where nodes are in step, a neighbour agrees with the one that is back on a step to come; see `entry` for the keys below
`entry/NODE/START`. At its beginning each neighbour sends its parameters over the new edge, waits for one byte
back, and from then on the edge is as any other.

Where each steps at its own pace, and takes what others published:

    entry/NODE/START/asks/PEER         NODE is ready to receive from a neighbour

At the beginning of its next step the neighbour sends the number of that step and its parameters.

Two nodes that both go on, and have lost each other, as their connection broke or both returned at the same time, look
for each other in the same way. Neither begins anew: from a step on which they agree, the edge is as any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import torch

from hf_diloco.errors import DiLoCoError, IslandLostError, PayloadError
from hf_diloco.gossip.mesh.edges import Edge, edge_life
from hf_diloco.gossip.mesh.entry import Agreement, Answers, Proposals
from hf_diloco.gossip.mesh.exchange import StragglerTimeout
from hf_diloco.gossip.mesh.joining import LOOK_SECONDS, Announcement, Joining
from hf_diloco.gossip.mesh.store import company_key, entry_prefix, greeting_key, lost_key
from hf_diloco.transport.connections import Transfers

MAX_REST_SECONDS = 600.0
"""A link that breaks again and again backs off for one second, doubling up to this limit."""


@dataclass
class Arrival:
    """A neighbour that is connected again.

    Attributes:
        edge: to it.
        is_new: it begins with its neighbours' mean; or else it has gone on, as this node has.
        start: which of its starts this is.
        agreement: on the step from which on it takes part, where nodes are in step.
    """

    edge: Edge
    is_new: bool
    start: int
    agreement: Agreement


class Reception:
    """Looks for lost neighbours in a thread of its own, connects to each in another one, and lets them in.

    Args:
        joining: this node's.
        num_nodes: n.
        straggler_timeout: how long this node waits for those who are let in.

    Attributes:
        has_begun: this node takes steps.
        is_given_up: others have noted, while this node looked for lost ones, that they have lost it.
    """

    def __init__(self, joining: Joining, num_nodes: int, straggler_timeout: StragglerTimeout) -> None:
        self.has_begun = False
        self.is_given_up = False
        self._joining = joining
        self._board = joining.board
        self._discovery = joining.discovery
        self._node = joining.node
        self._starts = joining.starts
        self._num_nodes = num_nodes
        self._straggler_timeout = straggler_timeout
        self._lock = threading.Lock()
        self._lost: dict[int, float] = {}  # and when they may be connected to again
        self._num_again = dict.fromkeys(joining.starts, 0)  # how often each was connected to again
        self._attempts: dict[str, int] = {}  # of others to connect to this node again, which it has seen
        self._greeted: dict[int, int] = {}  # neighbours that wait to be let in, and which of their starts that is
        self._answered: dict[int, int] = {}  # likewise, that have said to whom they connect
        self._connecting: set[int] = set()
        self._arrivals: dict[int, Arrival] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Begins to connect to nodes that return, as this node takes steps now."""
        if not self.has_begun:
            self.has_begun = True
            self._joining.begin()
            self.look_for([])

    def look_for(self, peers: Collection[int]) -> None:
        """Begins to look for these too."""
        now = time.monotonic()
        with self._lock:
            self._lost.update({peer: now + _rest_seconds(self._num_again[peer]) for peer in peers})
            if self._thread is None and self._lost and self.has_begun:
                self._thread = threading.Thread(target=self._look, name="hf-diloco-returns", daemon=True)
                self._thread.start()

    def let_in(self, x: torch.Tensor, step: int, is_in_step: bool) -> dict[int, Arrival]:
        """Lets nodes that came back take part.

        Args:
            x: this node's parameters.
            step: the step that begins.
            is_in_step: whether nodes take their steps together; all then let a node in at the same one.

        Returns:
            Those who take part from this step on.
        """
        entered: dict[int, Arrival] = {}
        for peer, one in sorted(self._arrivals.items()):  # all in the same order: two nodes may enter at this step
            try:
                one.edge.check()
                is_in = (self._is_let_in if is_in_step else self._is_free_to_enter)(peer, one, x, step)
            except DiLoCoError:  # gone again; or the store, which is said where it is needed
                self.turn_away([peer])
                continue
            if is_in:
                entered[peer] = one
                del self._arrivals[peer]
        return entered

    def turn_away(self, peers: Collection[int]) -> None:
        """Disconnects those that do not take part yet; they have to come again."""
        for peer in set(peers) & self._arrivals.keys():
            self._arrivals.pop(peer).edge.close()
            self.look_for([peer])

    def close(self) -> None:
        """Stops looking."""
        with self._lock:
            self._is_closed = True
            arrivals, self._arrivals = self._arrivals, {}
        for one in arrivals.values():
            one.edge.close()

    # In the thread.

    def _look(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or not self._lost:
                    self._discovery.note([])
                    self._thread = None
                    return
                lost = sorted(self._lost)
            try:
                self.is_given_up = self._board.has(lost_key(self._node))
                self._discovery.announce(lost)
                heard = self._discovery.listen(self._starts)
                for peer in lost:
                    with self._lock:  # `_connect_to` moves a peer out of both at once
                        if peer in self._connecting or peer not in self._lost:
                            continue
                    with suppress(PayloadError):  # from one of them: the others are looked for all the same
                        self._look_for_one(peer, heard.get(peer))
            except DiLoCoError:  # the store does not answer now; without it nobody finds the way back
                pass
            time.sleep(LOOK_SECONDS)

    def _look_for_one(self, peer: int, announcement: Announcement | None) -> None:
        if announcement is not None:
            self._starts[peer] = announcement.start
        if announcement is not None and announcement.said.phase == "joining":  # it waits to be let in
            self._greet(peer, announcement.start)
        elif peer in self._greeted:
            self._join(peer, self._greeted[peer])
        else:
            self._meet_again(peer, announcement)

    def _greet(self, peer: int, start: int) -> None:
        """Tells a neighbour that waits to be let in that this node is there."""
        if self._answered.get(peer) == start:
            return
        self._greeted[peer] = start
        greeting = greeting_key(peer, start, self._node)
        if not self._board.has(greeting):
            self._board.put(greeting, {})

    def _join(self, peer: int, start: int) -> None:
        """Connects to a neighbour that was greeted, if it connects to this node; once, as the neighbour tries once."""
        company = self._board.read(company_key(peer, start), peer)
        if company is None:
            return
        self._answered[peer] = self._greeted.pop(peer)
        nodes = company.get("nodes")
        if isinstance(nodes, list) and self._node in nodes:
            answers = Answers(self._board, entry_prefix(peer, start), self._node, peer)
            self._connect_to(peer, 0, answers)

    def _meet_again(self, peer: int, announcement: Announcement | None) -> None:
        """Connects to a neighbour that goes on, and looks for this node: the lower one of the two says when."""
        low, high = sorted((self._node, peer))
        attempts = f"again/{low}-{high}/{edge_life({self._node: self._joining.start, peer: self._starts[peer]})}"
        agreement: Agreement
        if self._node == low:
            is_missed = announcement is not None and self._node in announcement.said.misses
            if not is_missed or time.monotonic() < self._lost[peer]:
                return
            attempt = self._board.count(attempts, 1)
            agreement = Proposals(self._board, f"{attempts}/{attempt}", self._node, peer, self._num_nodes)
        else:
            attempt = self._board.count(attempts)
            if attempt == self._attempts.get(attempts, 0):
                return
            self._attempts[attempts] = attempt
            agreement = Answers(self._board, f"{attempts}/{attempt}", self._node, peer)
        self._connect_to(peer, attempt, agreement, lambda: self._board.count(attempts) > attempt)

    def _connect_to(
        self, peer: int, attempt: int, agreement: Agreement, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Connects to a neighbour in a thread of its own."""
        start = self._starts[peer]

        def look() -> None:
            if self._is_closed or is_over() or self._joining.count_starts([peer])[peer] > start:
                raise IslandLostError(f"node {peer} does not connect any more", [peer])

        def connect() -> None:
            edge: Edge | None = None
            with suppress(DiLoCoError, RuntimeError):
                edge = self._joining.connect_again(peer, start, attempt, look)
            with self._lock:
                self._connecting.discard(peer)
                if edge is None:
                    return
                if self._is_closed:
                    edge.close()
                    return
                self._lost.pop(peer, None)
                self._num_again[peer] += attempt > 0
                self._arrivals[peer] = Arrival(edge, attempt == 0, start, agreement)

        self._connecting.add(peer)
        threading.Thread(target=connect, name="hf-diloco-returns", daemon=True).start()

    # At the beginning of a step.

    def _is_let_in(self, peer: int, one: Arrival, x: torch.Tensor, step: int) -> bool:
        """Whether it is the step on which they agreed; who is new then has the parameters."""
        if not one.agreement.is_now(step):
            return False
        if one.is_new:
            self._give(one.edge, x)
            self._receive_word(one.edge)
        else:
            self._board.remove(lost_key(peer))
        return True

    def _give(self, edge: Edge, *vectors: torch.Tensor) -> None:
        hosts, transfers = [vector.cpu() for vector in vectors], edge.begin()
        for host in hosts:
            edge.send(host, transfers)
        self._wait(edge, transfers)

    def _receive_word(self, edge: Edge) -> None:
        """Returns when a node that was given the parameters has those of its other neighbours too."""
        transfers = edge.begin()
        edge.receive(torch.empty(1, dtype=torch.uint8), transfers)
        self._wait(edge, transfers)

    def _wait(self, edge: Edge, transfers: Transfers) -> None:
        """Says so meanwhile: neighbours, and the node that is let in, may have to wait for this one."""
        self._straggler_timeout.begin_other(f"letting node {edge.peer} in")
        self._straggler_timeout.wait_for(edge, transfers)

    # At the beginning of a step, where each node takes its own.

    def _is_free_to_enter(self, peer: int, one: Arrival, x: torch.Tensor, step: int) -> bool:
        """Whether the node has gone on, or was ready and now has the parameters: nobody waits but for the wire."""
        if not one.is_new:
            self._board.remove(lost_key(peer))
            return True
        if not self._board.has(f"{entry_prefix(peer, one.start)}/asks/{self._node}"):
            return False
        self._give(one.edge, torch.tensor([step]), x)
        self._board.count("returned", 1)  # before this node's next average, which is with the one that is back
        return True


def _rest_seconds(num_again: int) -> float:
    return min(float(2 ** (num_again - 1)), MAX_REST_SECONDS) if num_again else 0.0
