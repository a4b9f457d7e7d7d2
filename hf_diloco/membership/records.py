"""What islands of fixed membership tell each other before rounds, and what that amounts to.

Small typed records, checked on arrival. Every island sees the same ones and comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import CheckpointError, DivergedError, RendezvousError

Digest = Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]


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


R = TypeVar("R", bound=BaseModel)


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
        digests = ", ".join(f"island {island}: {state.digest[:12]}" for island, state in enumerate(states))
        raise DivergedError(
            f"the islands' checkpoints of round {states[0].round} hold different outer parameters "
            f"({digests}): they belong to different runs, or a disk lies"
        )
    return equal
