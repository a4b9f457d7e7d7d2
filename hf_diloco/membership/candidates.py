"""Who takes part in a round: which offers count, for whom others wait, the plan that is made of them, and what is
wrong with one that another island has made.

Whoever writes a plan first decides, and any island may. So every island compares it with the offers, which where
islands have identities only their own islands can have written, before it follows it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.member_records import HeartbeatRecord
from hf_diloco.membership.round_records import (
    Attempt,
    Digest,
    OfferRecord,
    PlanRecord,
    agree_on_rates,
    author_of,
    make_plan,
    offer_path,
    why_useless,
)
from hf_diloco.store.question import Awaited

_RETRY_SECONDS = 0.5
"""How long an attempt waits for those whom the last one lost: if it was the link, they are back at once."""
_HISTORY_ROUNDS = 16
_MIN_HISTORY_ROUNDS = 5


@dataclass(frozen=True)
class Rules:
    """When a round takes place.

    Attributes:
        min_islands: no round with fewer.
        grace: seconds to wait, once there are as many, for islands that are alive but late; and for another's vote.
        patience: seconds to wait for as many, if they live; then the island goes on training without the round.
        outlier_factor: a norm so many times the usual one is left out; None: never.
        needs_presence: only islands that wait for the round take part, and all of them vote: they exchange directly.
        num_fragments: that rounds are of in turn; each has usual norms of its own.
        linger: seconds to leave plans and outcomes to another island, which keeps the store and so hears first what
            all have written: what it decides then comes with the answer to what this one has written.
    """

    min_islands: int = 1
    grace: float = 30.0
    patience: float = 600.0
    outlier_factor: float | None = 10.0
    needs_presence: bool = False
    num_fragments: int = 1
    linger: float = 0.0

    @classmethod
    def of(cls, config: DiLoCoConfig, linger: float) -> Rules:
        """As the outer loop's settings say."""
        return cls(
            min_islands=config.quorum,
            grace=config.grace,
            patience=config.sync_timeout,
            outlier_factor=config.outlier_factor,
            needs_presence=config.is_direct,
            num_fragments=config.num_fragments,
            linger=linger,
        )

    def awaits(self, decision: str) -> Awaited | None:
        """A plan or an outcome, by its path, as what another island is to write first."""
        return Awaited(path=decision, linger=self.linger) if self.linger else None


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
            smallest: norm of all that are offered. Where all have become long at once, it is the training that
                changed, and nobody is an outlier.
        """
        if offer.norm is None or not offer.weight:
            return why_useless(offer)
        norms = self._norms[round_number % len(self._norms)]
        if self._factor and len(norms) >= _MIN_HISTORY_ROUNDS:
            usual = max(statistics.median(norms), smallest)
            if offer.norm > self._factor * usual:
                return (
                    f"its norm {offer.norm:.4g} is more than {self._factor:g} times the usual {usual:.4g} "
                    "(outlier_factor)"
                )
        return ""


class Candidates:
    """The islands that may take part in the next round; used by the island's leader only."""

    def __init__(self, members: Members, rules: Rules) -> None:
        self._log = members.log
        self._members = members
        self._rules = rules
        self._usual_norms = UsualNorms(rules.num_fragments, rules.outlier_factor)
        self._last_participants: frozenset[int] = frozenset()
        self._offers: dict[str, OfferRecord] = {}

    def remember(self, round_number: int, plan: PlanRecord) -> None:
        """Takes a committed round as the last one, and its norms as usual ones."""
        self._last_participants = plan.islands
        self._usual_norms.remember(round_number, [participant.norm for participant in plan.participants])
        self._offers.clear()

    def read(self, path: str) -> OfferRecord | None:
        """An offer; None if it is gone or cannot be read."""
        return self._offers.get(path) or self._log.read_or_refuse(path, OfferRecord)

    def offers_to(self, attempt: Attempt, state: Digest) -> dict[int, OfferRecord]:
        """The newest usable offer of each island."""
        found: dict[int, OfferRecord] = {}
        paths = self._log.list(f"{attempt.path}/offers/")  # sorted: an island's newest offer comes last
        read = self._log.read_all([path for path in paths if path not in self._offers], OfferRecord)
        self._offers |= {path: offer for path, offer in read.items() if path == offer_path(attempt, offer)}
        for path in paths:
            offer = self._offers.get(path)
            if offer and offer.state == state:
                found[offer.island] = offer
        barred = attempt.barred
        usable = {island: offer for island, offer in found.items() if offer.author not in barred}
        return usable if len(usable) >= self._rules.min_islands else found  # or no round would ever take place

    def present(
        self, offers: Mapping[int, OfferRecord], alive: Mapping[int, HeartbeatRecord]
    ) -> dict[int, OfferRecord]:
        """Those of some offers that count now: where islands exchange directly, of those that wait for the round."""
        if not self._rules.needs_presence:
            return dict(offers)
        return {island: offer for island, offer in offers.items() if self.waits(offer, alive)}

    def waits(self, offer: OfferRecord, alive: Mapping[int, HeartbeatRecord]) -> bool:
        """Whether the process that has made an offer is there, and waits for the round.

        Its last heartbeat may be from before the offer: then it is the offer that says so.
        """
        if offer.island == self._members.island:
            return offer.incarnation == self._members.incarnation
        heartbeat = alive.get(offer.island)
        is_here = heartbeat is not None and (heartbeat.phase == "syncing" or heartbeat.count <= offer.heartbeat)
        return is_here and self._members.incarnation_of(offer.island) == offer.incarnation

    def at_it(self, offers: Sequence[OfferRecord]) -> set[int]:
        """Islands whose offers a plan takes and that are carrying it out, also as another process than offered."""
        alive = self._members.alive()
        syncing = {island for island, heartbeat in alive.items() if heartbeat.phase == "syncing"}
        return {offer.island for offer in offers if offer.island in syncing or self.waits(offer, alive)}

    def awaited(self, attempt: Attempt, alive: Mapping[int, HeartbeatRecord], waited: float) -> set[int]:
        """Islands that are alive and hold the state before this round, after so many seconds of waiting for them.

        Whoever was in the last round counts as holding it, though its next sign of life may still be on its way. An
        island that joins counts from when it stands where the others do, unless it lets the round pass. Who must be
        there and was lost in the last attempt counts for a moment only: if it hangs, that has cost enough time. One
        that has missed the last round and synchronises counts for a moment too: it carries that out, and comes.
        """
        is_moment = waited < _RETRY_SECONDS
        lost = attempt.unusable[-1:] if self._rules.needs_presence and not is_moment else ()
        out = attempt.barred.union(lost)
        return {
            island
            for island, heartbeat in alive.items()
            if (
                heartbeat.round >= attempt.round - 1
                or island in self._last_participants
                or (is_moment and heartbeat.phase == "syncing" and heartbeat.round == attempt.round - 2)
            )
            and heartbeat.phase != "passing"
            and author_of(island, self._members.incarnation_of(island)) not in out
        }

    def plan(self, attempt: Attempt, offers: Mapping[int, OfferRecord]) -> PlanRecord:
        """See `make_plan`."""
        smallest = min((offer.norm for offer in offers.values() if offer.norm is not None), default=0.0)
        why_not = self._usual_norms.why_not
        reasons = {island: why_not(attempt.round, offer, smallest) for island, offer in offers.items()}
        return make_plan(attempt, self._members.island, offers, reasons)


