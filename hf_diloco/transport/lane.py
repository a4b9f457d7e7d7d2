"""What the ends of direct connections agree on before they connect."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import Store

from hf_diloco.sealing import ISLANDS, LinkKey, Parties
from hf_diloco.transport.rate import RateLimit


@dataclass(frozen=True)
class Lane:
    """One end of a lane, whose owners are joined each to each.

    Attributes:
        store: where the owners find each other's ports; reachable from all islands.
        name: unique in the run.
        island: this island's number.
        num_islands: islands in the run.
        address: local address to listen on, as the other islands see it.
        timeout: seconds that connecting, and later each whole exchange, may take.
        key: of the run; with one, the others prove that they hold it, and all that is exchanged is sealed. Default:
            nobody proves anything, and tensors go as they are.
        num_connections: between any two owners, the same on all.
        rate_limit: for all that this process sends; lanes may share one. Default: none.
        parties: which islands the owners are; default: of their numbers.
    """

    store: Store
    name: str
    island: int
    num_islands: int
    address: str
    timeout: float
    key: LinkKey | None = None
    num_connections: int = 1
    rate_limit: RateLimit = field(default_factory=RateLimit)
    parties: Parties = ISLANDS

    @property
    def peers(self) -> list[int]:
        """All owners but this one."""
        return [peer for peer in range(self.num_islands) if peer != self.island]
