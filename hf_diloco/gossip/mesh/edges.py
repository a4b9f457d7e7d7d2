"""The edges of a mesh: one pair of sockets each, so that a lost node breaks its own edges only."""

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
from hf_diloco.transport.connections import Connections, Transfers
from hf_diloco.transport.waiting import Deadline

_FOREVER = timedelta(days=3650)


@dataclass(frozen=True)
class Endpoint:
    """How a node reaches others, and they it.

    Attributes:
        store: where nodes find each other.
        node: this node.
        address: local address to listen on, as the others see it.
        timeout: seconds that an exchange may take.
        rate_limit: for all that is sent. Default: none.
        key: see `Lane`.
    """

    store: ValueStore
    node: int
    address: str
    timeout: float
    rate_limit: RateLimit = field(default_factory=RateLimit)
    key: LinkKey | None = None

    def lane(
        self, name: str, members: Sequence[int], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> Lane:
        """This node's end of a lane of some nodes.

        Args:
            name: of the lane, unique in the store.
            members: who is joined, in the order of their numbers; this node is one.
            timeout: seconds that connecting may take.
            meanwhile: called now and then while others are waited for; what it raises ends that.
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
    """One node's end of the way to a neighbour. Both ends begin their transfers in the same order.

    Args:
        endpoint: this node's.
        name: of the mesh, unique in the store.
        peer: the neighbour.
        life: tells this edge from earlier ones between the two; the same at both ends.
        timeout: seconds that connecting may take.
        meanwhile: see `Endpoint.lane`.

    Raises:
        IslandLostError: the neighbour did not connect in time.
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
        """The next transfers on this edge, which both ends begin: to be filled by `receive` and `send`."""
        self._tag += 1
        return Transfers()

    def receive(self, tensor: torch.Tensor, transfers: Transfers, with_checksum: bool = True) -> None:
        """Starts receiving; `tensor` is whole once the transfers have been waited for.

        Raises:
            IslandLostError: the connection has broken.
        """
        self._links.receive(tensor, self._other_end, self._tag, transfers, with_checksum)

    def send(self, tensor: torch.Tensor, transfers: Transfers, with_checksum: bool = True) -> None:
        """Starts sending; `tensor` stays as it is until the transfers have been waited for.

        Raises:
            IslandLostError: the connection has broken.
        """
        self._links.send(tensor, self._other_end, self._tag, transfers, with_checksum)

    def wait(self, transfers: Transfers, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Traffic:
        """As `Connections.wait`; also where something came damaged the neighbour is lost, until it connects again."""
        traffic = self._links.wait(transfers, deadline, meanwhile)
        self._refuse_damaged(transfers)
        return traffic

    def wait_for_ever(self, transfers: Transfers) -> None:
        """As `wait`, until they have come or `wake` is called; looks at nothing, which would leave a receive behind.

        Raises:
            RuntimeError: the connection has broken.
            IslandLostError: something came damaged.
        """
        for work in transfers.works:
            work.handle.wait(_FOREVER)
        transfers.check()
        self._refuse_damaged(transfers)
        transfers.drop()

    def wake(self) -> None:
        """Ends all waits at this end, if it is not closed yet: whoever waits finds the connection broken."""
        with suppress(ExchangeError):
            self._links.wake()

    def _refuse_damaged(self, transfers: Transfers) -> None:
        if transfers.damaged:
            why = damage(self._links.is_sealed)
            raise IslandLostError(f"what node {self.peer} sent came damaged ({why})", [self.peer])

    def check(self) -> None:
        """Raises `IslandLostError` if the connection has broken, while nothing is transferred."""
        if self._links.find_broken():
            raise IslandLostError(f"node {self.peer} went away", [self.peer])

    def close(self) -> None:
        """Closes the sockets at once, which wakes the neighbour; may be called more than once."""
        self._links.close()


def edge_life(starts: Mapping[int, int]) -> str:
    """What tells an edge from earlier ones: how often each of its two nodes was started."""
    return ".".join(str(starts[node]) for node in sorted(starts))


def connect_edges(
    endpoint: Endpoint,
    name: str,
    lives: Mapping[int, str],
    timeout: float,
    meanwhile: Callable[[int], None] | None = None,
) -> tuple[dict[int, Edge], list[int]]:
    """Connects to several neighbours at the same time, as each takes many round trips.

    Args:
        endpoint: this node's.
        name: of the mesh, unique in the store.
        lives: of the edge to each neighbour; see `Edge`, as for the other arguments.
        timeout: seconds that connecting may take.
        meanwhile: see `Endpoint.lane`; is given the neighbour.

    Returns:
        The edges, by neighbour, and the neighbours that did not connect.

    Raises:
        IslandLostError: this node cannot listen, for which no neighbour is to blame.
        ForgedError: who answered for a neighbour does not hold the key.
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
            edge.close()  # or those neighbours would wait for this node, which ends
        raise failures[0]
    return edges, [peer for peer in lives if peer not in edges]
