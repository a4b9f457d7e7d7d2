"""The state of a run in an object store, as values and as text, for the console and the dashboard.

`hf-diloco status --json` prints these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hf_diloco.membership.member_records import Phase
from hf_diloco.store.folder import Entry
from hf_diloco.utils import text

Presence = Literal["alive", "silent", "ended", "unknown"]
RoundState = Literal["committed", "planned", "gathering"]

ISLAND_COLUMNS = ("island", "host", "phase", "life", "round", "lag", "steps", "tokens/s", "ranks", "starts")
_NOT_OF_NODES = ("round", "lag", "tokens/s")
ROUND_COLUMNS = ("round", "state", "attempts", "islands", "left out", "payload", "took")


class _Status(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IslandStatus(_Status):
    """An island, by the newest process that claimed its number.

    Attributes:
        incarnation: how often it was started.
        host, pid, folder: of that process; "" and None if its incarnation cannot be read.
        phase: from its last heartbeat; None if it has sent none.
        presence: alive: its heartbeat was seen to change. silent: it was not, for longer than the heartbeat interval.
            ended: it announced its end. unknown: not observed for long enough.
        seconds_silent: since its heartbeat was last seen to change, or since the first look.
        round: rounds completed.
        lag: rounds behind the newest committed one.
        steps: inner steps since it last took part in a round.
        tokens_per_second: of the whole island; 0 if unknown.
        refuses: islands that it does not trust, with the reason: they hold the run's key, but not the identity.
    """

    island: int
    incarnation: int
    host: str = ""
    pid: int | None = None
    folder: str = ""
    phase: Phase | None = None
    presence: Presence
    seconds_silent: float
    round: int | None = None
    lag: int | None
    steps: int | None = None
    tokens_per_second: float | None = None
    num_ranks: int | None = None
    refuses: dict[str, str]


class RoundStatus(_Status):
    """A round, by the attempt that counts: the committed one, or the newest.

    Attributes:
        round: its number, from 1.
        state: gathering: islands offer, but there is no plan yet.
        attempts: begun so far.
        offered: islands that have offered a pseudo-gradient to the attempt.
        participants: islands whose pseudo-gradients are averaged.
        left_out: islands that offered but do not take part, with the reason.
        aborted: why earlier attempts were aborted, and by which island.
        payload_bytes: size of the pseudo-gradients offered, including those of earlier attempts; None if they go
            directly from island to island.
        committed_at: by the store's clock.
        seconds: since the previous round was committed, by the store's clock.
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
    """The newest complete snapshot: its round, the island that wrote it, its parts and bytes."""

    round: int
    island: int | None
    num_parts: int
    num_bytes: int


class StoredBytes(_Status):
    """Bytes in the store: pseudo-gradients, snapshots, and everything else."""

    payloads: int
    snapshots: int
    records: int

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> StoredBytes:
        """Sums the sizes by the first segment of the paths."""
        sizes = {"payloads": 0, "snapshots": 0, "records": 0}
        for entry in entries:
            kind = entry.path.partition("/")[0]
            sizes[kind if kind in ("payloads", "snapshots") else "records"] += entry.size
        return cls(**sizes)


class RunStatus(_Status):
    """A run at one moment.

    Attributes:
        run: its id.
        begun_by, begun_on: the island that began it, and its host ("" if unknown).
        has_key: whether the islands' records are authenticated.
        settings: what all islands share.
        unit: what the run calls a participant: island, or node where they average with their neighbours.
        waits_for_all: membership is fixed: each round needs all islands, and values go directly between them.
        num_rounds: rounds after which the run is over; None: each island ends by itself.
        round: rounds committed.
        seconds_per_round: median of the rounds shown, by the store's clock.
        is_over: all rounds are committed, and no island is alive; or all have ended, and none may come back.
        rounds: the last ones, the newest first.
        snapshot: None if there is no complete one.
        refused: paths of objects that are damaged or not of this run, with the reason; among those that were read.
    """

    url: str
    run: str
    begun_by: int
    begun_on: str
    has_key: bool
    settings: dict[str, str | int | float | bool | None]
    unit: Literal["island", "node"]
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


