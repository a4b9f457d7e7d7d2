"""What the parts of rounds among islands that come and go have in common; and what this process offers to such rounds:
its pseudo-gradients, where others find them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import OfferRecord, author_of
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.engines import Engine
from hf_diloco.rounds.round import Contribution
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.utils.clock import Clock

LOOK_SECONDS = 0.2
"""How often who waits for others looks into the store."""


@dataclass(frozen=True)
class RoundContext:
    """One rank's side of the run.

    Attributes:
        outer: this rank's outer state.
        island: the ranks of this island; a group that nothing else uses while a thread carries out rounds.
        engines: how values get from island to island, one a fragment.
        snapshots: of the run.
        quorum: decides rounds; on the island's leader only.
        incarnation: of this process.
        clock: by which it waits.
    """

    outer: OuterState
    island: IslandGroup
    engines: Sequence[Engine]
    snapshots: Snapshots
    quorum: Quorum | None
    incarnation: int
    clock: Clock

    def engine_of(self, number: int) -> Engine:
        """The engine of the fragment whose round `number` is."""
        return self.engines[self.outer.number_of(number)]


@dataclass
class _Announced:
    """The newest that others can read: for which round, where, and how many inner steps are in it."""

    serial: int = -1
    round: int = -1
    steps: int = 0
    objects: list[dict[str, Any]] = field(default_factory=list)


class Offers:
    """One rank's part in them. What announces is collective over the island's ranks.

    Args:
        context: of the island's rounds.
    """

    def __init__(self, context: RoundContext) -> None:
        self.outer = context.outer
        self.config = self.outer.config
        self.island = context.island
        self._context = context
        self._incarnation = context.incarnation
        self._author = author_of(self.config.island, self._incarnation)
        self._announced = _Announced()

    def make(self, own: Contribution) -> OfferRecord:
        """Has others find a pseudo-gradient, unless they do already, and says what there is."""
        engine = self._context.engine_of(own.number)
        if not self.holds(own.number, own.steps):
            (tag,) = self.island.from_leader([f"{self._author}-{time.monotonic_ns()}"])
            said, traffic = self.island.on_all(lambda: engine.announce(own.delta, own.number, tag))
            own.clock.traffic += traffic
            objects = self.island.gather(said)
            self._announced = _Announced(self._announced.serial + 1, own.number, own.steps, objects)
        offer = own.offer(self.config.island, self._incarnation, self._announced.serial, self.outer.outer_hash)
        return offer.model_copy(update={"objects": self._announced.objects, "links": engine.links})

    def holds(self, number: int, steps: int) -> bool:
        """Whether what was announced last is for round `number`, with so many inner steps."""
        return (self._announced.round, self._announced.steps) == (number, steps)

    def has_offered(self, number: int) -> bool:
        """Whether what was announced last is for round `number`."""
        return self._announced.round == number

    def is_newest(self, offer: OfferRecord | None) -> bool:
        """Whether an offer of this island is this process's last."""
        newest = self._incarnation, self._announced.serial
        return offer is not None and (offer.incarnation, offer.serial) == newest

    def is_own(self, offer: OfferRecord) -> bool:
        """Whether an offer is this process's."""
        return offer.incarnation == self._incarnation

    def forget(self, path: str) -> None:
        """Has `make` announce a pseudo-gradient anew if its offer is the one at `path`, which was of no use."""
        if f"/{self._author}-{self._announced.serial:06d}." in path:
            self._announced.round = -1
