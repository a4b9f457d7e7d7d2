"""What the ranks of an island tell each other of their errors; the ranks are threads."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from hf_diloco.errors import DiLoCoError, PayloadError, StoreError
from hf_diloco.inner.island import IslandGroup
from tests.islands import try_islands


class Threads(IslandGroup):
    """Ranks that meet in this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, items: dict[int, Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, meeting.parties
        self._meeting, self._items = meeting, items

    def gather(self, item: Any) -> list[Any]:
        self._items[self.rank] = json.dumps(item)
        self._meeting.wait()
        return [json.loads(self._items[rank]) for rank in range(self.size)]


@pytest.mark.parametrize(
    ("met", "raised"),
    [
        ([None, None], None),
        ([None, PayloadError("gone", "a/b")], PayloadError),
        ([StoreError("silent"), None], StoreError),
        ([StoreError("silent"), PayloadError("gone", "a/b")], StoreError),
        ([PayloadError("gone", "a/b"), StoreError("silent")], PayloadError),
    ],
)
def test_all_ranks_raise_the_same_error(met: list[DiLoCoError | None], raised: type[DiLoCoError] | None) -> None:
    meeting, items = threading.Barrier(2), dict[int, Any]()

    def call(rank: int) -> None:
        def fail() -> None:
            error = met[rank]
            if error is not None:
                raise error

        Threads(rank, meeting, items).on_all(fail)

    found = try_islands(2, call)
    assert [type(one) if one is not None else None for one in found] == [raised] * 2
    assert str(found[0]) == str(found[1])
