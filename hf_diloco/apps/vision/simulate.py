"""All nodes of a run as threads of one process, with the numbers of several: for studies on one GPU or CPU."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from hf_diloco.apps.common.process import STOPPED
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import train_node
from hf_diloco.errors import DiLoCoError
from hf_diloco.gossip.choco import with_payload
from hf_diloco.gossip.neighbours import MemoryGraph
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.gossip.simulation_scheduler import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.trainer.gossip_check import check_gossip
from hf_diloco.trainer.progress import STOP_FILE

_LONGEST_WAIT = 7 * 24 * 3600.0  # seconds; one node computes at a time, and the others wait for it


class Simulation:
    """The nodes of a run in one process, one of which computes at a time.

    Args:
        run: the run file.
        num_nodes: how many.
    """

    def __init__(self, run: VisionRun, num_nodes: int) -> None:
        self._runs = [
            run.model_copy(
                update={
                    "gossip": run.gossip.model_copy(update={"node": node, "num_nodes": num_nodes, "rendezvous": None})
                }
            )
            for node in range(num_nodes)
        ]
        config = self._runs[0].gossip
        topology = check_gossip(config)
        graph, turns = MemoryGraph(topology, timeout=_LONGEST_WAIT), Turns()
        self._turns = turns
        ends = [with_payload(graph.node(number), config.payload) for number in range(num_nodes)]
        self._nodes = [NodeNeighbours(end, topology, number, IslandGroup(), turns) for number, end in enumerate(ends)]
        self._codes: dict[int, int] = {}
        self._errors: list[BaseException] = []

    def run(self) -> int:
        """Trains; returns the exit code.

        Raises:
            DiLoCoError: the first that a node met.
        """
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        threads = [threading.Thread(target=self._train, args=(number,)) for number in range(len(self._nodes))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._errors:
            raise self._errors[0]
        return STOPPED if STOPPED in self._codes.values() else 0

    def _train(self, number: int) -> None:
        run, node = self._runs[number], self._nodes[number]
        try:
            with self._turns.mine():
                self._codes[number] = train_node(run, run.gossip, node)
        except BaseException as error:
            # What the others meet next is that this one is gone.
            if not self._errors or isinstance(error, DiLoCoError) < isinstance(self._errors[0], DiLoCoError):
                self._errors.append(error)
            node.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for run in self._runs:
            folder = run.island_folder()
            if folder.is_dir():
                (folder / STOP_FILE).touch()
