"""Records of rounds in the store: offers, plans, outcomes and votes; and records of snapshots."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from hf_diloco.errors import ExchangeError, PayloadError
from hf_diloco.store.log import Number, Record

Digest = str
Rate = Annotated[float, Field(ge=0)]
IslandName = Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")]

_TRIES = 2
_MAX_OBJECT_BYTES = 1 << 52  # more than any island may announce
ABSTENTION = ""
_NO_EXAMPLES = "no examples behind it"


class OfferRecord(Record):
    """An island's offer for a round: it is ready, and has a pseudo-gradient to contribute.

    Attributes:
        island, incarnation: the process that made it.
        serial: counts the pseudo-gradients that this process has offered.
        steps: inner steps in the pseudo-gradient.
        weight: of the pseudo-gradient in the average.
        norm: its Euclidean norm; None if it is not finite.
        state: digest of the outer parameters that it starts from.
        objects: one entry per rank: where its part of the pseudo-gradient is (see `transport.objects`), or, with
            direct exchange, the range that the rank owns; empty if membership is fixed.
        links: names the direct connections that this island holds.
        rates: the inner learning rate of each parameter group at its last step, if the method uses them.
        heartbeat: count of the island's last heartbeat before the offer: a later one tells whether it still waits.
        is_last: the island has taken all its steps and, in an eager run, contributes its parameters as well.
    """

    island: Number
    incarnation: Number = Field(ge=1)
    serial: Number
    steps: Number
    weight: float = Field(ge=0)
    norm: float | None = Field(ge=0)
    state: str = Field(pattern="^[0-9a-f]{1,64}$")
    objects: list[dict[str, Any]] = Field(default_factory=list, max_length=4096)
    links: str = ""
    rates: list[Rate] = Field(default_factory=list)
    heartbeat: Number = 0
    is_last: bool = False

    @property
    def author(self) -> str:
        return author_of(self.island, self.incarnation)


class Participant(Record):
    """An offer in a plan: its path, with the island's weight and norm."""

    offer: str
    island: Number
    weight: float = Field(gt=0)
    norm: float = Field(ge=0)


class PlanRecord(Record):
    """The plan of an attempt: its participants.

    Attributes:
        by: the island that wrote it.
        state: digest of the outer parameters before the round.
        participants: in the order of the sum.
        left_out: islands whose offers do not count, with the reason.
        rates: the inner learning rates with which all islands take the outer step, if the method uses them.
    """

    by: Number
    state: str
    participants: list[Participant] = Field(min_length=1)
    left_out: dict[IslandName, str] = Field(default_factory=dict)
    rates: list[Rate] = Field(default_factory=list)

    @property
    def islands(self) -> frozenset[int]:
        return frozenset(participant.island for participant in self.participants)


class OutcomeRecord(Record):
    """The outcome of an attempt.

    Attributes:
        by: the island that wrote it.
        kind: final, for all islands (but see `Quorum.revoke`).
        mean: digest of the average, if committed.
        unusable: path of the offer whose objects were unusable, if aborted for that.
        reason: of an abort.
        is_split: aborted because the voters hold different averages, so that no island can have committed it.
        lost: islands without which the round cannot take place, if membership is fixed.
    """

    by: Number
    kind: Literal["commit", "abort"]
    mean: str = ""
    unusable: str = ""
    reason: str = ""
    is_split: bool = False
    lost: list[Number] = Field(default_factory=list)


class VoteRecord(Record):
    """An island's vote for an average, or its abstention; at `missing_path`, that it lacks a committed average.

    Attributes:
        mean: digest of the average; "" for an abstention.
        reason: why the island holds no average, if membership is fixed.
        again: the island asks to repeat the round.
    """

    island: Number
    mean: str
    reason: str = ""
    again: bool = False


@dataclass(frozen=True)
class Attempt:
    """One attempt of one round, with its records as far as they have been read.

    Attributes:
        round, number: of the round, and of the attempt in it, from 0.
        plan, outcome: None if there were none when this was read.
        unusable: authors of the offers that earlier attempts of the round could not use, one entry per attempt.
        doubtful: authors barred from the round before: one more unusable offer bars them again.
        offers: the plan's offers, in its order, once they have been read.
    """

    round: int
    number: int
    plan: PlanRecord | None = None
    outcome: OutcomeRecord | None = None
    unusable: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()
    offers: tuple[OfferRecord, ...] = ()

    @cached_property
    def path(self) -> str:
        """The folder of its records."""
        return f"rounds/{self.round:08d}/{self.number:02d}"

    @property
    def agreed(self) -> PlanRecord:
        """The plan; there must be one."""
        assert self.plan is not None
        return self.plan

    @cached_property
    def participants(self) -> dict[int, float]:
        """The participants' weights, by island, in the order of the sum."""
        return {participant.island: participant.weight for participant in self.agreed.participants}

    @property
    def is_committed(self) -> bool:
        """Whether the outcome was a commit when this was read."""
        return self.outcome is not None and self.outcome.kind == "commit"

    def place_of(self, island: int) -> int | None:
        """Returns the island's place among the participants; None if it does not take part."""
        return next((place for place, offer in enumerate(self.offers) if offer.island == island), None)

    def offer_by(self, island: int) -> OfferRecord | None:
        """Returns the island's offer; None if it does not take part."""
        return next((offer for offer in self.offers if offer.island == island), None)

    @property
    def barred(self) -> frozenset[str]:
        """Authors that stay out of this round, because their offers were unusable twice."""
        counts = Counter([*self.unusable, *self.doubtful])
        return frozenset(author for author, count in counts.items() if author and count >= _TRIES)


