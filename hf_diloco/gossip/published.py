"""What a node leaves for the others to take: its last published payload, without anybody waiting for anybody.

One-sided averaging (SwarmSGD, arXiv 1910.12308) takes a partner's model as it lies there, whatever the partner does
meanwhile. So each node keeps a copy of what it published last. Threads of one process read it from memory; between
processes a background thread for each neighbour answers:

    asker -> node   1 byte: the last one, please
    node -> asker   int64: its length in bytes, -1 if there is none; then the payload
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta

import torch
from torch.distributed import Store

from hf_diloco.errors import ConfigError, ExchangeError, IslandLostError, PayloadError
from hf_diloco.exchange.base import Traffic
from hf_diloco.exchange.connections import Connections, Deadline, Transfers
from hf_diloco.exchange.rate import RateLimit
from hf_diloco.gossip.shelf import Shelf

logger = logging.getLogger("hf_diloco")

_REQUEST, _LENGTH, _PAYLOAD, _WAKE = range(1, 5)  # tags
_NOTHING = -1
_FOREVER = timedelta(days=3650)
_JOIN_SECONDS = 5.0


class Published(ABC):
    """One node's end: it shows a payload to all, and takes those of others. Payloads are of one length on all nodes.

    `publish` and `pull` belong to the thread that trains.

    Attributes:
        node: this node's number.
    """

    node: int

    def __init__(self, node: int, shelf: Shelf) -> None:
        self.node = node
        self._shelf = shelf
        self._received: torch.Tensor | None = None

    def publish(self, payload: torch.Tensor) -> None:
        """Shows a payload in place of the last one; returns at once.

        Args:
            payload: uint8, 1-D, contiguous; copied to host memory.
        """
        self._shelf.put(payload)

    @abstractmethod
    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        """What another node published last. Waits for the wire alone, never for that node's training.

        Returns:
            uint8, 1-D, on the host, valid until the next call; or None: the node has not published yet, or is lost.
            And what crossed this node's boundary since the last call, what others took from here included.

        Raises:
            ConfigError: this node has not published yet, so that it is unknown how much may come; or no such node.
            PayloadError: the payload is of another length than this node's own.
        """

    def own(self) -> torch.Tensor | None:
        """A copy of what this node published last; None if nothing."""
        with self._shelf.newest() as payload:
            return None if payload is None else payload.clone()

    @abstractmethod
    def close(self) -> None:
        """Lets go of the others, who then find this node lost; may be called more than once."""

    def _length(self) -> int:
        """Bytes of this node's own payload, and so of all others'."""
        with self._shelf.newest() as own:
            if own is None:
                raise ConfigError(f"node {self.node} takes from others before it has published; publish first")
            return own.numel()

    def _buffer(self, num_bytes: int, node: int) -> torch.Tensor:
        """Where a payload of the length that a node announced is put; checked before memory is taken for it."""
        expected = self._length()
        if num_bytes != expected:
            raise PayloadError(
                f"node {node} published {num_bytes:,} bytes, this node ({self.node}) {expected:,}: train the same "
                "model, with the same quantization, on all nodes"
            )
        if self._received is None or self._received.numel() != num_bytes:
            self._received = torch.empty(num_bytes, dtype=torch.uint8)
        return self._received


class MemoryBoard:
    """The shared ground of nodes that are threads of one process, or one thread that steps them in turns."""

    def __init__(self, num_nodes: int) -> None:
        self.shelves = [Shelf() for _ in range(num_nodes)]


class MemoryPublished(Published):
    """One thread's end. Nothing is sent; bytes count as if sent."""

    def __init__(self, board: MemoryBoard, node: int) -> None:
        super().__init__(node, board.shelves[node])
        self._shelves = board.shelves

    def publish(self, payload: torch.Tensor) -> None:
        super().publish(payload)
        time.sleep(0)  # lets other threads run: one that never waits could end before they begin

    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        if not 0 <= node < len(self._shelves) or node == self.node:
            raise ConfigError(
                f"node {node}: node {self.node} takes from nodes 0 to {len(self._shelves) - 1}, not itself"
            )
        self._length()
        shelf = self._shelves[node]
        with shelf.newest() as payload:
            if payload is None:
                return None, Traffic(self._shelf.take_count())
            received = self._buffer(payload.numel(), node).copy_(payload)
        shelf.count(received.numel())
        return received, Traffic(self._shelf.take_count(), received.numel())

    def close(self) -> None:
        pass


