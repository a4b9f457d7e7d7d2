"""Temporarily replaces the model's weights, to evaluate or save the outer parameters or the mean over all nodes.

Outer parameters are better than any one island's own weights (loss 2.67 against 2.77 in table 3 of arXiv 2501.18512).
Training then continues exactly as without the replacement.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_diloco.errors import ConfigError, IslandLostError
from hf_diloco.gossip.averages import mean_of_holders
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.session import BaseSession

if TYPE_CHECKING:
    from hf_diloco.gossip.node import NodeNeighbours
    from hf_diloco.methods.gossip import GossipOptimizer

logger = logging.getLogger("hf_diloco")


class HasOuterWeights(ABC):
    """Base of training with an outer loop, by a Trainer or a hand-written loop."""

    NOT_BEGUN: ClassVar[str]
    """The error for a call before training has begun."""

    def __init__(self) -> None:
        self._session: BaseSession | None = None
        self._shows_outer = False

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self._session.outer.round if self._session else 0

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Puts the outer parameters into the model inside the block, then restores its weights bit for bit.

            with callback.outer_weights():
                trainer.save_model("outer")

        Call it on all ranks of the island, between steps. The saved weights take 4 bytes of host memory per parameter.

        Raises:
            ConfigError: training has not begun: there are no outer parameters yet.
        """
        outer = self._need_session().outer
        self._drain()
        held = None if outer.on_boundary else outer.show()
        was_shown, self._shows_outer = self._shows_outer, True
        try:
            yield
        except Exception:
            if held is not None and outer.island.size > 1:
                # The other ranks may be anywhere, and wait for this rank until their timeout.
                logger.exception(
                    "error on rank %d within outer_weights(), whose end waits for all ranks", outer.island.rank
                )
            raise
        finally:
            self._shows_outer = was_shown
            if held is not None:
                outer.hide(held)

    def _drain(self) -> None:
        """Waits for the rounds in flight, and records them."""
        for report in self._need_session().drain():
            self._note(report)

    @abstractmethod
    def _note(self, report: SyncReport) -> None:
        """Records a completed round."""

    def _need_session(self) -> BaseSession:
        """Returns the session, once training has joined it: `common_checkpoint` opens it before."""
        if self._session is None or not self._session.outer.fragments:
            raise ConfigError(self.NOT_BEGUN)
        return self._session


class MeanView:
    """Shows the mean over all nodes in one node's model. `shown` is collective over the nodes and their ranks.

    Inside `shown`, the node's own weights take 4 bytes per parameter.

    Args:
        model: whose buffers are replaced with the parameters.
        averages_buffers: whether batch normalisation statistics are averaged, too; otherwise they stay the node's own.
        lacks_statistics: whether the node has rejoined, and its own statistics are outdated or missing: it then takes
            over those of the first mean.

    Attributes:
        consensus_distance: at the last `shown`, √(mean_i ‖x_i - x̄‖²) / ‖x̄‖; None before the first.
        is_on: whether the model holds the mean.
        has_failed: whether the present `shown` could form no mean.
        nodes: the nodes in the last mean; only this node if no mean could be formed.
    """

    def __init__(
        self,
        optimizer: GossipOptimizer,
        node: NodeNeighbours,
        model: torch.nn.Module,
        averages_buffers: bool,
        lacks_statistics: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._node = node
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if averages_buffers else []
        self._lacks_statistics = lacks_statistics
        self.consensus_distance: float | None = None
        self.is_on = self.has_failed = False
        self.nodes = node.averaged_over

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Puts the mean into the model inside the block, then restores its weights bit for bit.

        If nodes are lost and no mean can be formed, logs a warning, and the model keeps the node's own parameters.
        """
        with ExitStack() as stack:
            try:
                distance = stack.enter_context(self._optimizer.averaged_weights())
                stack.enter_context(self._averaged_buffers())
                squares = torch.tensor([distance])
                self._node.average(squares)
                self.consensus_distance = float(squares.sqrt())
                self.is_on, self.nodes = True, self._node.averaged_over
            except IslandLostError as error:
                stack.close()
                self.nodes, self.has_failed = (self._node.node,), True
                logger.warning("no mean over the nodes (%s): this node's own weights take its place", error)
            try:
                yield
            finally:
                self.is_on = self.has_failed = False

    @contextmanager
    def _averaged_buffers(self) -> Iterator[None]:
        """Puts the mean of the buffers into the model inside the block, leaving out nodes with non-finite statistics.

        One bad batch makes statistics non-finite for good.
        """
        if not self._buffers:
            yield
            return
        own = torch.cat([buffer.flatten().float() for buffer in self._buffers])
        is_holder = not self._lacks_statistics and bool(own.isfinite().all())
        means, _ = mean_of_holders(self._node, [own], is_holder)
        if means is not None:
            self._write_buffers(means[0])
            own = means[0] if self._lacks_statistics else own
        self._lacks_statistics = False
        try:
            yield
        finally:
            self._write_buffers(own)

    def _write_buffers(self, values: torch.Tensor) -> None:
        sizes = [buffer.numel() for buffer in self._buffers]
        for buffer, part in zip(self._buffers, values.split(sizes), strict=True):
            buffer.copy_(part.view_as(buffer))
