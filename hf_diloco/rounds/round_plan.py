"""What the ranks of an island share about a round: its plan, what they have offered, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from hf_diloco.errors import DiLoCoError
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord, PlanRecord
from hf_diloco.transport.base import Traffic

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedRound:
    """An attempt with its plan, as all ranks see it."""

    number: int
    attempt: int
    plan: PlanRecord
    outcome: OutcomeRecord | None
    offers: list[OfferRecord]

    def dump(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "attempt": self.attempt,
            "plan": self.plan.model_dump(),
            "outcome": self.outcome.model_dump() if self.outcome else None,
            "offers": [offer.model_dump() for offer in self.offers],
        }

    @classmethod
    def load(cls, raw: dict[str, Any]) -> PlannedRound:
        outcome = raw["outcome"]
        return cls(
            raw["number"],
            raw["attempt"],
            PlanRecord.model_validate(raw["plan"]),
            OutcomeRecord.model_validate(outcome) if outcome else None,
            [OfferRecord.model_validate(offer) for offer in raw["offers"]],
        )

    @property
    def weights(self) -> list[float]:
        """The participants' weights."""
        return [participant.weight for participant in self.plan.participants]

    @property
    def is_committed(self) -> bool:
        """Whether the outcome was known, and is that the round happened, when this was read."""
        return self.outcome is not None and self.outcome.kind == "commit"

    def place_of(self, island: int) -> int | None:
        """The island's place among the participants."""
        return next((place for place, offer in enumerate(self.offers) if offer.island == island), None)


class Part(Enum):
    """How much of this island's progress a round uses up."""

    NONE = auto()
    SOME = auto()
    WHOLE = auto()


class RoundPassed(DiLoCoError):
    """A round under way takes place without what this island has for it."""


class RoundRepeated(DiLoCoError):
    """All islands have aborted a round, and take it again: their averages differed, or a transfer came damaged."""


class SyncClock:
    """Where the seconds and bytes of one synchronisation go; `last_end` is when the one before it was over."""

    def __init__(self, last_end: float | None = None) -> None:
        self.started = time.monotonic()
        self.computing = 0.0 if last_end is None else self.started - last_end
        self.waiting = 0.0
        self.exchanging = 0.0
        self.traffic = Traffic()

    def wait(self, call: Callable[[], T]) -> T:
        """Counts what `call` takes as waiting for other islands."""
        begun = time.monotonic()
        try:
            return call()
        finally:
            self.waiting += time.monotonic() - begun

    def averaged(self) -> None:
        """All until here was exchange or waiting, all from here on is not."""
        self.exchanging = time.monotonic() - self.started - self.waiting

    @property
    def applying(self) -> float:
        return time.monotonic() - self.started - self.waiting - self.exchanging
