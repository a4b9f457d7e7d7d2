"""Plans of rounds, as all ranks of an island see them: the leader asks who decides, a `Quorum` or `Unanimity`.

And who is wrong where islands compute different averages: once may be chance, and more often is a fault. Such a round
is aborted and taken again, from the same pseudo-gradients: who then comes to another average than before has computed
at least one of them wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from hf_diloco.errors import DivergedError, IslandLostError, PayloadError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord, PlanRecord
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.outer.state import OuterState
from hf_diloco.store.log import Record

logger = logging.getLogger("hf_diloco")

MAX_SPLITS = 3
"""Attempts of one round in which islands disagree, before all end that do not know who is wrong."""
_MAX_OUTVOTED = 2


class PlannedRound(Record):
    """An attempt with its plan, as all ranks see it."""

    round: int
    attempt: int
    plan: PlanRecord
    outcome: OutcomeRecord | None
    offers: list[OfferRecord]

    @property
    def participants(self) -> dict[int, float]:
        """Their weights, by island."""
        return {participant.island: participant.weight for participant in self.plan.participants}

    @property
    def weights(self) -> list[float]:
        """The participants' weights."""
        return [participant.weight for participant in self.plan.participants]

    @property
    def left_out(self) -> dict[int, str]:
        """Islands that offered, but whose pseudo-gradients do not count, with the reason."""
        return {int(island): reason for island, reason in self.plan.left_out.items()}

    @property
    def as_attempt(self) -> Attempt:
        """As the `Quorum` knows it."""
        return Attempt(self.round, self.attempt, self.plan)

    @property
    def is_committed(self) -> bool:
        """Whether the outcome was known, and is that the round happened, when this was read."""
        return self.outcome is not None and self.outcome.kind == "commit"

    def place_of(self, island: int) -> int | None:
        """The island's place among the participants."""
        return next((place for place, offer in enumerate(self.offers) if offer.island == island), None)

    def offer_by(self, island: int) -> OfferRecord | None:
        """The island's offer, if it takes part."""
        return next((offer for offer in self.offers if offer.island == island), None)


class Plans:
    """One rank's view of them. Every method is collective over the island's ranks.

    Args:
        outer: this rank's outer state: plans are of its next round.
        island: the ranks of this island.
        decider: decides rounds; on the island's leader only.
    """

    def __init__(self, outer: OuterState, island: IslandGroup, decider: Quorum | Unanimity | None) -> None:
        self.outer = outer
        self.island = island
        self._decider = decider
        self._open: Attempt | None = None  # had no plan when `find` looked; since then others may have written one

    @property
    def decider(self) -> Quorum | Unanimity:
        """Asked by the leader only."""
        assert self._decider is not None
        return self._decider

    def convene(self, offer: OfferRecord) -> PlannedRound:
        """Offers, and waits for the plan of the next round."""

        def convene() -> dict[str, Any]:
            while True:
                known, self._open = self._open, None
                attempt = known if known and known.round == number else self.decider.current(number)
                if attempt.plan is None:
                    attempt = self.decider.convene(attempt, offer)
                if planned := self._with_offers(attempt):
                    return planned.model_dump()

        number = self.outer.round + 1
        try:
            return self._load(self.island.on_leader(convene))
        except PayloadError as error:  # committed meanwhile, and damaged: `find` says so
            raise IslandLostError(str(error)) from None

    def commit(self, planned: PlannedRound, digest: str) -> OutcomeRecord:
        """Votes for an average, and waits for what is decided."""
        return self._decide(planned, lambda attempt: self.decider.commit(attempt, planned.offers, digest))

    def abort(self, planned: PlannedRound, islands: Collection[int], reason: str) -> OutcomeRecord:
        """Says that the values of some islands could not be used, or why else there is no average.

        Returns:
            What was decided, which may be otherwise.
        """
        offer = next((one.offer for one in planned.plan.participants if one.island in islands), "")
        return self._decide(planned, lambda attempt: self.decider.abort(attempt, offer, reason))

    def _decide(self, planned: PlannedRound, call: Callable[[Attempt], OutcomeRecord]) -> OutcomeRecord:
        raw = self.island.on_leader(lambda: call(planned.as_attempt).model_dump())
        return OutcomeRecord.model_validate(raw)

    def _with_offers(self, attempt: Attempt) -> PlannedRound | None:
        offers = self.decider.offers_of(attempt, self.outer.outer_hash)
        if attempt.plan is None or offers is None:
            return None
        return PlannedRound(
            round=attempt.round, attempt=attempt.number, plan=attempt.plan, outcome=attempt.outcome, offers=offers
        )

    def _load(self, raw: dict[str, Any]) -> PlannedRound:
        planned = PlannedRound.model_validate(raw)
        if planned.plan.state != self.outer.outer_hash:
            raise DivergedError(
                f"round {planned.round}: this island's outer parameters ({self.outer.outer_hash[:12]}) are not those "
                f"that all agreed on ({planned.plan.state[:12]}): suspect memory or a changed library. It ends before "
                "it spoils the others; started again, it resumes from its last checkpoint"
            )
        return planned


class QuorumPlans(Plans):
    """Those of islands that come and go: others may have planned a round without this one, or before it came."""

    @property
    def quorum(self) -> Quorum:
        """Asked by the leader only."""
        assert isinstance(self._decider, Quorum)
        return self._decider

    def find(self) -> PlannedRound | None:
        """The next round, if it has a plan already.

        Raises:
            PayloadError: a record of it is damaged, or gone.
        """

        def find() -> dict[str, Any] | None:
            while (attempt := self.quorum.find(number)).plan:
                if planned := self._with_offers(attempt):
                    return planned.model_dump()
            self._open = attempt
            return None

        number = self.outer.round + 1
        raw = self.island.on_leader(find)
        return self._load(raw) if raw else None

    def presume_open(self) -> None:
        """Takes it that nobody has planned the next round yet: `convene` then asks no more than it must."""
        self._open = Attempt(self.outer.round + 1, 0)

    def leave(self, offer: OfferRecord) -> None:
        """Offers, unless the next round has a plan already, and waits for nothing."""

        def leave() -> None:
            attempt = self.quorum.current(self.outer.round + 1)
            if attempt.plan is None:
                self.quorum.offer(attempt, offer)

        self.island.on_leader(leave)

    def refuse_commit(self, planned: PlannedRound, mean: str) -> bool:
        """See `Quorum.refuse_commit`."""
        return self.island.on_leader(lambda: self.quorum.refuse_commit(planned.as_attempt, mean))

    def await_outcome(self, planned: PlannedRound, timeout: float) -> OutcomeRecord:
        """Returns how an attempt that this island has no part in is decided.

        Raises:
            IslandLostError: that takes longer than `timeout` seconds.
        """
        return self._decide(planned, lambda attempt: self.quorum.await_outcome(attempt, planned.offers, timeout))

    def remember(self, planned: PlannedRound) -> None:
        """See `Quorum.remember`."""
        self.island.on_leader(lambda: self.quorum.remember(planned.round, planned.plan))


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
        if planned.round != self._round:
            self._round, self._num_splits, self._is_outvoted, self._seen = planned.round, 0, False, {}
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
        logger.log(self._level, "round %d is tried again: the islands hold different averages", planned.round)
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
            planned.round,
            digest[:12],
            agreed[:12],
        )
        return ""
