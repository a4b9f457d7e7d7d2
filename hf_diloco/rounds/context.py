"""What the parts of rounds among islands that come and go have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_diloco.config import DiLoCoConfig
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.quorum import Quorum
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.engines import Engine
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.utils.clock import Clock


@dataclass(frozen=True)
class RoundContext:
    """One rank's side of the run.

    Attributes:
        config: the outer loop's settings.
        outer: this rank's outer state.
        island: the ranks of this island; a group that nothing else uses while a thread carries out rounds.
        engines: how values get from island to island, one a fragment.
        snapshots: of the run.
        quorum: decides rounds; on the island's leader only.
        incarnation: of this process.
        clock: by which it waits.
    """

    config: DiLoCoConfig
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
