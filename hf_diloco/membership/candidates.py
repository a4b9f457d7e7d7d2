"""Participants of a round: which offers count, which islands to wait for, making a plan, and checking a peer's plan.

The first plan written decides, and any island may write it. So every island checks the plan against the offers before
it follows the plan. If islands have identities, only an island itself can have written its offer.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
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
    why_unusable,
)
from hf_diloco.store.long_poll import Awaited

_RETRY_SECONDS = 0.5
"""How long an attempt waits for islands that the last one lost: after a mere link failure they are back at once."""
_HISTORY_ROUNDS = 16
_MIN_HISTORY_ROUNDS = 5


@dataclass(frozen=True)
class Rules:
    """When a round takes place.

    Attributes:
        min_islands: quorum of a round.
        grace: seconds to wait for late but live islands once there is a quorum; and for votes.
        patience: seconds to wait for a quorum of live islands; then the island continues training without the round.
        outlier_factor: leaves out norms larger than this factor times the usual norm; None: leaves out none.
        needs_presence: islands exchange directly: only islands that wait for the round take part, and all must vote.
        num_fragments: number of fragments, which take turns; each has usual norms of its own.
        linger: seconds to leave plans and outcomes to the island that keeps the store, which sees all records first.
            Its decision then arrives with the store's answer to this island's record.
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
        """Returns the rules for the outer loop's settings."""
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
        """Returns how to wait for another island to write the plan or outcome at this path; None: do not wait."""
        return Awaited(path=decision, linger=self.linger) if self.linger else None


class UsualNorms:
    """The norms of the last rounds, to detect outliers; for the arguments see `Rules`."""

    def __init__(self, num_fragments: int, factor: float | None) -> None:
        self._factor = factor
        self._norms = [deque[float](maxlen=_HISTORY_ROUNDS) for _ in range(num_fragments)]

    def remember(self, round_number: int, norms: Sequence[float]) -> None:
        """Adds the median norm of a committed round to the usual ones."""
        self._norms[round_number % len(self._norms)].append(statistics.median(norms))

    def why_not(self, round_number: int, offer: OfferRecord, smallest: float) -> str:
        """Returns why an offer does not count; "" if it counts.

        `smallest` is the smallest norm of all offers: if all grow at once, training has changed, and no offer is an
        outlier.
        """
        if offer.norm is None or not offer.weight:
            return why_unusable(offer)
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
        """Records a committed round as the last one, and its norms as usual ones."""
        self._last_participants = plan.islands
        self._usual_norms.remember(round_number, [participant.norm for participant in plan.participants])
        self._offers.clear()

    def read(self, path: str) -> OfferRecord | None:
        """Reads an offer; None if it is gone or cannot be read."""
        return self._offers.get(path) or self._log.read_or_refuse(path, OfferRecord)

    def needed(self, offering: Collection[int]) -> int:
        """Returns how many offers make a quorum; finished islands with nothing more to bring count towards it."""
        return max(1, self._rules.min_islands - len(self._members.spent().difference(offering)))

    def offers_to(self, attempt: Attempt, state: Digest) -> dict[int, OfferRecord]:
        """Returns each island's newest offer that starts from `state`, without islands that are barred.

        Includes barred islands if there is no quorum without them.
        """
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
        return usable if len(usable) >= self.needed(usable) else found  # else no round would ever take place

    def present(
        self, offers: Mapping[int, OfferRecord], alive: Mapping[int, HeartbeatRecord]
    ) -> dict[int, OfferRecord]:
        """Returns the offers that count now: with direct exchange, only those of islands that wait for the round."""
        if not self._rules.needs_presence:
            return dict(offers)
        return {island: offer for island, offer in offers.items() if self.waits(offer, alive)}

    def waits(self, offer: OfferRecord, alive: Mapping[int, HeartbeatRecord]) -> bool:
        """Whether the process that made an offer is alive and waits for the round.

        If its last heartbeat is older than the offer, the offer itself shows that it waits.
        """
        if offer.island == self._members.island:
            return offer.incarnation == self._members.incarnation
        heartbeat = alive.get(offer.island)
        is_here = heartbeat is not None and (heartbeat.phase == "syncing" or heartbeat.count <= offer.heartbeat)
        return is_here and self._members.incarnation_of(offer.island) == offer.incarnation

    def carrying_out(self, offers: Sequence[OfferRecord]) -> set[int]:
        """Returns the islands of these offers that are carrying out the plan, even as another process than offered."""
        alive = self._members.alive()
        syncing = {island for island, heartbeat in alive.items() if heartbeat.phase == "syncing"}
        return {offer.island for offer in offers if offer.island in syncing or self.waits(offer, alive)}

    def awaited(self, attempt: Attempt, alive: Mapping[int, HeartbeatRecord], waited: float) -> set[int]:
        """Returns the live islands that can offer for this round, after `waited` seconds of waiting for them.

        They must hold the state before the round. A participant of the last round counts as holding it, even if its
        next heartbeat has not arrived yet. A joining island counts once it has reached that state, unless it skips the
        round. Two kinds of islands count for `_RETRY_SECONDS` only: with direct exchange, an island that the last
        attempt lost, because it may hang; and an island that missed the last round and is synchronising, because it
        will catch up at once.
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
        """Makes a plan from these offers, without outliers; see `make_plan`."""
        smallest = min((offer.norm for offer in offers.values() if offer.norm is not None), default=0.0)
        why_not = self._usual_norms.why_not
        reasons = {island: why_not(attempt.round, offer, smallest) for island, offer in offers.items()}
        return make_plan(attempt, self._members.island, offers, reasons)


class Fault(NamedTuple):
    """Why an attempt is not carried out, with the path of the invalid offer; "" if the plan is invalid."""

    reason: str
    offer: str = ""


def find_fault(
    folder: str, plan: PlanRecord, offers: Sequence[OfferRecord | None], state: str, min_islands: int
) -> Fault | None:
    """Returns the first fault of a plan or its offers; None if there is none.

    Args:
        offers: the offers that the plan names, in its order; None for one that is gone or cannot be read.
        state: digest of this island's outer parameters before the round.
        min_islands: a plan that starts from another state than `state` needs at least this many islands.
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
            return Fault(f"{wrong}includes an offer to another attempt: {participant.offer}")
        if (participant.weight, participant.norm) != (offer.weight, offer.norm):
            return Fault(
                f"{wrong}gives weight {participant.weight:g} and norm {participant.norm:g} of island {offer.island}, "
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
        return Fault(f"{wrong}includes an island more than once: {islands}")
    if plan.rates != agree_on_rates([offer.rates for offer in offers if offer is not None]):
        return Fault(f"{wrong}has other inner learning rates than its participants")
    return None


def _foreign_object(offer: OfferRecord) -> str:
    """Returns an object in an offer that another process must have written; "" if there is none."""
    author = f"/{offer.author}-"
    paths = (info.get("path") for info in offer.objects)
    return next((path for path in paths if isinstance(path, str) and author not in path), "")
