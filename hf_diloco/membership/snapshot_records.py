"""What a snapshot of the outer state says about itself, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from hf_diloco.errors import PayloadError
from hf_diloco.store.log import Record


class StartRecord(Record):
    """The snapshot that a run starts from: its folder."""

    folder: str


class SnapshotRecord(Record):
    """One rank's part of a snapshot.

    Attributes:
        round: rounds completed.
        rank, num_ranks: whose part it is, and how many there are.
        state: digest of the whole outer parameters.
        tensors: where each tensor's part is (see `transport.object_info.ObjectInfo`).
        numbers: what the method keeps besides, equal on all ranks.
    """

    round: int = Field(ge=0)
    rank: int = Field(ge=0)
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
        folder: where they are.
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
    number = path.split("/")[1]
    return int(number) if number.isdecimal() else -1
