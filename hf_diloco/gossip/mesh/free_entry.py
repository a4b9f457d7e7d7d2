"""How a node comes back where each steps at its own pace: its own side. `returning` has its neighbours'."""

from __future__ import annotations

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.exchange.connections import Deadline
from hf_diloco.gossip.mesh.average import lost_key
from hf_diloco.gossip.mesh.entry import Entry


class FreeEntry(Entry):
    """Takes what each neighbour gives at the beginning of its own next step, from one after the other.

    `timeout` is how long a neighbour may take to get there. Who waits is this node: a neighbour sends when it has been
    asked, and is asked when this node is ready to receive.
    """

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the mean of what neighbours gave; returns the largest of their steps.

        With a smaller one this node would come to averages over all nodes that they have already had.
        """
        total, received = torch.zeros_like(x), torch.empty_like(x)
        steps: list[int] = []
        for peer in sorted(self._edges):
            try:
                steps.append(self._receive(peer, received))
            except IslandLostError:
                self._drop(peer, "it did not give its parameters")
                continue
            total.add_(received)
        self._check_company()
        torch.mul(total, 1.0 / len(steps), out=x)
        self._board.remove(lost_key(self._node))
        return max(steps)

    def _receive(self, peer: int, x: torch.Tensor) -> int:
        """A neighbour's parameters, and the step that they are of."""
        edge, step = self._edges[peer], torch.empty(1, dtype=torch.int64)
        transfers = edge.begin()
        edge.receive(step, transfers)
        edge.receive(x, transfers)
        self._board.put(self._key(f"asks/{peer}"), {})
        edge.wait(transfers, Deadline(self._timeout))
        return int(step)
