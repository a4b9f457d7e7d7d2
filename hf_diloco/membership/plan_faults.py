"""What a plan must say to count: it decides who takes part, and of their offers it says what stands there.

Whoever writes it first decides, and any island may. So every island compares it with the offers, which where islands
have identities only their own islands can have written, before it follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_diloco.membership.round_records import OfferRecord, PlanRecord, author_of
from hf_diloco.membership.verdicts import agree_on_rates


class Fault(NamedTuple):
    """Why an attempt is not carried out.

    Attributes:
        reason: in words.
        offer: path of the offer that is to blame; "" where it is the plan.
    """

    reason: str
    offer: str = ""


def find_fault(
    folder: str, plan: PlanRecord, offers: Sequence[OfferRecord | None], state: str, min_islands: int
) -> Fault | None:
    """What is wrong with a plan, or with the offers that it takes; None if nothing is.

    Args:
        folder: of the attempt.
        plan: of it.
        offers: those that it names, in its order; None for what is gone or cannot be read.
        state: of this island's outer parameters before the round.
        min_islands: fewer cannot say that this island has the wrong ones.
    """
    wrong = f"the plan that island {plan.by} wrote ({folder}) "
    for participant, offer in zip(plan.participants, offers, strict=True):
        if offer is None or offer.island != participant.island:
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
    author = f"/{author_of(offer.island, offer.incarnation)}-"
    paths = (info.get("path") for info in offer.objects)
    return next((path for path in paths if isinstance(path, str) and author not in path), "")
