"""Published payloads between nodes in processes of their own: a background thread answers each neighbour's requests.

asker -> node   1 byte: 1 requests the last payload, 0 means that the asker ends
node -> asker   int64: length of the payload in bytes, -1 if there is none; then the payload

All transfers of a request have the same tag, the request's number.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from hf_diloco.errors import ConfigError, ExchangeError, IslandLostError, PayloadError
from hf_diloco.gossip.mesh.edges import Edge, Endpoint
from hf_diloco.gossip.mesh.store import BROKEN
from hf_diloco.gossip.published import Published, VersionedBuffer
from hf_diloco.transport.base import Traffic
from hf_diloco.transport.transfers import Deadline, Transfers

logger = logging.getLogger("hf_diloco")

ENDED = "it has ended"
"""The reason for the loss of a neighbour that ended normally."""

_NOTHING = -1
_ASKS, _ENDS = 1, 0
_JOIN_SECONDS = 5.0
_GOODBYE_SECONDS = 1.0


class MeshPublished(Published):
    """One process's end: two connections to each neighbour, one to send requests and one to answer them.

    A neighbour that is gone, or exceeds the timeout, is reported once (`take_lost`). There is nothing to read from it
    until `connect` has opened new connections, which another thread may do. A neighbour notices when this node drops
    it.

    Args:
        endpoint: this node's; a payload may take as long as an exchange.
        neighbours: the nodes that this one may read from, and that may read from it; each has the other in its list.
    """

    def __init__(self, endpoint: Endpoint, neighbours: Collection[int], name: str = "published") -> None:
        super().__init__(endpoint.node, VersionedBuffer())
        self._endpoint = endpoint
        self._neighbours = frozenset(neighbours)
        self._timeout = endpoint.timeout
        self._name = name
        self._lock = threading.Lock()
        self._links: dict[int, _Links] = {}  # to connected neighbours
        self._newly_lost: dict[int, str] = {}
        self._ended: SimpleQueue[tuple[_Links, str]] = SimpleQueue()  # links whose threads have ended, and why
        self._is_closed = False
        atexit.register(self.close)  # threads that Gloo wakes while the interpreter shuts down abort the process

    @property
    def lost(self) -> set[int]:
        """Neighbours that are not connected."""
        return {peer for peer in self._neighbours if peer not in self._links}

    def connect(self, peer: int, life: str, timeout: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Opens the connections to a neighbour, which must do the same. Call it for neighbours in numerical order.

        For the arguments see `Edge`.

        Raises:
            IslandLostError: the neighbour did not connect within the timeout.
        """
        made: dict[int, Edge] = {}
        low, high = ends = sorted((self.node, peer))
        with ExitStack() as broken_off:
            try:
                for asker in ends:
                    made[asker] = Edge(self._endpoint, self._name, peer, f"{life}/{asker}", timeout, meanwhile)
                    broken_off.callback(made[asker].close)
            except (RuntimeError, ExchangeError) as error:
                raise IslandLostError(f"nodes {low} and {high} did not connect: {error}", [peer]) from None
            broken_off.pop_all()
        self._install(_Links(asked=made[self.node], answered=made[peer]))

    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        if node not in self._neighbours:
            raise ConfigError(f"node {node}: node {self.node} takes from its neighbours, {sorted(self._neighbours)}")
        self._length()
        links = self._links.get(node)
        if links is None:
            return None, Traffic(self._versioned.take_count())
        deadline = Deadline(self._timeout)
        try:
            payload, traffic = self._ask(links, deadline)
        except IslandLostError:
            self._lose(links, self._say_why(links, deadline, "answer"))
            payload, traffic = None, Traffic()
        except PayloadError:
            self.drop(node)  # the payload stays unread, so the connection cannot be used any more
            raise
        return payload, traffic + Traffic(self._versioned.take_count())

    def take_lost(self) -> dict[int, str]:
        """Returns the neighbours lost since the last call, each with the reason in words. Does not block."""
        while not self._ended.empty():
            self._lose(*self._ended.get())
        lost, self._newly_lost = self._newly_lost, {}
        return lost

    def drop(self, peer: int) -> None:
        """Disconnects from a neighbour, to which this node is then lost."""
        links = self._links.pop(peer, None)
        if links is not None:
            links.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
        links = list(self._links.values())
        self._links.clear()
        for one in links:
            one.say_goodbye()
            one.close()
        for one in links:
            if one.thread is not None:
                one.thread.join(_JOIN_SECONDS)

    def _lose(self, links: _Links, reason: str) -> None:
        """Closes links; marks their neighbour as lost, unless it has newer links."""
        if self._links.get(links.peer) is links:
            del self._links[links.peer]
            self._newly_lost[links.peer] = reason
        links.close()

    def _install(self, links: _Links) -> None:
        """Starts the thread that answers over these links, which replace earlier ones; those end by themselves."""
        links.thread = threading.Thread(
            target=self._serve,
            args=(links,),
            name=f"hf-diloco-published-{links.peer}",
            daemon=True,  # a thread that waits for a request must not keep the process alive
        )
        with self._lock:
            if self._is_closed:
                links.close()
                raise IslandLostError(f"node {self.node} is closed", [self.node])
            self._links[links.peer] = links
        links.thread.start()

    def _ask(self, links: _Links, deadline: Deadline) -> tuple[torch.Tensor | None, Traffic]:
        edge, length = links.asked, torch.empty(1, dtype=torch.int64)
        transfers = edge.begin()
        try:
            edge.send(torch.tensor([_ASKS], dtype=torch.uint8), transfers, with_checksum=False)
            edge.receive(length, transfers, with_checksum=False)
            edge.wait(transfers, deadline)  # this traffic is protocol, not payload, so it is not counted
            num_bytes = int(length)
            if num_bytes == _NOTHING:
                return None, Traffic()
            received = self._buffer(num_bytes, links.peer)
            edge.receive(received, transfers)
            return received, edge.wait(transfers, deadline)
        finally:
            transfers.drop()

    def _serve(self, links: _Links) -> None:
        """Answers requests until the connection ends; in a thread of its own."""
        edge, request = links.answered, torch.empty(1, dtype=torch.uint8)
        deadline: Deadline | None = None
        try:
            while True:
                transfers = edge.begin()
                edge.receive(request, transfers, with_checksum=False)
                edge.wait_for_ever(transfers)
                if int(request) == _ENDS:
                    links.has_ended = True
                    break
                deadline = Deadline(self._timeout)
                self._answer(edge, deadline)
                deadline = None
        except (RuntimeError, ExchangeError) as error:
            # Log the text only: a log record with the error would keep the sockets open.
            logger.info("node %d no longer serves node %d: %s", self.node, links.peer, str(error))
        self._ended.put((links, self._say_why(links, deadline, "take what it asked for")))

    def _answer(self, edge: Edge, deadline: Deadline) -> None:
        transfers = Transfers()
        with self._versioned.newest() as payload:
            num_bytes = _NOTHING if payload is None else payload.numel()
            edge.send(torch.tensor([num_bytes]), transfers, with_checksum=False)
            if payload is not None:
                edge.send(payload, transfers)
            try:
                edge.wait(transfers, deadline)
            finally:
                transfers.drop()
        self._versioned.count(max(0, num_bytes))

    def _say_why(self, links: _Links, deadline: Deadline | None, what: str) -> str:
        if deadline is not None and deadline.is_over:
            return f"it did not {what} within {self._timeout:g} s"
        if links.thread is not None and links.thread is not threading.current_thread():
            links.thread.join(_GOODBYE_SECONDS)  # the thread may receive the goodbye of a neighbour that has ended
        return ENDED if links.has_ended else BROKEN


@dataclass(eq=False)
class _Links:
    """The connections to a neighbour, the thread that answers it, and whether the neighbour has said goodbye."""

    asked: Edge
    answered: Edge
    thread: threading.Thread | None = None
    has_ended: bool = False

    @property
    def peer(self) -> int:
        """The neighbour."""
        return self.asked.peer

    def say_goodbye(self) -> None:
        """Tells the neighbour that this node ends, unless sending takes longer than a moment."""
        transfers = self.asked.begin()
        try:
            self.asked.send(torch.tensor([_ENDS], dtype=torch.uint8), transfers, with_checksum=False)
            self.asked.wait(transfers, Deadline(_GOODBYE_SECONDS))
        except (RuntimeError, ExchangeError):
            pass
        finally:
            transfers.drop()

    def close(self) -> None:
        """Closes the sockets at once, which ends the waits of both nodes; may be called more than once."""
        self.answered.wake()  # or the wait for a request would keep the sockets open
        self.answered.close()
        self.asked.close()
