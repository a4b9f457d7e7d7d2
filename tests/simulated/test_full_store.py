"""A store whose disk is full: it is freed of what is old, and the rounds go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_diloco.errors import StoreError
from hf_diloco.store.objects import ObjectStore
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


@pytest.mark.parametrize(("failure", "is_full"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_snapshot_that_cannot_be_written_costs_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: int, is_full: bool
) -> None:
    """Its second file; where the store is full, all that can be spared goes, and the first one with it."""
    folder = tmp_path / "store"
    meeting = Meeting(tmp_path, 1, keep_rounds=1000, snapshot_every=4)
    meeting.url = f"file://{folder}"
    island = meeting.island(0).train_to(6)
    island.session.close()
    write = os.write

    def fail(descriptor: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "snapshots/00000008/" in path and "momentum" in path:
            raise OSError(failure, os.strerror(failure))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail)
    island.train_to(9)
    island.session.close()
    assert island.missed == 0
    assert "no snapshot of round 8: " in caplog.text
    rounds = {kind: sorted(int(path.name) for path in (folder / kind).iterdir()) for kind in ("snapshots", "payloads")}
    assert rounds["snapshots"] == ([4] if is_full else [0, 4, 8])
    assert rounds["payloads"] == ([5, 6, 7, 8, 9] if is_full else list(range(1, 10)))
    island.train_to(12)
    island.session.close()
    assert (folder / "snapshots/00000012").exists()


def test_old_objects_that_cannot_be_deleted_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the right to delete was taken away."""

    def refuse(store: ObjectStore, paths: Sequence[str]) -> None:
        raise StoreError(f"{store.url} does not delete {paths[0]}")

    island = Meeting(tmp_path, 1, keep_rounds=1, snapshot_every=2).island(0)
    monkeypatch.setattr(ObjectStore, "delete", refuse)
    island.train_to(4)
    island.session.close()
    assert "old snapshots and pseudo-gradients stay in the store: memory://" in caplog.text
    assert "no snapshot" not in caplog.text
    assert island.session.rounds.archive.snapshots.newest(3) is not None
