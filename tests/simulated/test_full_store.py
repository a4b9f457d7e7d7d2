"""A store whose disk is full: it is freed of what is old, and the rounds go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.meetings import Meeting


def limit_folder(folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file below `folder` grows while they are longer than this together."""
    write = os.write

    def write_within_limit(descriptor: int, data: bytes) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name.is_relative_to(folder) and folder_bytes(folder) + len(data) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_within_limit)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_full_store_is_freed_and_rounds_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keep_rounds` alone would have the store keep everything."""
    folder = tmp_path / "store"
    meeting = Meeting(tmp_path, 1, keep_rounds=1000, snapshot_every=4, width=2000)
    meeting.url = f"file://{folder}"
    island = meeting.island(0)
    island.train(20)
    assert island.session.outer.round == 10
    limit_folder(folder, 2 * folder_bytes(folder), monkeypatch)  # records of rounds, which stay, need little
    island.train(60)
    assert island.missed, "it was full"
    assert island.session.outer.round > 27
    assert island.session.outer.steps < 8, "and the next round was not missed for the same reason"
