"""All nodes of a run as threads of one process: for studies on one GPU or CPU."""

from __future__ import annotations

from hf_diloco.apps.common.simulation import LONGEST_WAIT, train_together
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import train_node
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.threads import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.gossip_start import check_gossip


def simulate_nodes(run: VisionRun, num_nodes: int, is_command: bool = False) -> int:
    """Trains all nodes; for what it returns and raises see `train_together`."""
    place = {"num_nodes": num_nodes, "rendezvous": None}
    gossips = [run.gossip.model_copy(update={"node": node, **place}) for node in range(num_nodes)]
    runs = [run.model_copy(update={"gossip": gossip}) for gossip in gossips]
    topology, turns = check_gossip(gossips[0]), Turns()
    graph = MemoryGraph(topology, timeout=LONGEST_WAIT)
    ends = [with_payload(graph.node(number), run.gossip.payload) for number in range(num_nodes)]
    nodes = [NodeNeighbours(end, topology, number, IslandGroup(), turns) for number, end in enumerate(ends)]
    return train_together(
        runs,
        turns,
        train=lambda number: train_node(runs[number], gossips[number], nodes[number]),
        leave=lambda number: nodes[number].close(),
        is_command=is_command,
    )
