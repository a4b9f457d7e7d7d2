"""Which pseudo-gradients count: those of no use, and those far longer than is usual, are left out of a round."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from hf_diloco.membership.round_records import OfferRecord

_HISTORY_ROUNDS = 16
_MIN_HISTORY_ROUNDS = 5


class UsualNorms:
    """The norms of the last rounds.

    Args:
        num_fragments: that rounds are of in turn; each has usual norms of its own.
        factor: a norm so many times the usual one does not count; None: it always does.
    """

    def __init__(self, num_fragments: int, factor: float | None) -> None:
        self._factor = factor
        self._norms = [deque[float](maxlen=_HISTORY_ROUNDS) for _ in range(num_fragments)]

    def remember(self, round_number: int, norms: Sequence[float]) -> None:
        """Takes those of a round that took place as usual ones."""
        self._norms[round_number % len(self._norms)].append(statistics.median(norms))

    def why_not(self, round_number: int, offer: OfferRecord, smallest: float) -> str:
        """Why an offer does not count; "" if it does.

        Args:
            round_number: of the round that it is for.
            offer: of one island.
            smallest: norm of all that are offered. Where all have become long at once, it is the training that
                changed, and nobody is an outlier.
        """
        if offer.norm is None:
            return "not finite"
        if offer.weight == 0:
            return "no examples behind it"
        norms = self._norms[round_number % len(self._norms)]
        if self._factor and len(norms) >= _MIN_HISTORY_ROUNDS:
            usual = max(statistics.median(norms), smallest)
            if offer.norm > self._factor * usual:
                return (
                    f"its norm {offer.norm:.4g} is more than {self._factor:g} times the usual {usual:.4g} "
                    "(outlier_factor)"
                )
        return ""
