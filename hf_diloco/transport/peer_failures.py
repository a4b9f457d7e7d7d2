"""Whom an exchange lost: islands that give up one after the other must not blame each other for it."""

from __future__ import annotations

import time
from functools import partial

from torch.distributed import PrefixStore, Store

from hf_diloco.errors import DiLoCoError
from hf_diloco.utils.threads import call_within

NOTE_SECONDS = 2.0
"""How long the store may take, and, where nothing else is said, a note that an island is about to leave."""


class LossNotes:
    """One island's notes in the store, one a lane.

    An island that loses another writes its number down, and only then closes its own connections. So whoever finds a
    connection closed can tell an island that is gone from one that merely followed.

    Args:
        store: reaches all islands; island 0 keeps it.
        name: the lane's name.
        island: this island's number.
        patience: seconds that an island which timed out waits for another's note. All time out at about the same
            moment: as far apart as they began.
    """

    def __init__(self, store: Store, name: str, island: int, patience: float = NOTE_SECONDS) -> None:
        self._store = PrefixStore(f"lost/{name}", store)
        self._island = island
        self._patience = patience

    def find_first(self, peer: int, timed_out: bool) -> int:
        """Notes that `peer` is gone, or late, and returns the island with which it began.

        Args:
            peer: whom this island found missing.
            timed_out: nothing was closed: `peer` may be about to find out the same and leave its note.
        """
        patience = self._patience if timed_out else 0.0
        suspect, asked = peer, {self._island}
        try:
            call_within(NOTE_SECONDS, lambda: self._store.set(str(self._island), str(peer)))
            while suspect not in asked:
                asked.add(suspect)
                note = call_within(patience + NOTE_SECONDS, partial(self._read, suspect, patience))
                if note is None:
                    return suspect
                suspect = note
        except (RuntimeError, TimeoutError, ValueError):  # the store is gone, or no store of ours
            return 0
        except DiLoCoError:  # a run's log: who keeps it is none of the islands
            return peer
        return peer  # they blame each other: it is the link that is gone

    def _read(self, island: int, patience: float) -> int | None:
        deadline = time.monotonic() + patience
        while not self._store.check([str(island)]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return int(self._store.get(str(island)))
