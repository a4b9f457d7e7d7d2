"""Who is there and misses somebody: each node that looks for others says so, again and again.

    calls/NODE             which of its starts this is, whether it takes steps, whom it misses, and a number that grows

A node that is gone says nothing new, whatever it said last; so nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hf_diloco.errors import PayloadError
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.records import Record, whole_number


@dataclass(frozen=True)
class Announcement:
    """What a node says of itself.

    Attributes:
        start: which of its starts this is, from 1.
        is_in: it takes steps; or else it waits to be let in.
        misses: the neighbours that it looks for.
    """

    start: int
    is_in: bool
    misses: frozenset[int]


class Discovery:
    """One node's, and what it hears of its neighbours'.

    Attributes:
        board: the mesh's.
        node: this node.
        start: which of its starts this is.
    """

    def __init__(self, board: Board, node: int, start: int) -> None:
        self.board = board
        self.node = node
        self.start = start
        self._number = 0
        self._heard: dict[int, Record] = {}

    def announce(self, misses: Collection[int], is_in: bool) -> None:
        """This node is there, and looks for others."""
        self._number += 1
        record = {"start": self.start, "is_in": is_in, "misses": sorted(misses), "number": self._number}
        self.board.put(f"calls/{self.node}", record)

    def announcement_of(self, peer: int, start: int) -> Announcement | None:
        """What a neighbour says, if it is there.

        Args:
            peer: the neighbour.
            start: the last of its starts that is known. Of that one, only what changes shows that it is still there.

        Raises:
            PayloadError: what is said makes no sense.
        """
        record = self.board.read(f"calls/{peer}", peer)
        before = self._heard.get(peer)
        if record is None or record == before:
            return None
        self._heard[peer] = record
        said = _read_announcement(record, peer)
        is_known_to_be_there = said.start > start or (before is not None and said.start == start)
        return said if is_known_to_be_there else None


def _read_announcement(record: Record, peer: int) -> Announcement:
    misses = record.get("misses")
    if not isinstance(misses, list) or not all(isinstance(node, int) for node in misses):
        raise PayloadError(
            f"node {peer} shows no list of nodes that it misses ({record}): give all nodes the same version, and the "
            "rendezvous a port of its own"
        )
    return Announcement(whole_number(record, "start", peer), record.get("is_in") is True, frozenset(misses))
