"""How a node comes back while the others go on: its own side. `returning` has its neighbours', and what is said.

Here all take their steps together; `free_entry` is for nodes that do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.exchange.connections import Deadline
from hf_diloco.gossip.mesh.average import lost_key
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.returning import LOOK_SECONDS, decide, entry_key, greeting_key
from hf_diloco.gossip.mesh.store import POLL_SECONDS, Board

MAX_ROUNDS = 12
"""The margin doubles with each: where steps take no longer than asking, many are passed until all have answered."""


def await_greetings(board: Board, node: int, start: int, peers: list[int], patience: float) -> list[int]:
    """The neighbours that have seen that this node is back: all, but for those that themselves are lost.

    Args:
        board: the mesh's.
        node: this node.
        start: which of its starts this is.
        peers: its neighbours.
        patience: seconds to wait for them.
    """
    begun = time.monotonic()
    greeted: set[int] = set()
    while True:
        greeted.update(peer for peer in peers if peer not in greeted and board.has(greeting_key(node, start, peer)))
        absent = [peer for peer in peers if peer not in greeted]
        waited = time.monotonic() - begun
        may_end = waited > 4 * LOOK_SECONDS and greeted and all(board.has(lost_key(peer)) for peer in absent)
        if not absent or waited > patience or may_end:
            return sorted(greeted)
        time.sleep(POLL_SECONDS)


class Entry:
    """Agrees with the neighbours on a step, and takes their mean.

    Args:
        board: the mesh's.
        node: this node.
        start: which of its starts this is.
        edges: to the neighbours that are there; whoever goes is taken out.
        timeout: seconds that a step of the neighbours may take.
        lose: is told whom the node has lost, and why.
    """

    def __init__(
        self,
        board: Board,
        node: int,
        start: int,
        edges: dict[int, Edge],
        timeout: float,
        lose: Callable[[int, str], None],
    ) -> None:
        self._board = board
        self._node = node
        self._start = start
        self._edges = edges
        self._timeout = timeout
        self._lose = lose

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the neighbours' mean at the step that is returned."""
        step = self._agree()
        total: torch.Tensor | None = None
        num_given = 0
        buffer = torch.empty_like(x)
        deadline = Deadline((MAX_ROUNDS + 1) * self._timeout)  # they have steps to take before
        for peer, edge in sorted(self._edges.items()):
            try:
                transfers = edge.begin()
                edge.receive(buffer, transfers)
                edge.wait(transfers, deadline)
            except IslandLostError:
                self._drop(peer, "its connection broke")
                continue
            total = x.copy_(buffer) if total is None else total.add_(buffer)
            num_given += 1
        self._check_company()
        x.mul_(1.0 / num_given)
        self._board.remove(lost_key(self._node))
        self._board.count("returned", 1)  # before any neighbour goes on: the next average is with this node
        for peer, edge in sorted(self._edges.items()):
            try:
                transfers = edge.begin()
                edge.send(torch.ones(1, dtype=torch.uint8), transfers)
                edge.wait(transfers, Deadline(self._timeout))
            except IslandLostError:
                self._drop(peer, "its connection broke")
        self._check_company()
        return step

    def _agree(self) -> int:
        """The step at which all neighbours will give their parameters."""
        margin = 2
        for number in range(1, MAX_ROUNDS + 1):
            steps = self._ask({peer: f"at/{peer}" for peer in self._edges}, "step")
            step = max(steps.values()) + margin
            self._board.put(self._key("proposal"), {"round": number, "step": step})
            answers = self._ask({peer: f"{number}/{peer}" for peer in self._edges}, "is_to_come")
            if decide(self._board, self._key(f"{number}/decision"), self._node, is_on=all(answers.values())):
                return step
            margin *= 2
        raise IslandLostError(
            f"node {self._node} could not agree with its neighbours on a step at which to return: start it again"
        )

    def _ask(self, keys: dict[int, str], field: str) -> dict[int, int]:
        """What neighbours say, as soon as all have; who does not within two exchanges' time is lost."""
        missing = self._board.await_all({peer: self._key(key) for peer, key in keys.items()}, 2 * self._timeout)
        for peer in list(missing):
            self._drop(peer, f"it did not answer within {2 * self._timeout:g} s")
        self._check_company()
        records = {peer: self._board.read(self._key(keys[peer]), peer) or {} for peer in self._edges}
        return {peer: int(record[field]) for peer, record in records.items()}

    def _drop(self, peer: int, reason: str) -> None:
        self._edges.pop(peer).close()
        self._lose(peer, reason)

    def _check_company(self) -> None:
        if not self._edges:
            raise IslandLostError(
                f"node {self._node} could not return, as none of its neighbours is there. Start all nodes again from "
                "their checkpoints"
            )

    def _key(self, what: str) -> str:
        return entry_key(self._node, self._start, what)
