"""The mean over all nodes in the model for a while: to evaluate or save it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.methods.gossip import GossipOptimizer

logger = logging.getLogger("hf_diloco")


class MeanView:
    """One node's switch. Switching on is collective over the nodes, and over the ranks of each.

    While it is on, 4 bytes a parameter hold the node's own.

    Args:
        optimizer: the node's.
        node: its neighbours.
        model: whose buffers go with the parameters.
        averages_buffers: statistics of batch normalisation are averaged as well; else they stay the node's own.

    Attributes:
        consensus_distance: of the last time, √(mean_i ‖x_i - x̄‖²) / ‖x̄‖; None before.
        is_on: whether the model holds the mean.
    """

    def __init__(
        self, optimizer: GossipOptimizer, node: NodeNeighbours, model: torch.nn.Module, averages_buffers: bool
    ) -> None:
        self._optimizer = optimizer
        self._node = node
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if averages_buffers else []
        self.consensus_distance: float | None = None
        self.is_on = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model holds the mean; then what it held before, to the last bit.

        Where nodes are lost and no mean can be formed, the model keeps the node's own parameters, with a warning.
        """
        with ExitStack() as stack:
            try:
                distance = stack.enter_context(self._optimizer.averaged_weights())
                stack.enter_context(self._averaged_buffers())
                self._note_distance(distance)
                self.is_on = True
            except IslandLostError as error:
                stack.close()
                logger.warning("no mean over the nodes (%s): this node's own weights take its place", error)
            try:
                yield
            finally:
                self.is_on = False

    def _note_distance(self, own: float) -> None:
        squares = torch.tensor([own])
        self._node.average(squares)
        self.consensus_distance = float(squares.sqrt())

    @contextmanager
    def _averaged_buffers(self) -> Iterator[None]:
        if not self._buffers:
            yield
            return
        own = torch.cat([buffer.flatten().float() for buffer in self._buffers])
        mean = own.clone()
        self._node.average(mean)
        self._write_buffers(mean)
        try:
            yield
        finally:
            self._write_buffers(own)

    def _write_buffers(self, values: torch.Tensor) -> None:
        sizes = [buffer.numel() for buffer in self._buffers]
        for buffer, part in zip(self._buffers, values.split(sizes), strict=True):
            buffer.copy_(part.view_as(buffer))
