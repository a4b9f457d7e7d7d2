"""The outer parameters in the model for a while: to evaluate or save them between rounds.

They are better than any one island's own weights (2.67 against 2.77 in table 3 of arXiv 2501.18512), and training must
go on afterwards as if nothing had happened.
"""

from __future__ import annotations

import torch

from hf_diloco.outer import OuterState


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
