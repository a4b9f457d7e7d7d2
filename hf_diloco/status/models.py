"""What there is to say about a run in an object store; `hf-diloco status --json` prints just this."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hf_diloco.membership.heartbeats import Phase

Presence = Literal["alive", "silent", "ended", "unknown"]
RoundState = Literal["committed", "planned", "gathering"]


class _Status(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IslandStatus(_Status):
    """An island, by the newest process that claimed its number.

    Attributes:
        island: its number.
        incarnation: how often it was started.
        host, pid, folder: that process; "" and None if its incarnation cannot be read.
        phase: what its last heartbeat says; None if it has given none.
        presence: alive: its heartbeat was seen to change. silent: it was not, for longer than heartbeats are apart.
            ended: it said goodbye. unknown: not looked at for long enough.
        seconds_silent: since its heartbeat was last seen to change, or since the first look.
        round: rounds completed.
        lag: rounds behind the newest committed one.
        steps: inner steps since it last took part in a round.
        tokens_per_second: of the whole island; 0 if unknown.
        num_ranks: its processes; None as for `phase`.
        refuses: islands that it does not believe, with the reason: they hold the run's key, and not the identity.
    """

    island: int
    incarnation: int
    host: str
    pid: int | None
    folder: str
    phase: Phase | None
    presence: Presence
    seconds_silent: float
    round: int | None
    lag: int | None
    steps: int | None
    tokens_per_second: float | None
    num_ranks: int | None
    refuses: dict[str, str] = {}


class RoundStatus(_Status):
    """A round, by the attempt that counts: the committed one, or the newest.

    Attributes:
        round: its number, from 1.
        state: gathering: islands offer, but nobody has decided yet who takes part.
        attempts: begun so far.
        offered: islands that have offered a pseudo-gradient to the attempt.
        participants: islands whose pseudo-gradients are averaged.
        left_out: islands that offered but do not take part, with the reason.
        aborted: why earlier attempts came to nothing, and which island says so.
        payload_bytes: size of the pseudo-gradients offered, those of earlier attempts included; None where they go
            directly from island to island.
        committed_at: by the store's clock.
        seconds: since the round before was committed, by the store's clock.
    """

    round: int
    state: RoundState
    attempts: int
    offered: list[int]
    participants: list[int]
    left_out: dict[int, str]
    aborted: list[str]
    payload_bytes: int | None
    committed_at: datetime | None = None
    seconds: float | None = None


class SnapshotStatus(_Status):
    """The newest whole snapshot: its round, the island that wrote it, its parts and bytes."""

    round: int
    island: int | None
    num_parts: int
    num_bytes: int


class StoredBytes(_Status):
    """What lies in the store: bytes of pseudo-gradients, of snapshots, and of everything else."""

    payloads: int
    snapshots: int
    records: int


class RunStatus(_Status):
    """A run at one moment.

    Attributes:
        url: the store.
        run: the run's id.
        begun_by, begun_on: the island that began it, and its host ("" if unknown).
        has_key: whether what islands write is authenticated.
        settings: what all islands share.
        waits_for_all: membership is fixed: each round needs all islands, and values go directly between them.
        num_rounds: rounds after which the run is over; None: each island ends by itself.
        round: rounds committed.
        seconds_per_round: median of the rounds shown, by the store's clock.
        is_over: all rounds are committed, and no island is there any more; or all have ended, and none may come back.
        islands: in the order of their numbers.
        rounds: the last ones, the newest first.
        snapshot: None if none is whole.
        stored: bytes in the store.
        refused: paths of objects that are not of this run, or damaged, with the reason; among those looked at.
    """

    url: str
    run: str
    begun_by: int
    begun_on: str
    has_key: bool
    settings: dict[str, str | int | float | bool | None]
    waits_for_all: bool
    num_rounds: int | None
    round: int
    seconds_per_round: float | None
    is_over: bool
    islands: list[IslandStatus]
    rounds: list[RoundStatus]
    snapshot: SnapshotStatus | None
    stored: StoredBytes
    refused: dict[str, str]
