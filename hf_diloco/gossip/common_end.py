"""When nodes end that were asked to: all after the same step, so that their checkpoints belong together.

Nodes that wait for their neighbours are never farther apart than the graph's diameter, but each hears of a wish at
another step. So with each exchange goes one value, which is 0 until somebody wishes to end. It is raised only at the
first step of a window, which has as many steps as there are nodes; averaging carries it to all nodes within the
window; and all end with it.
"""

from __future__ import annotations

import torch

from hf_diloco.methods.topology import Topology


class CommonEnd:
    """One node's part of the agreement.

    Args:
        topology: over which the wish spreads.
    """

    def __init__(self, topology: Topology) -> None:
        # Of random matchings nothing is certain: after these steps a wish has missed a node once in many thousand.
        self.window = topology.num_nodes if topology.period is not None else 4 * topology.num_nodes + 16
        self._is_wished = False
        self._is_known = False

    def begin(self) -> None:
        """A training begins: what ended the one before is over."""
        self._is_wished = self._is_known = False

    def wish(self) -> None:
        """This node was asked to end."""
        self._is_wished = True

    def value(self, step: int) -> float:
        """What goes with the exchange of a step, from 0: 1 if the end is near, else 0."""
        if self._is_wished and step % self.window == 0:
            self._is_known = True
        return float(self._is_known)

    def note(self, mixed: torch.Tensor) -> None:
        """What came out where nodes' values were averaged: any of them raises it above 0."""
        self._is_known |= bool(mixed.item() > 0)

    def has_come(self, num_steps: int) -> bool:
        """Whether all nodes end now, having taken so many steps."""
        return self._is_known and num_steps % self.window == 0
