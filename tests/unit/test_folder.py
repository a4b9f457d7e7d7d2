"""Objects as files of a folder: what outlasts a loss of power, what is not followed, what is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_diloco.errors import ForgedError, RendezvousError, StoreError, StoreFullError
from hf_diloco.store.folder import Entry, Folder, GoneError
from hf_diloco.store.log import Record, RunLog
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal


class Word(Record):
    text: str


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> ObjectStore:
    return ObjectStore(f"file://{root}")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_bytes(b"precious")
    (folder / "deep" / "file").write_bytes(b"precious")
    return folder


def precious(elsewhere: Path) -> list[bytes]:
    return [(elsewhere / "file").read_bytes(), (elsewhere / "deep" / "file").read_bytes()]


# Symbolic links


def test_a_linked_folder_is_neither_listed_nor_emptied(store: ObjectStore, root: Path, elsewhere: Path) -> None:
    store.put("payloads/00000001/a", b"x")
    (root / "payloads" / "00000002").symlink_to(elsewhere)
    assert [path for path, _ in store.list("payloads")] == ["payloads/00000001/a"]
    assert store.list("payloads/00000002") == []
    for path in ("payloads/00000002/file", "payloads/00000002/deep/file"):
        with pytest.raises(StoreError, match="symbolic link"):
            store.delete([path])
    assert precious(elsewhere) == [b"precious", b"precious"]
    assert store.links() == ["payloads/00000002"]


def test_nothing_is_read_or_written_through_a_link(store: ObjectStore, root: Path, elsewhere: Path) -> None:
    (root / "folder").symlink_to(elsewhere)
    (root / "plan.json").symlink_to(elsewhere / "file")
    for path in ("folder/file", "plan.json"):
        with pytest.raises(StoreError, match=r"symbolic link.*remove it"):
            store.get(path, 100)
        with pytest.raises(StoreError):
            store.get_range(path, 0, 2)
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="symbolic link"):
            write("folder/new", b"new")
    assert not store.create("plan.json", b"mine")
    store.put("plan.json", b"mine")  # in place of the link
    assert precious(elsewhere) == [b"precious", b"precious"]
    assert sorted(os.listdir(elsewhere)) == ["deep", "file"]


def test_a_link_in_place_of_a_record_counts_as_forged(store: ObjectStore, root: Path, elsewhere: Path) -> None:
    """So that whatever passes over damaged records passes over it."""
    log = RunLog(store, Seal(b"", "run"))
    (root / "a.json").symlink_to(elsewhere / "file")
    (root / "b.json").mkdir()
    os.mkfifo(root / "c.json")
    for name in ("a", "b", "c"):
        with pytest.raises(ForgedError):
            log.read(f"{name}.json", Word)
        assert log.read_or_refuse(f"{name}.json", Word) is None


def test_folders_are_looked_into_as_far_as_paths_may_go(store: ObjectStore, root: Path) -> None:
    """Else somebody who may write there could end all who list what lies there, as Python's stack has an end."""
    store.put("rounds/1/plan.json", b"a plan")
    deepest = root / "rounds" / Path(*["a"] * 600)
    deepest.mkdir(parents=True)
    (deepest / "file").touch()
    assert store.list("rounds") == [("rounds/1/plan.json", 6)]
    assert store.unfinished() == []
    (too_deep,) = store.links()
    assert too_deep.startswith("rounds/a/a/")


def test_deleting_a_link_deletes_the_link(store: ObjectStore, root: Path, elsewhere: Path) -> None:
    (root / "a").symlink_to(elsewhere / "file")
    store.delete(["a"])
    assert not (root / "a").is_symlink()
    assert precious(elsewhere) == [b"precious", b"precious"]


# Loss of power


