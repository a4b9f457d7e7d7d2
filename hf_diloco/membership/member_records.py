"""Records of processes in the store: the claim of an island's number, and heartbeats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hf_diloco.store.log import Number, Record

Phase = Literal["joining", "passing", "training", "syncing", "left", "finished"]


class IncarnationRecord(Record):
    """A process that has claimed an island's number.

    Attributes:
        host: its host's name, for messages.
        machine: identifies its PID namespace; "" if unknown.
        pid: its process id there.
        folder: where it writes.
        identities: the public keys that it trusts, by island; empty if islands have no identities.
        nonce: random, to tell apart processes that are otherwise alike, as in containers.
    """

    host: str
    machine: str
    pid: Number
    folder: str
    identities: dict[str, list[str]] = Field(default_factory=dict)
    nonce: str = ""


class HeartbeatRecord(Record):
    """An island's heartbeat.

    Attributes:
        count: increases with every heartbeat.
        phase: "joining" until it holds the run's state; "passing" while it then skips a round, for which no island
            should wait for it; "left" and "finished" are final.
        round: rounds completed.
        steps: inner steps since it last took part in a round.
        num_ranks: processes of the island.
        tokens_per_second: recent speed of the whole island; 0 if unknown.
        refused: islands in whose name it received unauthenticated data, each with the last reason.
        misses: neighbours that a node has lost and is looking for.
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
    """Returns the path of the record of an island's process."""
    return f"incarnations/{island}/{number:06d}.json"
