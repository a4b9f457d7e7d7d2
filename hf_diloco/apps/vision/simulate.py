"""All nodes of a run as threads of one process: for studies on one GPU or CPU."""

from __future__ import annotations

from hf_diloco.apps.common.simulation import LONGEST_WAIT, Simulation
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import train_node
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.gossip_start import check_gossip


class NodeSimulation(Simulation[VisionRun]):
    """The nodes of a run."""

    def __init__(self, run: VisionRun, num_nodes: int) -> None:
        place = {"num_nodes": num_nodes, "rendezvous": None}
        gossips = [run.gossip.model_copy(update={"node": node, **place}) for node in range(num_nodes)]
        super().__init__([run.model_copy(update={"gossip": gossip}) for gossip in gossips])
        topology = check_gossip(gossips[0])
        graph = MemoryGraph(topology, timeout=LONGEST_WAIT)
        ends = [with_payload(graph.node(number), run.gossip.payload) for number in range(num_nodes)]
        self._nodes = [
            NodeNeighbours(end, topology, number, IslandGroup(), self._turns) for number, end in enumerate(ends)
        ]

    def _train(self, number: int) -> int:
        run = self._runs[number]
        return train_node(run, run.gossip, self._nodes[number])

    def _leave(self, number: int) -> None:
        self._nodes[number].close()
