"""What the ranks of an island tell each other of their errors; the ranks are threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.errors import CheckpointError, DiLoCoError, PayloadError, StoreError
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from tests.islands import try_islands
from tests.thread_group import ThreadGroup


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

        ThreadGroup(rank, meeting, items).on_all(fail)

    found = try_islands(2, call)
    assert [type(one) if one is not None else None for one in found] == [raised] * 2
    assert str(found[0]) == str(found[1])


def test_a_rank_whose_own_writer_of_a_checkpoint_fails_is_named_on_the_others(tmp_path: Path) -> None:
    meeting, items = threading.Barrier(2), dict[int, Any]()

    def call(rank: int) -> None:
        ranks = ThreadGroup(rank, meeting, items)

        def write(failures: list[str]) -> None:
            if rank == 1:
                raise ValueError("no such shard")

        CheckpointFolder(tmp_path, ranks, "record", lambda _: [], None, lambda: None, True, False).begin(
            tmp_path / "one", write
        )

    first, second = try_islands(2, call)
    assert isinstance(first, CheckpointError)
    assert str(first) == f"{tmp_path / 'one'} is not whole: rank 1 failed to write it (ValueError: no such shard)"
    assert isinstance(second, ValueError)


def test_a_checkpoint_is_looked_through_when_all_ranks_have_written_their_part(tmp_path: Path) -> None:
    """As a 1-bit optimizer's callback does, which writes each rank's errors."""
    meeting, items, is_looked_through = threading.Barrier(2), dict[int, Any](), threading.Event()

    def call(rank: int) -> bool:
        ranks = ThreadGroup(rank, meeting, items)
        checkpoints = CheckpointFolder(tmp_path, ranks, "record", lambda _: [], None, lambda: None, True, False)
        is_too_early = rank == 1 and is_looked_through.wait(0.2)  # while this rank writes
        checkpoints.complete(tmp_path / "one", lambda _: is_looked_through.set(), limit=0)
        return is_too_early

    assert try_islands(2, call) == [False, False]
