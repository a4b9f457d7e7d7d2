"""What islands of fixed membership tell each other besides numbers, and what that amounts to.

Small typed records, checked on arrival. Every island sees the same ones and comes to the same verdict.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import (
    CheckpointError,
    DiLoCoError,
    DivergedError,
    ExchangeError,
    IslandLostError,
    RendezvousError,
)
from hf_diloco.utils.text import numbers, plural

Digest = Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]
Rate = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointsRecord(_Record):
    """The rounds that an island holds whole checkpoints of."""

    rounds: list[int]


class SoundRecord(_Record):
    """Whether every file of the checkpoint that an island would resume from holds what was written to it."""

    sound: bool


class LayoutRecord(_Record):
    """How an island's ranks hold the masters: a digest of each rank's segments, and whether all hold everything."""

    ranks: list[str] = Field(min_length=1)
    replicated: bool


class JoinRecord(_Record):
    """Who an island is and what it trains.

    Attributes:
        host: its leader's host name.
        folder: the folder it writes to, on that host.
        fingerprint: what must be equal on all islands.
        layout: see `hf_diloco.inner.partition.layout_of`.
    """

    host: str
    folder: str
    fingerprint: dict[str, str | int | float | bool | None]
    layout: LayoutRecord


class StateRecord(_Record):
    """Where an island stands: rounds completed, digest of its outer parameters, whether from a checkpoint."""

    round: int = Field(ge=0)
    digest: Digest
    resumed: bool


class ArrivalRecord(_Record):
    """What an island brings to a round.

    Attributes:
        weight: how much its pseudo-gradient counts; 0 if it is not finite.
        norm: of its pseudo-gradient; 0 if that is not finite.
        digest: of the outer parameters that it starts from.
        rates: the inner learning rate of each parameter group at its last step, where the method wants them.
    """

    weight: float = Field(ge=0)
    norm: float = Field(default=0.0, ge=0)
    digest: Digest
    rates: list[Rate] = []


class VoteRecord(_Record):
    """Whether an island holds the average of a round: with the average's digest, or with the reason why not.

    Attributes:
        again: it does not, but may if the round is taken again.
    """

    ok: bool
    digest: str = ""
    reason: str = ""
    again: bool = False


R = TypeVar("R", bound=_Record)


def parse_records(kind: type[R], raw: Sequence[dict[str, Any]]) -> list[R]:
    """Checks all islands' records as they came from the store.

    Raises:
        RendezvousError: naming the island whose record is not of this kind.
    """
    return list(parse_some(kind, dict(enumerate(raw))).values())


def parse_some(kind: type[R], raw: Mapping[Any, dict[str, Any]]) -> dict[int, R]:
    """Checks the records of some islands, given by number; see `parse_records`."""
    parsed = {}
    for island, record in raw.items():
        try:
            parsed[int(island)] = kind.model_validate(record)
        except ValidationError as error:
            problem = error.errors()[0]
            raise RendezvousError(
                f"island {island} sent a {kind.__name__} that this version of hf_diloco does not understand "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}): install the same version on all islands"
            ) from None
    return parsed


def states_are_equal(states: Sequence[StateRecord]) -> bool:
    """Whether all islands hold the same outer parameters already; on a fresh start they need not.

    Raises:
        CheckpointError: they stand at different rounds.
        DivergedError: they resume at one round, but from different parameters.
    """
    if len({(state.round, state.resumed) for state in states}) > 1:
        standing = ", ".join(
            f"island {island}: {f'round {s.round} of a checkpoint' if s.resumed else 'a fresh start'}"
            for island, s in enumerate(states)
        )
        raise CheckpointError(
            f"the islands do not stand at the same round ({standing}): resume all from checkpoints of one round"
        )
    equal = len({state.digest for state in states}) == 1
    if states[0].resumed and not equal:
        raise DivergedError(
            f"the islands' checkpoints of round {states[0].round} hold different outer parameters "
            f"({_digests(dict(enumerate(states)))}): they belong to different runs, or a disk lies"
        )
    return equal


def weigh(arrivals: Sequence[ArrivalRecord], round_number: int) -> list[float]:
    """Each island's weight in the average.

    Raises:
        DivergedError: the islands start the round from different outer parameters.
        ExchangeError: no island has anything to contribute.
    """
    if len({arrival.digest for arrival in arrivals}) > 1:
        raise DivergedError(
            f"before round {round_number} the islands hold different outer parameters "
            f"({_digests(dict(enumerate(arrivals)))}): this should be impossible; suspect memory or a changed "
            "library, and resume from the last checkpoint"
        )
    weights = [arrival.weight for arrival in arrivals]
    if not any(weights):
        raise ExchangeError(
            f"round {round_number}: no island has a finite pseudo-gradient with any examples behind it: lower the "
            "inner learning rate and resume from an earlier checkpoint"
        )
    return weights


def agree_on_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """The inner learning rate of each parameter group with which all islands take an outer step.

    The lower median of the participants': one that they all have comes out as it is.
    """
    return [statistics.median_low(group) for group in zip(*rates, strict=False)]


def why_aborted(votes: Mapping[int, VoteRecord], round_number: int, num_islands: int) -> DiLoCoError:
    """The error for a round that was not committed."""
    reasons = [f"island {island}: {vote.reason}" for island, vote in votes.items() if not vote.ok]
    if len(votes) == num_islands and not reasons:
        digests = Counter(vote.digest for vote in votes.values())
        usual, count = digests.most_common(1)[0]
        wrong = [island for island, vote in votes.items() if vote.digest != usual] if 2 * count > num_islands else []
        who = f"{plural('island', len(wrong))} {numbers(wrong)} did each time: suspect" if wrong else "suspect"
        return DivergedError(
            f"round {round_number} was aborted: the islands computed different averages again and again "
            f"({_digests(votes)}); {who} memory, or a library or processor that differs. Each writes a checkpoint of "
            "its state before the round; start all islands again",
            is_state_sound=True,
        )
    silent = sorted(set(range(num_islands)) - votes.keys())
    cause = "; ".join(reasons) or f"islands {silent} did not vote, being lost or late"
    return IslandLostError(
        f"round {round_number} was aborted; {cause}. Start all islands again: the run resumes from the "
        "newest round that all hold",
        () if reasons else silent,
    )


def _digests(records: Mapping[int, StateRecord | ArrivalRecord | VoteRecord]) -> str:
    return ", ".join(f"island {island}: {record.digest[:12]}" for island, record in records.items())