class MeshPublished(Published):
    """One process's end: two connections to each neighbour, one to ask over and one to be asked over.

    A neighbour that is gone, or takes longer than allowed, is reported once, and from then on has nothing to take.

    Attributes:
        lost: neighbours that are gone.
    """

    def __init__(
        self,
        store: Store,
        node: int,
        neighbours: Collection[int],
        address: str,
        connect_timeout: float,
        exchange_timeout: float,
        rate_limit: RateLimit | None = None,
    ) -> None:
        """
        Args:
            store: where neighbours find each other's ports; reachable from all.
            node: this node's number.
            neighbours: whom it may ask and who may ask it. Links go both ways: each has the other in its list.
            address: local address to listen on, as the neighbours see it.
            connect_timeout: seconds that connecting to one neighbour may take.
            exchange_timeout: seconds that a payload may take over the wire.
            rate_limit: for all that is sent; default: none.

        Raises:
            IslandLostError: a neighbour did not connect in time.
        """
        super().__init__(node, Shelf())
        self.lost: set[int] = set()
        self._timeout = exchange_timeout
        self._asked: dict[int, Connections] = {}
        self._answered: dict[int, Connections] = {}
        self._threads: list[threading.Thread] = []
        try:
            # Links are made in one order on all nodes, so that nobody waits in a circle.
            for low, high in sorted((min(node, peer), max(node, peer)) for peer in neighbours):
                peer = high if node == low else low
                for asker in (low, high):
                    links = self._asked if asker == node else self._answered
                    links[peer] = _connect(store, low, high, asker, node, address, connect_timeout, rate_limit)
        except BaseException:
            self.close()
            raise
        for peer, link in self._answered.items():
            self._threads.append(
                threading.Thread(
                    target=_serve,
                    args=(link, _end(peer, node), self._shelf, exchange_timeout, f"node {node} serves node {peer}"),
                    name=f"hf-diloco-published-{peer}",
                    daemon=True,  # one that waits for a request must not keep the process
                )
            )
            self._threads[-1].start()

    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        if node not in self._asked:
            raise ConfigError(f"node {node}: node {self.node} takes from its neighbours, {sorted(self._asked)}")
        self._length()
        if node in self.lost:
            return None, Traffic(self._shelf.take_count())
        try:
            payload, traffic = self._ask(node)
        except IslandLostError as error:
            self._lose(node)
            logger.warning("node %d is lost, and left out from now on: %s", node, str(error))
            payload, traffic = None, Traffic()
        except PayloadError:
            self._lose(node)  # what it sends is not read: nothing more can come over this connection
            raise
        return payload, traffic + Traffic(self._shelf.take_count())

    def close(self) -> None:
        for peer, link in self._answered.items():
            _wake(link, _end(peer, self.node))
            link.close()
        for link in self._asked.values():
            link.close()
        self.lost.update(self._asked)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._threads.clear()

    def _ask(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        link, end = self._asked[node], _end(node, self.node)
        deadline, transfers = Deadline(self._timeout), Transfers()
        length = torch.empty(1, dtype=torch.int64)
        try:
            link.send(torch.ones(1, dtype=torch.uint8), end, _REQUEST, transfers)
            link.receive(length, end, _LENGTH, transfers)
            link.wait(transfers, deadline)
            transfers.take_traffic()  # a few bytes of protocol, not payload
            num_bytes = int(length)
            if num_bytes == _NOTHING:
                return None, Traffic()
            received = self._buffer(num_bytes, node)
            link.receive(received, end, _PAYLOAD, transfers)
            return received, link.wait(transfers, deadline)
        finally:
            transfers.drop()

    def _lose(self, node: int) -> None:
        self.lost.add(node)
        self._asked[node].close()


def _connect(
    store: Store,
    low: int,
    high: int,
    asker: int,
    node: int,
    address: str,
    timeout: float,
    rate_limit: RateLimit | None,
) -> Connections:
    """One connection of an edge."""
    name = f"published/{low}-{high}/{asker}"
    try:
        return Connections(store, name, int(node == high), 2, address, timeout, rate_limit=rate_limit)
    except IslandLostError as error:
        raise IslandLostError(f"nodes {low} and {high} did not connect: {error}", [low + high - node]) from None


def _end(node: int, other: int) -> int:
    """The number of `node` on the connection of the two: the lower one is 0."""
    return int(node > other)


def _serve(link: Connections, asker: int, shelf: Shelf, timeout: float, what: str) -> None:
    """Answers requests until the connection ends; in a thread of its own."""
    request = torch.empty(1, dtype=torch.uint8)
    try:
        while True:
            transfers = Transfers()
            link.receive(request, asker, _REQUEST, transfers)
            # Not `link.wait`: it would look at the connection twice a second, and leave a receive behind each time.
            transfers.works[0].handle.wait(_FOREVER)
            transfers.drop()
            _answer(link, asker, shelf, timeout)
    except (RuntimeError, ExchangeError) as error:
        logger.info("%s no more: %s", what, str(error))  # a record that held the error would hold the sockets


def _answer(link: Connections, asker: int, shelf: Shelf, timeout: float) -> None:
    transfers = Transfers()
    with shelf.newest() as payload:
        num_bytes = _NOTHING if payload is None else payload.numel()
        link.send(torch.tensor([num_bytes]), asker, _LENGTH, transfers)
        if payload is not None:
            link.send(payload, asker, _PAYLOAD, transfers)
        try:
            link.wait(transfers, Deadline(timeout))
        finally:
            transfers.drop()
    shelf.count(max(0, num_bytes))


def _wake(link: Connections, peer: int) -> None:
    """Ends the wait for a request: Gloo closes a connection, and wakes who waits, when any receive times out."""
    transfers = Transfers()
    try:
        link.receive(torch.empty(1, dtype=torch.uint8), peer, _WAKE, transfers)
        transfers.works[0].handle.wait(timedelta(milliseconds=1))
    except (RuntimeError, ExchangeError):
        pass