def figures(status: RunStatus) -> list[tuple[str, str]]:
    """Returns the run's figures as rows of name and value."""
    host = f" ({status.begun_on})" if status.begun_on else ""
    keys = ("none: whoever can write to the store is believed", f"yes: what {status.unit}s write is authenticated")
    rows = [
        ("run", f"{status.run[:12]} at {status.url}, begun by {status.unit} {status.begun_by}{host}"),
        (("rounds", _progress(status)) if status.unit == "island" else ("nodes", _nodes(status))),
        ("key", keys[status.has_key]),
    ]
    if status.waits_for_all:
        return rows
    stored, newest, snapshot = status.stored, status.snapshot, "none that is whole"
    if newest is not None:
        by = f" by island {newest.island}" if newest.island is not None else ""
        snapshot = f"round {newest.round:,}{by}, {text.size(newest.num_bytes)}"
    return [
        *rows,
        ("snapshot", snapshot),
        (
            "in the store",
            f"{text.size(stored.payloads)} pseudo-gradients, {text.size(stored.snapshots)} snapshots, "
            f"{text.size(stored.records)} records",
        ),
    ]


def _nodes(status: RunStatus) -> str:
    settings = status.settings
    graph = f"{settings.get('num_nodes')} in a graph ({settings.get('topology')}), by {settings.get('method')}"
    return f"{graph}: the run is over" if status.is_over else graph


def _progress(status: RunStatus) -> str:
    of_all = f" of {status.num_rounds:,}" if status.num_rounds is not None else ""
    progress = f"{status.round:,}{of_all} committed"
    if status.is_over:
        return f"{progress}: the run is over"
    if status.seconds_per_round is None:
        return progress
    progress += f", {took(status.seconds_per_round)} each"
    if status.num_rounds is None or status.num_rounds <= status.round or not status.seconds_per_round:
        return progress
    return f"{progress}, {text.seconds((status.num_rounds - status.round) * status.seconds_per_round)} to go"


def island_columns(status: RunStatus) -> tuple[str, ...]:
    """Returns the headings of the table of islands, or of nodes."""
    if status.unit == "island":
        return ISLAND_COLUMNS
    return ("node", *(name for name in ISLAND_COLUMNS[1:] if name not in _NOT_OF_NODES))


def island_row(status: RunStatus, island: IslandStatus) -> tuple[str, ...]:
    """Returns the cells of one island or node, in the order of `island_columns`."""
    sync_every = status.settings.get("sync_every")
    steps = text.count(island.steps)
    cells = {
        status.unit: str(island.island),
        "host": island.host or text.MISSING,
        "phase": island.phase or text.MISSING,
        "life": _sign_of_life(island),
        "round": text.count(island.round),
        "lag": text.count(island.lag),
        "steps": f"{steps} of {sync_every:,}" if isinstance(sync_every, int) and island.steps is not None else steps,
        "tokens/s": text.rate(island.tokens_per_second or None),
        "ranks": text.count(island.num_ranks),
        "starts": str(island.incarnation),
    }
    return tuple(cells[name] for name in island_columns(status))


def round_row(entry: RoundStatus) -> tuple[str, ...]:
    """Returns the cells of one round, in the order of `ROUND_COLUMNS`."""
    offers = text.counted(len(entry.offered), "offer")
    state = f"{offers} so far" if entry.state == "gathering" else entry.state
    left_out = [f"{island}: {reason}" for island, reason in entry.left_out.items()]
    left_out += [f"tried again: {reason}" for reason in entry.aborted]
    return (
        text.count(entry.round),
        state,
        str(entry.attempts),
        text.numbers(entry.participants or entry.offered) or text.MISSING,
        "; ".join(left_out) or text.MISSING,
        "direct" if entry.payload_bytes is None else text.size(entry.payload_bytes),
        took(entry.seconds),
    )


def took(seconds: float | None) -> str:
    """Formats a round's duration by the store's clock, which may have whole seconds only, as that of S3."""
    return text.seconds(seconds and round(seconds, 2)) if seconds is None or seconds >= 0.005 else "under 1 s"


def _sign_of_life(island: IslandStatus) -> str:
    if island.presence == "silent":
        return f"silent {text.seconds(round(island.seconds_silent))}"
    return {"ended": text.MISSING, "unknown": "unknown yet"}.get(island.presence, island.presence)
