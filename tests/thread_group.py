"""The ranks of one island as threads of the test process."""

from __future__ import annotations

import json
import threading
from typing import Any

from hf_diloco.inner.island import IslandGroup


class ThreadGroup(IslandGroup):
    """Ranks that meet in this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, items: dict[int, Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, meeting.parties
        self._meeting, self._items = meeting, items

    def sum(self, values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def gather(self, item: Any) -> list[Any]:
        self._items[self.rank] = json.dumps(item)
        self._meeting.wait()
        said = [json.loads(self._items[rank]) for rank in range(self.size)]
        self._meeting.wait()
        return said

    def from_leader(self, item: Any) -> Any:
        return self.gather(item)[0]
