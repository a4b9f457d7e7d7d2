"""How islands reach each other: a shared store for small records, and an `Exchange` for every lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.rendezvous import warn_if_exposed
from hf_diloco.store.tcp_store import meet
from hf_diloco.store.values import ValueStore
from hf_diloco.transport.base import Exchange, Lane, RateLimit
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.mesh import MeshExchange
from hf_diloco.utils.waiting import WaitNotes

SILENT_SECONDS = 60.0
"""Seconds without an answer after which the store counts as lost: a machine that has stopped closes no connection."""


class Transport(ABC):
    """One rank's access to the other islands, and to the small values by key that they share (`store`)."""

    store: ValueStore

    def end(self) -> None:  # noqa: B027 - in memory nothing is kept open
        """Ends the access; if this process hosts the store, its port is free afterwards."""

    @abstractmethod
    def open(self, lane: int) -> Exchange:
        """Connects the owners of `lane`. Every island's owner must call it; a rank opens its lanes in order."""


class MemoryTransport(Transport):
    """Islands that are threads of this process. All share one `network` and one `store`."""

    def __init__(self, network: MemoryNetwork, store: ValueStore, island: int) -> None:
        self.store = store
        self._network = network
        self._island = island

    def open(self, lane: int) -> Exchange:
        return self._network.lane(f"lane{lane}", self._island)


class MeshTransport(Transport):
    """Direct connections, established through a store that island 0's leader hosts.

    Raises `RendezvousError` if the rendezvous cannot be opened or reached, or the run there has another key, and
    `StopRequested` if `should_stop` returns true while this waits for island 0.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        is_leader: bool,
        num_ranks: int = 1,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._notes = WaitNotes(config.island)
        self._rate_limit = RateLimit(config.bytes_per_second(num_ranks))
        credentials = find_credentials(config, config.island)
        self.store, self._key, self._address, self._end = meet(
            config,
            credentials,
            is_host=is_leader and config.island == 0,
            who=f"island {config.island}",
            size={"num_islands": config.num_islands},
            silent_for=SILENT_SECONDS,
            notes=self._notes,
            should_stop=should_stop,
        )
        if is_leader and not credentials.key:
            warn_if_exposed(self._address)

    def end(self) -> None:
        self._end()

    def open(self, lane: int) -> Exchange:
        config = self._config
        others = [island for island in range(config.num_islands) if island != config.island]
        wait = self._notes.begin(config.exchange_timeout, f"connecting from {self._address}")
        with wait.blocking(others):
            return MeshExchange(
                Lane(
                    store=self.store,
                    name=f"lane{lane}",
                    island=config.island,
                    num_islands=config.num_islands,
                    address=self._address,
                    timeout=config.exchange_timeout,
                    key=self._key,
                    num_connections=config.connections,
                    rate_limit=self._rate_limit,
                ),
                watch=partial(self._notes.watch, config.exchange_timeout, "exchange", others),
            )


def open_transport(
    config: DiLoCoConfig, is_leader: bool, num_ranks: int, should_stop: Callable[[], bool]
) -> Transport:
    """Returns the transport that the rendezvous requires; a single island needs none."""
    if config.num_islands == 1:
        return MemoryTransport(MemoryNetwork(1), ValueStore.in_memory(), 0)
    return MeshTransport(config, is_leader, num_ranks, should_stop)
