"""How a restarted node rejoins while the others go on: its neighbours' side. And how two running nodes reconnect.

Nothing here waits for a restarted node before it is back, and there is no work while no node is lost. A neighbour that
has greeted the restarted node connects once that node asks for it, in a thread of its own: a node that leaves again
meanwhile does not keep others out.

    greet/NODE/START/PEER              a neighbour has seen that NODE is back
    entry/NODE/START/company           the neighbours that NODE connects to: those that greeted it in time
    again/LOW-HIGH/STARTS              how often the lower one of two running nodes has tried to reconnect

If nodes are in lockstep, each neighbour agrees with the restarted node on a future step; see `entry` for the keys
below `entry/NODE/START`. When that step begins, each neighbour sends its parameters over the new edge, and waits for
one byte in return. From then on the edge is like any other.

If nodes are not in lockstep, and read each other's published payloads:

    entry/NODE/START/asks/PEER         NODE is ready to receive from a neighbour

At the beginning of its next step, the neighbour sends the number of that step and its parameters.

Two running nodes may lose each other: their connection broke, or both were restarted at the same time. They look for
each other in the same way. Both keep their parameters: from an agreed step on, the edge is like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import torch

from hf_diloco.errors import DiLoCoError, IslandLostError, PayloadError
from hf_diloco.gossip.mesh.edges import Edge, edge_life
from hf_diloco.gossip.mesh.entry import Agreement, Proposer, Responder
from hf_diloco.gossip.mesh.exchange import StragglerTimeout
from hf_diloco.gossip.mesh.joining import LOOK_SECONDS, Announcement, Joining
from hf_diloco.gossip.mesh.store import BROKEN, company_key, entry_prefix, greeting_key, lost_key
from hf_diloco.transport.transfers import Transfers

MAX_REST_SECONDS = 600.0
"""Reconnecting a link that breaks repeatedly backs off for one second, doubling up to this limit."""


@dataclass
class Arrival:
    """A neighbour that has reconnected.

    Attributes:
        edge: the new edge to the neighbour.
        is_new: whether the neighbour was restarted, and begins with its neighbours' mean; False: it has gone on.
        start: the number of its current start.
        agreement: on the step from which the neighbour takes part, if nodes are in lockstep.
    """

    edge: Edge
    is_new: bool
    start: int
    agreement: Agreement


class Reception:
    """Looks for lost neighbours in one thread, connects to each in a thread of its own, and lets them in.

    Attributes:
        has_begun: whether this node takes steps.
        is_given_up: whether the neighbour that reported this node's loss last has given it up, instead of losing the
            connection; updated while it looks for lost neighbours.
    """

    def __init__(self, joining: Joining, num_nodes: int, straggler_timeout: StragglerTimeout) -> None:
        self.has_begun = False
        self.is_given_up = False
        self._joining = joining
        self._board, self._clock = joining.board, joining.board.clock
        self._discovery = joining.discovery
        self._node = joining.node
        self._starts = joining.starts
        self._num_nodes = num_nodes
        self._straggler_timeout = straggler_timeout
        self._lock = threading.Lock()
        self._lost: dict[int, float] = {}  # lost neighbours, each with the time from which it may be reconnected
        self._num_again = dict.fromkeys(joining.starts, 0)  # how often this node reconnected to each
        self._attempts: dict[str, int] = {}  # the last attempts of others to reconnect that this node has seen
        self._greeted: dict[int, int] = {}  # neighbours that wait to be let in, and the number of their start
        self._answered: dict[int, int] = {}  # likewise, of those that have published to which nodes they connect
        self._connecting: set[int] = set()
        self._arrivals: dict[int, Arrival] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Begins to connect to restarted nodes, as this node takes steps now."""
        if not self.has_begun:
            self.has_begun = True
            self._joining.begin()
            self.look_for([])

    def look_for(self, peers: Collection[int]) -> None:
        """Begins to look for these nodes too."""
        now = self._clock.now()
        with self._lock:
            self._lost.update({peer: now + _rest_seconds(self._num_again[peer]) for peer in peers})
        self._look_on()

    def _look_on(self) -> None:
        """Starts the thread if nodes are lost and it does not run."""
        with self._lock:
            if self._thread is None and self._lost and self.has_begun:
                with suppress(RuntimeError):  # no thread can be started now: the next step tries again
                    self._thread = _start_thread(self._look)

    def admit(self, x: torch.Tensor, step: int, is_in_step: bool) -> dict[int, Arrival]:
        """Returns the reconnected nodes that take part from this step on; new ones have received the parameters `x`.

        If nodes are in lockstep (`is_in_step`), all let a node in at the same step.
        """
        self._look_on()
        entered: dict[int, Arrival] = {}
        for peer, one in sorted(self._arrivals.items()):  # all in the same order: two nodes may enter at this step
            try:
                one.edge.check()
                is_in = (self._is_let_in if is_in_step else self._is_free_to_enter)(peer, one, x, step)
            except DiLoCoError:  # the node is gone again; or the store, whose loss other calls report
                self.reject([peer])
                continue
            if is_in:
                entered[peer] = one
                del self._arrivals[peer]
        return entered

    def reject(self, peers: Collection[int]) -> None:
        """Disconnects nodes that do not take part yet; they have to reconnect."""
        for peer in set(peers) & self._arrivals.keys():
            self._arrivals.pop(peer).edge.close()
            self.look_for([peer])

    def close(self) -> None:
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
                with suppress(PayloadError):
                    said = self._board.read(lost_key(self._node), self._node)
                    self.is_given_up = said is not None and said.get("reason") != BROKEN
                self._discovery.announce(lost)
                heard = self._discovery.listen(self._starts)
                for peer in lost:
                    with self._lock:  # `_connect_to` moves a peer out of both at once
                        if peer in self._connecting or peer not in self._lost:
                            continue
                    with suppress(PayloadError):  # an invalid record of one node must not end the search for others
                        self._look_for_one(peer, heard.get(peer))
            except (DiLoCoError, RuntimeError):  # no answer of the store, or no thread can be started now: try later
                pass
            self._clock.sleep(LOOK_SECONDS)

    def _look_for_one(self, peer: int, announcement: Announcement | None) -> None:
        if announcement is not None:
            self._starts[peer] = announcement.start
        if announcement is not None and announcement.said.phase == "joining":  # the peer waits to be let in
            self._greet(peer, announcement.start)
        elif peer in self._greeted:
            self._join(peer, self._greeted[peer])
        else:
            self._meet_again(peer, announcement)

    def _greet(self, peer: int, start: int) -> None:
        """Tells a neighbour that waits to be let in that this node is running."""
        if self._answered.get(peer) == start:
            return
        self._greeted[peer] = start
        greeting = greeting_key(peer, start, self._node)
        if not self._board.has(greeting):
            self._board.put(greeting, {})

    def _join(self, peer: int, start: int) -> None:
        """Connects to a greeted neighbour if it lists this node; once, as the neighbour tries once too."""
        company = self._board.read(company_key(peer, start), peer)
        if company is None:
            return
        self._answered[peer] = self._greeted.pop(peer)
        nodes = company.get("nodes")
        if isinstance(nodes, list) and self._node in nodes:
            answers = Responder(self._board, entry_prefix(peer, start), self._node, peer)
            self._connect_to(peer, 0, answers)

    def _meet_again(self, peer: int, announcement: Announcement | None) -> None:
        """Reconnects to a running neighbour that misses this node: the lower one of the two decides when."""
        low, high = sorted((self._node, peer))
        attempts = f"again/{low}-{high}/{edge_life({self._node: self._joining.start, peer: self._starts[peer]})}"
        agreement: Agreement
        if self._node == low:
            is_missed = announcement is not None and self._node in announcement.said.misses
            if not is_missed or self._clock.now() < self._lost[peer]:
                return
            attempt = self._board.count(attempts, 1)
            agreement = Proposer(self._board, f"{attempts}/{attempt}", self._node, peer, self._num_nodes)
        else:
            attempt = self._board.count(attempts)
            if attempt == self._attempts.get(attempts, 0):
                return
            self._attempts[attempts] = attempt
            agreement = Responder(self._board, f"{attempts}/{attempt}", self._node, peer)
        self._connect_to(peer, attempt, agreement, lambda: self._board.count(attempts) > attempt)

    def _connect_to(
        self, peer: int, attempt: int, agreement: Agreement, is_over: Callable[[], bool] = lambda: False
    ) -> None:
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
        try:
            _start_thread(connect)
        except RuntimeError:
            self._connecting.discard(peer)
            raise

    # At the beginning of a step.

    def _is_let_in(self, peer: int, one: Arrival, x: torch.Tensor, step: int) -> bool:
        """Whether `step` is the agreed one; if so, a restarted node has received the parameters on return."""
        if not one.agreement.is_now(step):
            return False
        if one.is_new:
            self._give(one.edge, x)
            transfers = one.edge.begin()
            one.edge.receive(torch.empty(1, dtype=torch.uint8), transfers)  # once it has those of all neighbours
            self._wait(one.edge, transfers)
        else:
            self._board.remove(lost_key(peer))
        return True

    def _give(self, edge: Edge, *vectors: torch.Tensor) -> None:
        hosts, transfers = [vector.cpu() for vector in vectors], edge.begin()
        for host in hosts:
            edge.send(host, transfers)
        self._wait(edge, transfers)

    def _wait(self, edge: Edge, transfers: Transfers) -> None:
        """Waits for transfers, and reports the wait: neighbours, and the node let in, may be waiting for this node."""
        self._straggler_timeout.begin_other(f"letting node {edge.peer} in")
        self._straggler_timeout.wait_for(edge, transfers)

    # At the beginning of a step, without lockstep.

    def _is_free_to_enter(self, peer: int, one: Arrival, x: torch.Tensor, step: int) -> bool:
        """Whether the node may enter: it has gone on, or asked for the parameters and got them. Waits only to send."""
        if not one.is_new:
            self._board.remove(lost_key(peer))
            return True
        if not self._board.has(f"{entry_prefix(peer, one.start)}/asks/{self._node}"):
            return False
        self._give(one.edge, torch.tensor([step]), x)
        self._board.count("returned", 1)  # before this node's next average, which includes the restarted node
        return True


def _start_thread(run: Callable[[], None]) -> threading.Thread:
    """Starts one of the threads of this module.

    Raises:
        RuntimeError: the system, or a limit of this process, allows no further thread now.
    """
    thread = threading.Thread(target=run, name="hf-diloco-returns", daemon=True)
    thread.start()
    return thread


def _rest_seconds(num_again: int) -> float:
    return min(float(2 ** (num_again - 1)), MAX_REST_SECONDS) if num_again else 0.0
