"""A run's status in words, for the console and for the page alike."""

from __future__ import annotations

from hf_diloco.status.models import IslandStatus, RoundStatus, RunStatus
from hf_diloco.utils import text

ISLAND_COLUMNS = ("island", "host", "phase", "life", "round", "lag", "steps", "tokens/s", "ranks", "starts")
ROUND_COLUMNS = ("round", "state", "attempts", "islands", "left out", "payload", "took")


def figures(status: RunStatus) -> list[tuple[str, str]]:
    """The run's figures, one a row."""
    host = f" ({status.begun_on})" if status.begun_on else ""
    stored = status.stored
    rows = [
        ("run", f"{status.run[:12]} at {status.url}, begun by island {status.begun_by}{host}"),
        ("rounds", _progress(status)),
        (
            "key",
            "yes: what islands write is authenticated"
            if status.has_key
            else "none: whoever can write to the store is believed",
        ),
    ]
    if status.waits_for_all:
        return rows
    return [
        *rows,
        ("snapshot", _snapshot(status)),
        (
            "in the store",
            f"{text.size(stored.payloads)} pseudo-gradients, {text.size(stored.snapshots)} snapshots, "
            f"{text.size(stored.records)} records",
        ),
    ]


def _progress(status: RunStatus) -> str:
    of_all = f" of {status.num_rounds:,}" if status.num_rounds is not None else ""
    progress = f"{status.round:,}{of_all} committed"
    if status.is_over:
        return f"{progress}: the run is over"
    if status.seconds_per_round is None:
        return progress
    progress += f", {text.seconds(round(status.seconds_per_round, 2))} each"
    if status.num_rounds is None or status.num_rounds <= status.round:
        return progress
    return f"{progress}, {text.seconds((status.num_rounds - status.round) * status.seconds_per_round)} to go"


def _snapshot(status: RunStatus) -> str:
    snapshot = status.snapshot
    if snapshot is None:
        return "none that is whole"
    by = f" by island {snapshot.island}" if snapshot.island is not None else ""
    return f"round {snapshot.round:,}{by}, {text.size(snapshot.num_bytes)}"


def island_row(status: RunStatus, island: IslandStatus) -> tuple[str, ...]:
    """One island, in the order of `ISLAND_COLUMNS`."""
    sync_every = status.settings.get("sync_every")
    steps = text.count(island.steps)
    return (
        str(island.island),
        island.host or text.MISSING,
        island.phase or text.MISSING,
        _sign_of_life(island),
        text.count(island.round),
        text.count(island.lag),
        f"{steps} of {sync_every:,}" if isinstance(sync_every, int) and island.steps is not None else steps,
        text.count(island.tokens_per_second or None),
        text.count(island.num_ranks),
        str(island.incarnation),
    )


def round_row(entry: RoundStatus) -> tuple[str, ...]:
    """One round, in the order of `ROUND_COLUMNS`."""
    return (
        text.count(entry.round),
        _state(entry),
        str(entry.attempts),
        text.numbers(entry.participants or entry.offered) or text.MISSING,
        "; ".join(_left_out(entry)) or text.MISSING,
        "direct" if entry.payload_bytes is None else text.size(entry.payload_bytes),
        text.seconds(None if entry.seconds is None else round(entry.seconds, 2)),
    )


def _sign_of_life(island: IslandStatus) -> str:
    if island.presence == "silent":
        return f"silent {text.seconds(round(island.seconds_silent))}"
    return {"ended": text.MISSING, "unknown": "unknown yet"}.get(island.presence, island.presence)


def _state(entry: RoundStatus) -> str:
    if entry.state == "gathering":
        return f"{len(entry.offered)} {text.plural('offer', len(entry.offered))} so far"
    return entry.state


def _left_out(entry: RoundStatus) -> list[str]:
    tried_again = [f"tried again: {reason}" for reason in entry.aborted]
    return [f"{island}: {reason}" for island, reason in entry.left_out.items()] + tried_again
