"""Nodes of a graph as threads that are connected by sockets of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.topology import Topology
from hf_diloco.store.values import ValueStore
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes
from tests.clocks import LONG
from tests.islands import run_islands
from tests.tcp_stores import KeptStore, below

LOCALHOST = "127.0.0.1"


class Closable(Protocol):
    def close(self) -> None: ...


N = TypeVar("N", bound=Closable)
T = TypeVar("T")


def join(
    store: KeptStore, topology: Topology, node: int, *, notes: WaitNotes | None = None, **settings: Any
) -> MeshNeighbours:
    """The notes bring the clock."""
    notes = notes or WaitNotes(node, "node")
    timeouts = {"connect_timeout": LONG, "exchange_timeout": LONG}
    client = store.client()
    members = settings.pop("members", None) or members_of(
        client, node, settings.get("name", "gossip"), clock=notes.clock
    )
    return MeshNeighbours(client, topology, node, LOCALHOST, members, notes=notes, **{**timeouts, **settings})


def members_of(store: ValueStore, node: int, name: str = "gossip", clock: Clock = REAL) -> Members:
    """This node and the others of a mesh; it soon takes the number over of a thread that had it before."""
    return Members(below(store.log, name), node, lease=0.3, clock=clock, unit="node")


def talk_together(num_nodes: int, enter: Callable[[int], N], talk: Callable[[int, N], T]) -> list[T]:
    """What `talk` returns at each node; none leaves what it entered before all have ended."""
    ended = threading.Barrier(num_nodes)

    def run(node: int) -> T:
        entered = enter(node)
        try:
            result = talk(node, entered)
            ended.wait(LONG)
            return result
        except BaseException:
            ended.abort()
            raise
        finally:
            entered.close()

    return run_islands(num_nodes, run)
