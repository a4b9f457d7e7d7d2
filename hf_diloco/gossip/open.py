"""Connects a node with the other nodes of its graph."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from pathlib import Path

from hf_diloco.config.advice import tell_who_is_alone
from hf_diloco.config.base import need_number
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.neighbours import MemoryGraph, Neighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.run import announce_run
from hf_diloco.methods.topology import Topology
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.rendezvous import check_own_address, warn_if_exposed
from hf_diloco.store.tcp_store import meet
from hf_diloco.transport.base import RateLimit
from hf_diloco.utils.waiting import WaitNotes

SILENT_SECONDS = 30.0
"""Seconds without an answer after which the store counts as lost. It answers within a round trip, but its process may
stall for seconds; if the process ends, nodes notice at once."""


_last: dict[tuple[str | None, int], tuple[int, ExitStack]] = {}
"""By rendezvous and node: the thread that connected last, and the stack that closes its connections."""


def open_node(config: GossipConfig, topology: Topology, island: IslandGroup) -> NodeNeighbours:
    """Connects to the other nodes. Collective over the ranks of the node, `island`.

    Raises:
        ConfigError: there are several nodes, and this one has no number.
        RendezvousError: the rendezvous cannot be opened or reached.
        IslandLostError: neighbours did not connect within the timeout.
    """
    need_number(config, config.num_nodes, "node")
    inner: Neighbours | None = None
    members: Members | None = None
    ending = ExitStack()

    def connect() -> None:
        nonlocal inner, members
        if config.num_nodes > 1:
            _leave_last(config, ending)
        found, members = _connect(config, topology, ending)
        inner = with_payload(found, config.payload)

    island.on_leader(connect)
    node = NodeNeighbours(inner, topology, config.node, island, members=members)
    ending.callback(_close, weakref.ref(node))
    return node


def _leave_last(config: GossipConfig, ending: ExitStack) -> None:
    """Closes the connections of this thread's last training as the same node: it may have ended in an error."""
    place, thread = (config.rendezvous, config.node), threading.get_ident()
    last_thread, last = _last.get(place, (None, None))
    if last is not None and last_thread == thread:
        last.close()
    _last[place] = thread, ending


def _close(node: weakref.ref[NodeNeighbours]) -> None:
    if (last := node()) is not None:
        last.close()


def _connect(config: GossipConfig, topology: Topology, ending: ExitStack) -> tuple[Neighbours, Members | None]:
    tell_who_is_alone(config, "node")
    check_own_address(config.bind_address)
    if config.num_nodes == 1:
        return MemoryGraph(topology).node(0), None
    notes = WaitNotes(config.node, "node")
    credentials, is_host = find_credentials(config, config.node, "node"), config.node == 0
    size = {"num_nodes": config.num_nodes}
    store, key, address, end_store = meet(
        config, credentials, is_host, f"node {config.node}", size, SILENT_SECONDS, notes
    )
    ending.callback(end_store)  # which frees its port
    if not credentials.key:
        warn_if_exposed(address)
    if is_host:
        settings = config.model_dump(include={"method", "topology", "num_nodes", "payload"})
        announce_run(store.log, None, settings, unit="node")
    members = Members(store.log, config.node, str(Path.cwd()), unit="node")
    mesh = MeshNeighbours(
        store,
        topology,
        config.node,
        address,
        members,
        connect_timeout=config.join_timeout,
        exchange_timeout=config.exchange_timeout,
        rate_limit=RateLimit(config.bytes_per_second()),
        notes=notes,
        key=key,
    )
    return mesh, members
