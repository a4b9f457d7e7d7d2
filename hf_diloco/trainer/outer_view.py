"""The outer parameters in the model for a while: to evaluate or save them between rounds.

They are better than any one island's own weights (2.67 against 2.77 in table 3 of arXiv 2501.18512), and training must
go on afterwards as if nothing had happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from hf_diloco.errors import ConfigError
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.measure import SyncReport
from hf_diloco.rounds.session import BaseSession


class OuterView:
    """One rank's switch. Both ways are collective over the island's ranks.

    While it is on, 4 bytes a parameter of host memory hold the weights that training goes on from.

    Args:
        outer: this rank's outer state; no round may be under way while the view is on.
    """

    def __init__(self, outer: OuterState) -> None:
        self._outer = outer
        self._held: list[torch.Tensor] | None = None
        self._num_uses = 0

    @property
    def is_on(self) -> bool:
        """Whether the model holds the outer parameters because of this."""
        return self._held is not None

    def begin(self, num_uses: int = 1) -> None:
        """Has the model hold the outer parameters until `end` was called `num_uses` times."""
        if self._held is None and not self._outer.on_boundary:
            self._held = self._outer.show()
        self._num_uses = num_uses

    def end(self) -> None:
        """Ends one use; after the last, the model holds what it held before, to the last bit."""
        self._num_uses -= 1
        if self._held is not None and self._num_uses <= 0:
            self._outer.hide(self._held)
            self._held = None


class HasOuterWeights(ABC):
    """What trains with an outer loop, by a Trainer or by hand."""

    NOT_BEGUN: ClassVar[str]
    """The error for a call before training has begun."""

    def __init__(self) -> None:
        self._session: BaseSession | None = None
        self._shown: OuterView | None = None

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self._session.outer.round if self._session else 0

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """The model holds the outer parameters meanwhile; then training goes on as it was, to the last bit.

            with callback.outer_weights():
                trainer.save_model("outer")

        Call it on all ranks of the island, between steps.

        Raises:
            ConfigError: training has not begun: there are no outer parameters yet.
        """
        for report in self._need_session().settle():
            self._note(report)
        self._shown = view = OuterView(self._need_session().outer)
        view.begin()
        try:
            yield
        finally:
            view.end()

    @abstractmethod
    def _note(self, report: SyncReport) -> None:
        """A round has ended."""

    def _need_session(self) -> BaseSession:
        if self._session is None:
            raise ConfigError(self.NOT_BEGUN)
        return self._session