class Fault(NamedTuple):
    """Why an attempt is not carried out.

    Attributes:
        offer: path of the offer that is to blame; "" where it is the plan.
    """

    reason: str
    offer: str = ""


def find_fault(
    folder: str, plan: PlanRecord, offers: Sequence[OfferRecord | None], state: str, min_islands: int
) -> Fault | None:
    """What is wrong with a plan, or with the offers that it takes; None if nothing is.

    Args:
        offers: those that it names, in its order; None for what is gone or cannot be read.
        state: of this island's outer parameters before the round.
        min_islands: fewer cannot say that this island has the wrong ones.
    """
    wrong = f"the plan that island {plan.by} wrote ({folder}) "
    for participant, offer in zip(plan.participants, offers, strict=True):
        if offer is None or offer.island != participant.island or not offer.objects:
            return Fault(f"{participant.offer}, which {wrong}names, is gone or cannot be read", participant.offer)
        if foreign := _foreign_object(offer):
            return Fault(
                f"{participant.offer} names {foreign}, which island {offer.island} cannot have written",
                participant.offer,
            )
        if not participant.offer.startswith(f"{folder}/offers/"):
            return Fault(f"{wrong}takes an offer to another attempt: {participant.offer}")
        if (participant.weight, participant.norm) != (offer.weight, offer.norm):
            return Fault(
                f"{wrong}says weight {participant.weight:g} and norm {participant.norm:g} of island {offer.island}, "
                f"which has offered weight {offer.weight:g} and norm {offer.norm}"
            )
        if offer.state != plan.state:
            return Fault(
                f"{wrong}starts from the outer parameters {plan.state[:12]}, and the offer of island {offer.island} "
                f"from {offer.state[:12]}"
            )
    if plan.state != state and len(plan.participants) < min_islands:
        return Fault(
            f"{wrong}starts from the outer parameters {plan.state[:12]} and not from {state[:12]}, and is of fewer "
            f"islands than min_islands ({min_islands})"
        )
    islands = [participant.island for participant in plan.participants]
    if len(set(islands)) < len(islands):
        return Fault(f"{wrong}takes an island more than once: {islands}")
    if plan.rates != agree_on_rates([offer.rates for offer in offers if offer is not None]):
        return Fault(f"{wrong}has other inner learning rates than its participants")
    return None


def _foreign_object(offer: OfferRecord) -> str:
    """An object that an offer names as its own, though another process must have written it; "" if there is none."""
    author = f"/{offer.author}-"
    paths = (info.get("path") for info in offer.objects)
    return next((path for path in paths if isinstance(path, str) and author not in path), "")
