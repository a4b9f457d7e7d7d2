"""What processes say of themselves in the store: that they have claimed a number, and that they live."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hf_diloco.store.log import Number, Record

Phase = Literal["joining", "passing", "training", "syncing", "left", "finished"]


class IncarnationRecord(Record):
    """A process that runs as an island.

    Attributes:
        host: its host's name, for people.
        machine: the space of process numbers it lives in; "" if unknown.
        pid: its number there.
        folder: where it writes.
        identities: the public keys that it believes, by island; none where islands have no identities.
        nonce: random: of two processes that are otherwise alike, as in containers, one has written the record.
    """

    host: str
    machine: str
    pid: Number
    folder: str
    identities: dict[str, list[str]] = Field(default_factory=dict)
    nonce: str = ""


class HeartbeatRecord(Record):
    """An island's sign of life.

    Attributes:
        count: goes up with every heartbeat.
        phase: "joining" until it holds the run's state; "passing" while it then lets a round pass, for which nobody is
            to wait for it; "left" and "finished" are last words.
        round: rounds completed.
        steps: inner steps since it last took part in one.
        num_ranks: processes of the island.
        tokens_per_second: recent speed of the whole island; 0 if unknown.
        refused: islands in whose name it was shown what it does not believe, each with the last reason.
        misses: neighbours that a node has lost, and looks for.
    """

    count: Number
    phase: Phase
    round: Number
    steps: Number
    num_ranks: Number = Field(ge=1)
    tokens_per_second: float = Field(ge=0)
    refused: dict[str, str] = Field(default_factory=dict)
    misses: list[Number] = Field(default_factory=list)


def incarnation_path(island: int, number: int) -> str:
    """Where the incarnation of an island's process lies."""
    return f"incarnations/{island}/{number:06d}.json"
