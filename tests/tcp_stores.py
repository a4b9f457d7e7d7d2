"""The store of fixed membership and of nodes, at a port of this machine, as its clients and as strangers see it."""

from __future__ import annotations

import weakref
from typing import Any

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.store.credentials import Credentials
from hf_diloco.store.log import RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import GONE_SECONDS, StoreHost, url_of
from hf_diloco.store.signing import Seal
from hf_diloco.store.tcp_store import Rendezvous, meet
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import LONG
from tests.processes import find_free_port

LOCALHOST = "127.0.0.1"


class Port:
    """Where a run may meet."""

    def __init__(self, host: str = LOCALHOST) -> None:
        self.port = find_free_port()
        self.url = f"tcp://{host}:{self.port}"

    def config(self, **settings: Any) -> DiLoCoConfig:
        return DiLoCoConfig(**{"num_islands": 2, "rendezvous": self.url, "join_timeout": LONG, **settings})

    def enter(self, island: int, credentials: Credentials) -> Rendezvous:
        """Island 0 keeps the store for as long as somebody of this process has what this returns to it."""
        return meet(
            self.config(), credentials, island == 0, f"island {island}", {"num_islands": 2}, LONG, WaitNotes(island)
        )

    @property
    def bare(self) -> ObjectStore:
        """What a stranger has who reaches the port."""
        return ObjectStore(url_of(self.url))


class KeptStore(Port):
    """One without a key, which this process keeps as long as it has this."""

    def __init__(self, host: str = LOCALHOST) -> None:
        super().__init__(host)
        weakref.finalize(self, StoreHost(self.config()).close)

    def client(self) -> ValueStore:
        """As another process has."""
        return reach(self.port)


def reach(port: int, host: str = LOCALHOST) -> ValueStore:
    """A client of a `KeptStore`."""
    store = ObjectStore(f"http://{host}:{port}/run", gone_after=GONE_SECONDS)
    return ValueStore(RunLog(store, Seal(b"", "test")))


def below(log: RunLog, name: str) -> RunLog:
    """Another log of the same run, for what lies below a path."""
    return RunLog(ObjectStore(f"{log.store.url}/{name}", gone_after=GONE_SECONDS), log.seal)


def await_value(store: ValueStore, key: str) -> bytes:
    """The value of a key, once it is there."""
    return store.wait([key], LONG)[key]
