"""Connects a node with the other nodes of its graph."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hf_diloco.config.advice import tell_who_is_alone
from hf_diloco.config.base import need_number
from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.mesh import MeshNeighbours
from hf_diloco.gossip.neighbours import MemoryGraph, Neighbours
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.heartbeats import Members, MemberStatus
from hf_diloco.membership.run import announce_run
from hf_diloco.methods.topology import Topology
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.rendezvous import await_training, check_own_address, warn_if_exposed
from hf_diloco.store.signing import Seal
from hf_diloco.store.tcp_store import has_other_run, is_still_there, meet
from hf_diloco.transport.base import RateLimit
from hf_diloco.utils.waiting import WaitNotes

SILENT_SECONDS = 30.0
"""Seconds without an answer after which the store counts as lost. It answers within a round trip, but its process may
stall for seconds; if the process ends, nodes notice at once."""


@dataclass
class _Last:
    """A thread's last training as a node at a rendezvous.

    Attributes:
        ending: closes its connections.
        start: how often the node had been started in that run, this time included; 0 before it has met the others.
        seal: of the run.
        has_failed: whether an error ended its training; the others may go on.
    """

    thread: int
    ending: ExitStack
    start: int = 0
    standing: MemberStatus = field(default_factory=MemberStatus)
    seal: Seal | None = None
    has_failed: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its run has ended, on all nodes: also if this node failed before it began, as all then do."""
        if self.has_failed:
            return False
        phase = self.standing.phase
        return phase in ("finished", "left") or (phase == "joining" and self.start == 1)


_last: dict[tuple[str | None, int], _Last] = {}
"""By rendezvous and node."""


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
        mine = _Last(threading.get_ident(), ending)
        before = _leave_last(config, mine) if config.num_nodes > 1 else None
        found, members = _connect_after(before, config, topology, ending)
        if members:
            mine.start, mine.standing, mine.seal = members.incarnation, members.standing, members.log.seal
        inner = with_payload(found, config.payload)

    island.on_leader(connect)
    node = NodeNeighbours(inner, topology, config.node, island, members=members)
    ending.callback(_close, weakref.ref(node))
    return node


def _leave_last(config: GossipConfig, mine: _Last) -> _Last | None:
    """Closes the connections of this thread's last training as the same node, which may have ended in an error."""
    place = config.rendezvous, config.node
    last, _last[place] = _last.get(place), mine
    if last is None or last.thread != mine.thread:
        return None
    last.has_failed = not last.has_ended  # before closing, which says "left" also after an error
    last.ending.close()
    return last


def leave_after_error(config: GossipConfig, node: NodeNeighbours) -> None:
    """Disconnects a node whose training ended in an error: the others go on without it. Node 0 keeps the store."""
    if (last := _last.get((config.rendezvous, config.node))) is not None:
        last.has_failed = True
    node.close()


def _close(connected: weakref.ref[NodeNeighbours] | weakref.ref[MeshNeighbours]) -> None:
    if (last := connected()) is not None:
        last.close()


def _connect_after(
    before: _Last | None, config: GossipConfig, topology: Topology, ending: ExitStack
) -> tuple[Neighbours, Members | None]:
    """Connects this node, after its last training there. Node 0 may still keep the store of that run.

    If only this node's training failed, it returns to that run. If the training of node 0 failed too, node 0 ends the
    run when it begins another one, which this node then joins.
    """
    tell_who_is_alone(config, "node")
    check_own_address(config.bind_address)
    seal = before.seal if before and config.node != 0 else None
    if before is None or seal is None:
        return _connect(config, topology, ending)
    if before.has_failed:
        try:
            return _connect(config, topology, ending)
        except IslandLostError:
            if is_still_there(config, seal):
                raise
    await_training(config, partial(has_other_run, config, seal), WaitNotes(config.node, "node"))
    return _connect(config, topology, ending)


def _connect(config: GossipConfig, topology: Topology, ending: ExitStack) -> tuple[Neighbours, Members | None]:
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
    ending.callback(_close, weakref.ref(mesh))  # its threads may outlive the node's other objects
    return mesh, members
