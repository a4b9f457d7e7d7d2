"""What islands write down of rounds: what each brings, who takes part, whether it happened; and of snapshots."""

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
    """What an island brings to a round.

    Attributes:
        island, incarnation: who it is.
        serial: counts what this process has offered.
        steps: inner steps in it.
        weight: how much its pseudo-gradient counts.
        norm: its Euclidean norm; None if it is not finite.
        state: digest of the outer parameters that it starts from.
        objects: one entry a rank: where the pseudo-gradient is (see `transport.objects`), or, where islands
            exchange directly, which range of it the rank owns; none where membership is fixed.
        links: names the direct connections that this island holds.
        rates: the inner learning rate of each parameter group at its last step, where the method wants them.
        heartbeat: count of the island's last heartbeat before it: a later one says whether the island still waits.
        is_last: the island has taken all its steps and, where it anticipates rounds, brings its parameters as well.
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
        """Names the process that made it."""
        return author_of(self.island, self.incarnation)


class Participant(Record):
    """An offer that a plan takes: by its path, with the island's weight and norm."""

    offer: str
    island: Number
    weight: float = Field(gt=0)
    norm: float = Field(ge=0)


class PlanRecord(Record):
    """Who takes part in an attempt.

    Attributes:
        by: the island that wrote it.
        state: digest of the outer parameters before the round.
        participants: in the order of the sum.
        left_out: islands that offered, but whose pseudo-gradient does not count, with the reason.
        rates: the inner learning rates with which all take the outer step, where the method wants them.
    """

    by: Number
    state: str
    participants: list[Participant] = Field(min_length=1)
    left_out: dict[IslandName, str] = Field(default_factory=dict)
    rates: list[Rate] = Field(default_factory=list)

    @property
    def islands(self) -> frozenset[int]:
        """Those that take part."""
        return frozenset(participant.island for participant in self.participants)


class OutcomeRecord(Record):
    """Whether an attempt happened.

    Attributes:
        by: the island that wrote it.
        kind: for all islands, for ever (but see `Quorum.revoke`).
        mean: digest of the average, if committed.
        unusable: the offer whose objects could not be used, if aborted.
        reason: why aborted.
        is_split: it was aborted because those who voted do not hold one average, so that nobody can have committed it.
        lost: islands without which it cannot take place, where all must be there.
    """

    by: Number
    kind: Literal["commit", "abort"]
    mean: str = ""
    unusable: str = ""
    reason: str = ""
    is_split: bool = False
    lost: list[Number] = Field(default_factory=list)


class VoteRecord(Record):
    """An island holds an average, or has no vote; or misses the average that was committed (`missing_path`).

    Attributes:
        mean: digest of the average; "" for an abstention.
        reason: why it holds none, where all must.
        again: it may hold one if the round is taken again.
    """

    island: Number
    mean: str
    reason: str = ""
    again: bool = False


@dataclass(frozen=True)
class Attempt:
    """One attempt of one round, with what has been written of it.

    Attributes:
        round, number: which.
        plan, outcome: as far as there were some when this was read.
        unusable: authors of the offers that earlier attempts of the round could not use, one entry an attempt.
        doubtful: authors whose offers were of no use in the round before: once more is enough.
        offers: those that the plan takes, in its order, once they have been read.
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
        """Where its records lie."""
        return f"rounds/{self.round:08d}/{self.number:02d}"

    @property
    def agreed(self) -> PlanRecord:
        """The plan, where there is one."""
        assert self.plan is not None
        return self.plan

    @cached_property
    def participants(self) -> dict[int, float]:
        """Their weights, by island, in the order of the sum."""
        return {participant.island: participant.weight for participant in self.agreed.participants}

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

    @property
    def barred(self) -> frozenset[str]:
        """Authors that stay out of this round: twice their offers were of no use."""
        counts = Counter([*self.unusable, *self.doubtful])
        return frozenset(author for author, count in counts.items() if author and count >= _TRIES)


def author_of(island: int, incarnation: int) -> str:
    """Names one process of one island."""
    return f"{island:05d}-{incarnation:06d}"


def offer_path(attempt: Attempt, offer: OfferRecord) -> str:
    """Where an offer to an attempt lies."""
    return f"{attempt.path}/offers/{offer.author}-{offer.serial:06d}.json"


def vote_path(folder: str, island: int) -> str:
    """Where an island's vote on the attempt in a folder lies."""
    return f"{folder}/votes/{island:05d}.json"


def missing_path(folder: str, island: int, incarnation: int) -> str:
    """Where a process says that it misses the average of the attempt in a folder, in which its island took part."""
    return f"{folder}/missing/{author_of(island, incarnation)}.json"


def payload_bytes(offers: Iterable[OfferRecord]) -> int | None:
    """Bytes of all objects; one that is offered again in another attempt counts once. None if there are none."""
    objects = [info for offer in offers for info in offer.objects]
    if all("path" not in info for info in objects):
        return None
    sizes = {str(info.get("path")): info.get("num_bytes") for info in objects}
    return sum(size for size in sizes.values() if isinstance(size, int) and 0 <= size <= _MAX_OBJECT_BYTES)


def why_useless(offer: OfferRecord) -> str:
    """Why an offer never counts; "" if it may."""
    if offer.norm is None:
        return "not finite"
    return "" if offer.weight else _NO_EXAMPLES


def make_plan(
    attempt: Attempt,
    by: int,
    offers: Mapping[int, OfferRecord],
    reasons: Mapping[int, str] | None = None,
) -> PlanRecord:
    """Of some offers that start from the same state, those that count take part.

    Args:
        attempt: that they are made to.
        by: the island that makes the plan.
        reasons: why the offer of each island does not count, "" if it does; default: see `why_useless`.

    Raises:
        ExchangeError: none counts.
    """
    participants, rates, left_out = [], [], {}
    for island, offer in sorted(offers.items()):
        if reason := why_useless(offer) if reasons is None else reasons[island]:
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
    """The inner learning rate of each parameter group with which all islands take an outer step.

    The lower median of the participants': one that they all have comes out as it is.
    """
    return [statistics.median_low(group) for group in zip(*rates, strict=False)]


class StartRecord(Record):
    """The snapshot that a run starts from: its folder."""

    folder: str


class SnapshotRecord(Record):
    """One rank's part of a snapshot.

    Attributes:
        round: rounds completed.
        rank, num_ranks: whose part it is, and how many there are.
        state: digest of the whole outer parameters.
        tensors: where each tensor's part is (see `transport.objects.ObjectInfo`).
        numbers: what the method keeps besides, equal on all ranks.
    """

    round: Number
    rank: Number
    num_ranks: int = Field(ge=1, le=4096)
    state: str
    tensors: dict[str, dict[str, Any]]
    numbers: dict[str, list[float]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot: its round, the digest of its outer parameters, and every rank's part."""

    round: int
    state: str
    folder: str
    parts: tuple[SnapshotRecord, ...]


def assemble(folder: str, parts: Sequence[SnapshotRecord | None]) -> Snapshot | None:
    """The snapshot that the parts in a folder make up; None if it is not whole.

    Args:
        parts: in the order of their paths; None for what is no such record, and does not count.

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
    """The round that a path of a snapshot or payload is of; -1 if it names none."""
    number = path.partition("/")[2].partition("/")[0]
    return int(number) if number.isdecimal() else -1
