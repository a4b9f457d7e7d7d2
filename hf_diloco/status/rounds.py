"""What the records of one round amount to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

from hf_diloco.membership.decisions import is_outcome
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord, PlanRecord, author_of
from hf_diloco.status.models import RoundStatus
from hf_diloco.store.log import Record
from hf_diloco.store.objects import Entry

R = TypeVar("R", bound=Record)

_PATH = re.compile(r"rounds/(\d{8,12})/(\d{2})/(?:offers/[0-9-]+|plan|outcome(?:-[2-9])?)\.json")

Attempts = Mapping[int, Mapping[str, Entry]]
"""The objects of a round, by attempt and path."""


class Reader(Protocol):
    """Reads a record; None if it is gone, or not of this run."""

    def __call__(self, entry: Entry, kind: type[R]) -> R | None: ...


def group_rounds(entries: Iterable[Entry]) -> dict[int, dict[int, dict[str, Entry]]]:
    """The records of all rounds, by round, attempt and path."""
    rounds: dict[int, dict[int, dict[str, Entry]]] = {}
    for entry in entries:
        if match := _PATH.fullmatch(entry.path):
            rounds.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[entry.path] = entry
    return rounds


def decided_at(attempts: Attempts) -> datetime | None:
    """When a round's last attempt was settled, by the store's clock."""
    outcomes = [entry for path, entry in attempts[max(attempts)].items() if is_outcome(path)]
    return max(entry.modified for entry in outcomes) if outcomes else None


def read_round(number: int, attempts: Attempts, read: Reader) -> RoundStatus | None:
    """Where a round stands; None if no record of it can be read."""
    offers: dict[str, OfferRecord] = {}
    aborted: list[str] = []
    plan: PlanRecord | None = None
    outcome: OutcomeRecord | None = None
    newest: list[OfferRecord] = []
    for attempt in sorted(attempts):
        records = attempts[attempt]
        plan = _find([path for path in records if path.endswith("/plan.json")], records, PlanRecord, read)
        names = sorted(filter(is_outcome, records), key=len)  # outcome.json before outcome-2.json
        outcome = _find(names, records, OutcomeRecord, read)
        of_attempt = _read_offers(records, read)
        offers |= of_attempt
        newest = list(of_attempt.values())
        if outcome is None or outcome.kind == "commit":
            break
        aborted.append(f"island {outcome.by} says: {outcome.reason}")
        plan, newest = None, []
    if not offers and plan is None and outcome is None:
        return None
    is_committed = outcome is not None and outcome.kind == "commit"
    return RoundStatus(
        round=number,
        state="committed" if is_committed else "planned" if plan else "gathering",
        attempts=max(attempts) + 1,
        offered=sorted({offer.island for offer in newest}),
        participants=[participant.island for participant in plan.participants] if plan else [],
        left_out=_left_out(plan, newest) if plan else {},
        aborted=aborted,
        payload_bytes=_payload_bytes(offers.values()),
        committed_at=decided_at(attempts) if is_committed else None,
    )


def _find(paths: Iterable[str], records: Mapping[str, Entry], kind: type[R], read: Reader) -> R | None:
    """The first record that can be read."""
    return next((found for path in paths if (found := read(records[path], kind)) is not None), None)


def _read_offers(records: Mapping[str, Entry], read: Reader) -> dict[str, OfferRecord]:
    """The offers to one attempt; those that lie under another island's name are passed over, as islands do."""
    found = {path: read(entry, OfferRecord) for path, entry in records.items() if "/offers/" in path}
    return {
        path: offer
        for path, offer in found.items()
        if offer and path.endswith(f"/{author_of(offer.island, offer.incarnation)}-{offer.serial:06d}.json")
    }


def _left_out(plan: PlanRecord, offers: Sequence[OfferRecord]) -> dict[int, str]:
    """Islands that offered but do not take part: those that the plan names, and those that it does not."""
    left_out = {int(island): reason for island, reason in plan.left_out.items() if island.isdecimal()}
    known = {participant.island for participant in plan.participants} | left_out.keys()
    for offer in offers:
        if offer.island not in known:
            same = offer.state == plan.state
            late = f"came after the plan, which island {plan.by} wrote"
            left_out[offer.island] = late if same else "starts from other outer parameters"
    return dict(sorted(left_out.items()))


def _payload_bytes(offers: Iterable[OfferRecord]) -> int | None:
    """Bytes of all objects; one that is offered again in another attempt counts once. None if there are none."""
    objects = [info for offer in offers for info in offer.objects]
    if all("path" not in info for info in objects):
        return None
    sizes = {str(info.get("path")): info.get("num_bytes") for info in objects}
    return sum(size for size in sizes.values() if isinstance(size, int) and size >= 0)
