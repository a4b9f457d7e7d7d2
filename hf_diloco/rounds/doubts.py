"""Who is wrong where islands compute different averages: once may be chance, and more often is a fault.

A round of which the averages differ is aborted and taken again, from the same pseudo-gradients: who then comes to
another average than before has computed at least one of them wrongly.
"""

from __future__ import annotations

import logging

from hf_diloco.membership.round_records import OutcomeRecord
from hf_diloco.rounds.round_plan import PlannedRound

logger = logging.getLogger("hf_diloco")

MAX_SPLITS = 3
"""Attempts of one round in which islands disagree, before all end that do not know who is wrong."""
_MAX_OUTVOTED = 2


class Doubts:
    """What one island knows of its own averages. Equal on all ranks, as what they are told is.

    Args:
        is_leader: this rank says what happens.
    """

    def __init__(self, is_leader: bool) -> None:
        self._level = logging.WARNING if is_leader else logging.DEBUG
        self._round = 0
        self._num_splits = 0
        self._is_outvoted = False
        self._num_outvoted = 0  # in a row, over rounds
        self._seen: dict[object, str] = {}

    def has(self, number: int) -> bool:
        """Whether round `number` was decided otherwise than this island would have, or not at all."""
        return self._round == number and (self._num_splits > 0 or self._is_outvoted)

    def judge(self, planned: PlannedRound, digest: str, outcome: OutcomeRecord) -> str:
        """Why this island must end after an attempt; "" if it need not.

        Args:
            planned: the attempt, as it was before this island voted.
            digest: of the average that it holds.
            outcome: of the attempt.
        """
        if planned.number != self._round:
            self._round, self._num_splits, self._is_outvoted, self._seen = planned.number, 0, False, {}
        if outcome.kind == "commit":
            return self._compare(planned, digest, outcome.mean)
        if not outcome.is_split:
            return ""
        contributions = tuple((offer.island, offer.incarnation, offer.serial) for offer in planned.offers)
        before = self._seen.setdefault(contributions, digest)
        self._num_splits += 1
        if before != digest:
            return (
                f"this island comes to one average of the same pseudo-gradients and then to another ({before[:12]}, "
                f"{digest[:12]}), and other islands to a third"
            )
        if self._num_splits >= MAX_SPLITS:
            return (
                f"in {self._num_splits} attempts islands came to different averages (this one to {digest[:12]}), and "
                "no majority agrees"
            )
        logger.log(self._level, "round %d is tried again: the islands hold different averages", planned.number)
        return ""

    def _compare(self, planned: PlannedRound, digest: str, agreed: str) -> str:
        if digest == agreed:
            if not self._is_outvoted:
                self._num_outvoted = 0
            return ""
        self._num_outvoted += 1
        if self._num_outvoted >= _MAX_OUTVOTED:
            return f"this island comes again to another average ({digest[:12]}) than the others ({agreed[:12]})"
        self._is_outvoted = True
        logger.log(
            self._level,
            "round %d is read again: this island comes to another average (%s) than the others (%s)",
            planned.number,
            digest[:12],
            agreed[:12],
        )
        return ""
