"""How a node comes back where each steps at its own pace: its own side. `returning` has its neighbours'."""

from __future__ import annotations

import torch

from hf_diloco.gossip.mesh.average import lost_key
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.entry import Entry
from hf_diloco.transport.transfers import Transfers


class FreeEntry(Entry):
    """Takes what each neighbour gives at the beginning of its own next step, from one after the other.

    `timeout` is how long a neighbour may take to get there. Who waits is this node: a neighbour sends when it has been
    asked, and is asked when this node is ready to receive.
    """

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the mean of what neighbours gave; returns the largest of their steps.

        With a smaller one this node would come to averages over all nodes that they have already had.
        """
        total, received, step = torch.zeros_like(x), torch.empty_like(x), torch.empty(1, dtype=torch.int64)
        steps: list[int] = []
        for peer in sorted(self._edges):

            def ask(edge: Edge, transfers: Transfers) -> None:
                edge.receive(step, transfers)
                edge.receive(received, transfers)
                self._board.put(self._key(f"asks/{edge.peer}"), {})

            if self._transfer(peer, ask):
                steps.append(int(step))
                total.add_(received)
        self._check_company()
        torch.mul(total, 1.0 / len(steps), out=x)
        self._board.remove(lost_key(self._node))
        return max(steps)
