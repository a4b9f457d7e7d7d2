"""The edges of a mesh: one pair of sockets each, so that a lost node breaks only its own edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from hf_diloco.errors import DiLoCoError, ExchangeError, IslandLostError, damage
from hf_diloco.sealing.channel import Parties
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Lane, RateLimit, Traffic
from hf_diloco.transport.connections import Connections
from hf_diloco.transport.transfers import Deadline, Transfers

_FOREVER = timedelta(days=3650)


@dataclass(frozen=True)
class Endpoint:
    """How a node connects to others, and they to it; for the fields see `Lane`. `timeout` is that of an exchange."""

    store: ValueStore
    node: int
    address: str
    timeout: float
    rate_limit: RateLimit = field(default_factory=RateLimit)
    key: LinkKey | None = None

    def lane(
        self, name: str, members: Sequence[int], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> Lane:
        """Returns this node's end of a lane between some nodes.

        Args:
            name: unique in the store.
            members: the nodes to connect, this one included, in the order of their numbers.
            timeout: seconds to connect in.
            meanwhile: polled while this node waits for others; an exception that it raises ends the wait.
        """

        def look(_: float) -> bool:
            if meanwhile:
                meanwhile()
            return False

        return Lane(
            self.store,
            name,
            members.index(self.node),
            len(members),
            self.address,
            timeout,
            self.key,
            rate_limit=self.rate_limit,
            parties=Parties(tuple(members), "node"),
            should_give_up=look,
        )


class Edge:
    """One node's end of the connection to a neighbour. Both ends must begin their transfers in the same order.

    Args:
        endpoint: this node's.
        name: of the mesh, unique in the store.
        peer: the neighbour.
        life: distinguishes this edge from earlier ones between the two nodes; the same at both ends.
        timeout, meanwhile: see `Endpoint.lane`.

    Raises:
        IslandLostError: the neighbour did not connect within the timeout.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        peer: int,
        life: str,
        timeout: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self.life = life
        low, high = ends = sorted((endpoint.node, peer))
        self._other_end = ends.index(peer)
        self._tag = 0
        self._links = Connections(endpoint.lane(f"{name}/{low}-{high}/{life}", ends, timeout, meanwhile))

    def begin(self) -> Transfers:
        """Begins the next transfers on this edge, as the other end does too; add to them with `receive` and `send`."""
        self._tag += 1
        return Transfers()

    def receive(self, tensor: torch.Tensor, transfers: Transfers, with_checksum: bool = True) -> None:
        """Starts receiving; `tensor` is complete once `wait` returns. Raises `IslandLostError` on a broken edge."""
        self._links.receive(tensor, self._other_end, self._tag, transfers, with_checksum)

    def send(self, tensor: torch.Tensor, transfers: Transfers, with_checksum: bool = True) -> None:
        """Starts sending; `tensor` must not change until `wait` returns. Raises `IslandLostError` as `receive`."""
        self._links.send(tensor, self._other_end, self._tag, transfers, with_checksum)

    def wait(self, transfers: Transfers, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Traffic:
        """Like `Connections.wait`, but raises `IslandLostError` for corrupt data too: the neighbour must reconnect."""
        traffic = self._links.wait(transfers, deadline, meanwhile)
        self._refuse_damaged(transfers)
        return traffic

    def wait_for_ever(self, transfers: Transfers) -> None:
        """Like `wait`, without a timeout; `wake` ends it. Does not poll, as a poll would leave a receive pending.

        Raises:
            RuntimeError: the connection has broken.
            IslandLostError: the received data is corrupt.
        """
        for work in transfers.works:
            work.handle.wait(_FOREVER)
        transfers.check()
        self._refuse_damaged(transfers)
        transfers.drop()

    def wake(self) -> None:
        """Ends all waits at this end as if the connection had broken; a no-op if the edge is closed."""
        with suppress(ExchangeError):
            self._links.wake()

    def _refuse_damaged(self, transfers: Transfers) -> None:
        if transfers.damaged:
            why = damage(self._links.is_sealed)
            raise IslandLostError(f"what node {self.peer} sent arrived damaged ({why})", [self.peer])

    def check(self) -> None:
        """Raises `IslandLostError` if the connection has broken. Call it only while no transfer is in flight."""
        if self._links.find_broken():
            raise IslandLostError(f"node {self.peer} went away", [self.peer])

    def close(self) -> None:
        """Closes the sockets at once, which ends the neighbour's waits; may be called more than once."""
        self._links.close()


def edge_life(starts: Mapping[int, int]) -> str:
    """Returns the identifier of an edge: how often each of its two nodes was started."""
    return ".".join(str(starts[node]) for node in sorted(starts))


def connect_edges(
    endpoint: Endpoint,
    name: str,
    lives: Mapping[int, str],
    timeout: float,
    meanwhile: Callable[[int], None] | None = None,
) -> tuple[dict[int, Edge], list[int]]:
    """Connects to several neighbours concurrently, as each connection takes many round trips.

    Args:
        lives: the `life` of the edge to each neighbour; for the other arguments see `Edge`.
        meanwhile: called with the neighbour.

    Returns:
        The edges, by neighbour, and the neighbours that did not connect.

    Raises:
        IslandLostError: this node cannot listen; no neighbour is to blame.
        ForgedError: a process that answered as a neighbour does not hold the key.
    """
    failures: list[DiLoCoError] = []

    def connect(peer: int) -> Edge | None:
        try:
            return Edge(endpoint, name, peer, lives[peer], timeout, partial(meanwhile, peer) if meanwhile else None)
        except RuntimeError:
            return None
        except DiLoCoError as error:
            if not isinstance(error, IslandLostError) or isinstance(error.__cause__, OSError):
                failures.append(error)
            return None

    if not lives:
        return {}, []
    with ThreadPoolExecutor(len(lives), thread_name_prefix="hf-diloco-edges") as threads:
        made = dict(zip(lives, threads.map(connect, lives), strict=True))
    edges = {peer: edge for peer, edge in made.items() if edge is not None}
    if failures:
        for edge in edges.values():
            edge.close()  # or those neighbours would wait for this node, which is about to end
        raise failures[0]
    return edges, [peer for peer in lives if peer not in edges]