def test_contents_and_names_are_flushed_before_a_write_returns(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the file, then the folder that has got its name; and the folders that were made."""
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    store.create("rounds/1/plan.json", b"who")
    names = [Path(path).relative_to(root).as_posix() for path in flushed]
    assert names[:2] == [".", "rounds"]
    assert names[2].startswith("rounds/1/plan.json#")
    assert names[3:] == ["rounds/1"]
    flushed.clear()
    store.put("rounds/1/plan.json", b"again")
    assert len(flushed) == 2
    flushed.clear()
    store.put("heartbeats/0/1.json", b"alive", is_lasting=False)
    assert flushed == []


def test_what_is_created_gets_its_name_when_it_is_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers and other writers look at the moment before the name is given, and the one after."""
    seen: list[bytes | None] = []
    link = os.link

    def look_and_link(*args: object, **kwargs: object) -> None:
        seen.append(store.get("plan.json", 10))
        assert store.list() == []
        link(*args, **kwargs)  # type: ignore[arg-type]
        seen.append(store.get("plan.json", 10))

    monkeypatch.setattr(os, "link", look_and_link)
    assert store.create("plan.json", b"whole")
    assert seen == [None, b"whole"]
    assert not store.create("plan.json", b"other")


# What is left behind


def test_deleting_the_last_object_removes_the_folders_above(store: ObjectStore, root: Path) -> None:
    store.put("payloads/00000001/0-1-9/rank-00000.bin", b"x")
    store.put("payloads/00000002/0-1-9/rank-00000.bin", b"x")
    store.delete(["payloads/00000001/0-1-9/rank-00000.bin"])
    assert sorted(path.name for path in (root / "payloads").iterdir()) == ["00000002"]
    store.delete(["payloads/00000002/0-1-9/rank-00000.bin"])
    assert list(root.iterdir()) == []


def test_what_is_cleared_up_while_its_writer_hangs_is_written_again(store: ObjectStore) -> None:
    cleared: list[Entry] = []

    def hang(_: int) -> None:
        if not cleared:
            cleared.extend(store.unfinished())
            store.drop(cleared)

    store.put("some/where", b"precious", hang)
    assert [entry.path.partition("#")[0] for entry in cleared] == ["some/where"]
    assert store.get("some/where", 100) == b"precious"


def test_unfinished_files_and_empty_folders_are_found_and_dropped(store: ObjectStore, root: Path) -> None:
    store.put("payloads/00000002/0-1-9/rank-00001.bin", b"x")
    (root / "payloads" / "00000001" / "0-1-9").mkdir(parents=True)
    (root / "payloads" / "00000002" / "0-1-9" / "rank-00000.bin#1").write_bytes(b"half")
    found = store.unfinished()
    assert [entry.path for entry in found] == [
        "payloads/00000001/0-1-9/",
        "payloads/00000002/0-1-9/rank-00000.bin#1",
    ]
    store.drop(found)
    assert store.unfinished() == []
    assert store.list() == [("payloads/00000002/0-1-9/rank-00001.bin", 1)]
    assert not (root / "payloads" / "00000001").exists()


def test_what_nobody_finished_is_not_looked_for_in_records_of_long_ago(store: ObjectStore, root: Path) -> None:
    store.put("rounds/00000001/00/plan.json", b"x")
    for path in ("payloads/00000001/a.bin#1", "rounds/00000001/00/plan.json#1", "rounds/00000009/00/plan.json#1"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"half")
    found = [entry.path for entry in store.unfinished("rounds/00000009")]
    assert found == ["payloads/00000001/a.bin#1", "rounds/00000009/00/plan.json#1"]


def test_nothing_is_moved_over_what_is_there(root: Path) -> None:
    root.mkdir()
    folder = Folder(root)
    for path in ("payloads/1", "damaged/1"):
        folder.create(path, path.encode())
    with pytest.raises(FileExistsError):
        folder.move("payloads/1", "damaged/1")
    assert [folder.read(path, 100) for path in ("payloads/1", "damaged/1")] == [b"payloads/1", b"damaged/1"]
    folder.move("payloads/1", "damaged/2")
    assert [entry.path for entry in folder.find()] == ["damaged/1", "damaged/2"]
    assert folder.unfinished() == [], "nor is the empty folder left"


def test_no_operation_leaves_a_file_or_a_folder_open(root: Path, elsewhere: Path) -> None:
    """A run has many thousands, and its process may have a thousand files open."""
    root.mkdir()
    (root / "link").symlink_to(elsewhere)
    folder = Folder(root)
    operations: list[Callable[[], object]] = [
        lambda: folder.put("a/b/c", memoryview(b"x")),
        lambda: folder.create("a/b/d", b"y"),
        lambda: folder.create("a/b/d", b"z"),  # is there
        lambda: folder.put(f"a/{'d' * 300}", memoryview(b"z")),  # is no name of a file
        lambda: folder.create("link/d", b"z"),  # is not followed, nor by what comes next
        lambda: folder.read("link/file", 100),
        lambda: folder.read("link", 100),
        lambda: folder.delete(["link/file"]),
        lambda: folder.read("a/b/d", 100),
        lambda: folder.read("a/b/d", 0),  # is too large
        lambda: folder.read("a/b", 100),  # is no file
        lambda: folder.read("a/absent", 100),
        lambda: folder.read_range("absent/file", 0, 1),
        folder.find,
        lambda: folder.find("absent"),
        folder.unfinished,
        folder.links,
        lambda: folder.move("a/b/d", "e/f"),
        lambda: folder.move("a/b/d", "e/f"),  # is gone
        lambda: folder.delete(["e/f", "e/f", "a/b/c"]),
    ]
    num_open = len(os.listdir("/proc/self/fd"))
    for number, operation in enumerate(operations):
        with contextlib.suppress(OSError, OverflowError):
            operation()
        assert len(os.listdir("/proc/self/fd")) == num_open, number
    assert precious(elsewhere) == [b"precious"] * 2
    assert [path.name for path in root.iterdir()] == ["link"]
    root.rename(root.with_name("moved"))
    root.mkdir()
    with pytest.raises(GoneError):
        folder.find()
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that has as many bytes left as the list says."""
    left, write = [0], os.write

    def write_while_there_is_space(fd: int, data: bytes) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num = write(fd, data[: left[0]])
        left[0] -= num
        return num

    monkeypatch.setattr(os, "write", write_while_there_is_space)
    return left


def test_a_full_disk_is_told_and_nothing_is_left(store: ObjectStore, root: Path, full_disk: list[int]) -> None:
    full_disk[0] = 1000
    for write in (store.put, store.create):
        with pytest.raises(StoreFullError, match=r"does not \w+ payloads/1/a \(No space left on device\)"):
            write("payloads/1/a", bytes(10_000))
    assert list(root.iterdir()) == []


# The folder itself


def test_a_folder_whose_parent_is_missing_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=rf"there is no folder {tmp_path}/mnt\. .*mount it"):
        ObjectStore(f"file://{tmp_path}/mnt/run")
    assert not (tmp_path / "mnt").exists()


def test_a_folder_that_is_itself_a_link_is_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    ObjectStore(f"file://{tmp_path}/alias").put("a", b"x")
    assert (tmp_path / "real" / "a").read_bytes() == b"x"


def test_what_lies_at_the_top_of_a_disk_is_nobodys_business(store: ObjectStore, root: Path) -> None:
    store.put("run.json", b"x")
    (root / "lost+found" / "#1").mkdir(parents=True)
    assert store.list() == [("run.json", 1)]
    assert store.unfinished() == []


@pytest.mark.parametrize("seconds", [1 << 40, -(1 << 40)])
def test_a_time_that_is_no_date_harms_nothing(seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:  # it keeps any
        store = ObjectStore(f"file://{root}")
        store.put("a", b"x")
        os.utime(f"{root}/a", (seconds, seconds))
        assert store.list() == [("a", 1)]


def test_a_file_system_that_flushes_no_folders_is_used(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", flush)
    assert store.create("a/b", b"x")
    assert store.get("a/b", 1) == b"x"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_of_another_user_is_told_with_a_remedy() -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o777)
        store = ObjectStore(f"file://{root}")
        store.put("offers/0.json", b"x")
        os.seteuid(65534)
        try:
            with pytest.raises(StoreError, match=r"\(Permission denied\): this user must .* one group.* umask 002"):
                store.put("offers/1.json", b"x")
        finally:
            os.seteuid(0)


def test_a_move_that_is_refused_keeps_no_file_open(store: ObjectStore, root: Path, elsewhere: Path) -> None:
    store.put("a/b", b"x")
    (root / "aside").symlink_to(elsewhere)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StoreError, match="symbolic link"):
            store.move("a/b", "aside/b")
    assert len(os.listdir("/proc/self/fd")) == before
