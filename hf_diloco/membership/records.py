"""What islands tell each other besides numbers: small typed records, checked on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_diloco.errors import RendezvousError

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
        digest: of the outer parameters that it starts from.
        rates: the inner learning rate of each parameter group at its last step, where the method wants them.
    """

    weight: float = Field(ge=0)
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