def author_of(island: int, incarnation: int) -> str:
    """Returns the name of one process of one island, as "00001-000002"."""
    return f"{island:05d}-{incarnation:06d}"


def offer_path(attempt: Attempt, offer: OfferRecord) -> str:
    """Returns the path of an offer to an attempt."""
    return f"{attempt.path}/offers/{offer.author}-{offer.serial:06d}.json"


def vote_path(folder: str, island: int) -> str:
    """Returns the path of an island's vote on the attempt in a folder."""
    return f"{folder}/votes/{island:05d}.json"


def missing_path(folder: str, island: int, incarnation: int) -> str:
    """Returns the path of the record that a participant's process lacks the average of the attempt in a folder."""
    return f"{folder}/missing/{author_of(island, incarnation)}.json"


def payload_bytes(offers: Iterable[OfferRecord]) -> int | None:
    """Returns the bytes of all objects; objects offered in several attempts count once. None if there are none."""
    objects = [info for offer in offers for info in offer.objects]
    if all("path" not in info for info in objects):
        return None
    sizes = {str(info.get("path")): info.get("num_bytes") for info in objects}
    return sum(size for size in sizes.values() if isinstance(size, int) and 0 <= size <= _MAX_OBJECT_BYTES)


def why_unusable(offer: OfferRecord) -> str:
    """Returns why an offer can never count; "" if it may."""
    if offer.norm is None:
        return "not finite"
    return "" if offer.weight else _NO_EXAMPLES


def make_plan(
    attempt: Attempt,
    by: int,
    offers: Mapping[int, OfferRecord],
    reasons: Mapping[int, str] | None = None,
) -> PlanRecord:
    """Makes a plan of the offers that count. All offers must start from the same state.

    Args:
        attempt: of the offers.
        by: the island that makes the plan.
        reasons: why the offer of each island does not count, "" if it counts; default: see `why_unusable`.

    Raises:
        ExchangeError: no offer counts.
    """
    participants, rates, left_out = [], [], {}
    for island, offer in sorted(offers.items()):
        if reason := why_unusable(offer) if reasons is None else reasons[island]:
            left_out[str(island)] = reason
        else:
            assert offer.norm is not None
            path, weight = offer_path(attempt, offer), offer.weight
            participants.append(Participant(offer=path, island=island, weight=weight, norm=offer.norm))
            rates.append(offer.rates)
    if not participants:
        remedy = "lower the inner learning rate and resume from an earlier checkpoint"
        if set(left_out.values()) == {_NO_EXAMPLES}:
            remedy = "no step had any: count them in step(weight=...), or set weight_by to uniform"
        raise ExchangeError(
            f"round {attempt.round}: no island has a pseudo-gradient that counts ({left_out}): {remedy}"
        )
    state = next(iter(offers.values())).state
    return PlanRecord(by=by, state=state, participants=participants, left_out=left_out, rates=agree_on_rates(rates))


def agree_on_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """Returns the inner learning rate of each parameter group with which all islands take an outer step.

    It is the lower median of the participants' rates, so that equal rates stay unchanged.
    """
    return [statistics.median_low(group) for group in zip(*rates, strict=False)]


class StartRecord(Record):
    """The snapshot that a run starts from: its folder."""

    folder: str


class SnapshotRecord(Record):
    """One rank's part of a snapshot.

    Attributes:
        round: rounds completed.
        state: digest of the whole outer parameters.
        tensors: where each tensor's part is (see `transport.objects.ObjectInfo`).
        numbers: other values of the method's state, equal on all ranks.
    """

    round: Number
    rank: Number
    num_ranks: int = Field(ge=1, le=4096)
    state: str
    tensors: dict[str, dict[str, Any]]
    numbers: dict[str, list[float]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot: its round, the digest of its outer parameters, and every rank's part."""

    round: int
    state: str
    folder: str
    parts: tuple[SnapshotRecord, ...]


def assemble(folder: str, parts: Sequence[SnapshotRecord | None]) -> Snapshot | None:
    """Assembles the parts in a folder into a snapshot; returns None if it is incomplete.

    Args:
        parts: in the order of their paths; None for an invalid record, which is ignored.

    Raises:
        PayloadError: the parts do not belong together.
    """
    records = [part for part in parts if part is not None]
    if not records:
        return None
    first = records[0]
    if [part.rank for part in records] != list(range(first.num_ranks)):
        return None
    if len({(part.round, part.num_ranks, part.state, tuple(part.tensors)) for part in records}) > 1:
        raise PayloadError(f"the parts of the snapshot {folder} do not belong together", folder)
    return Snapshot(first.round, first.state, folder, tuple(records))


def round_of(path: str) -> int:
    """Returns the round in the path of a snapshot or payload; -1 if there is none."""
    number = path.partition("/")[2].partition("/")[0]
    return int(number) if number.isdecimal() else -1
