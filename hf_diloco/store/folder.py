"""Objects as files of a folder, such as a network file system that several machines mount.

A reader sees an object whole or not at all, and a completed write survives a power failure: each file is written under
a temporary name (`NAME#...`, which no object has), flushed to the disk, and given its name in one atomic step (a
rename; or a hard link, to create it only if absent). Then the folder is flushed. A writer that is killed leaves at
most such an unfinished file, or an empty folder; `unfinished` finds them.

Symbolic links below the folder are never followed, neither to files nor to folders, to read, list, write or delete:
otherwise anyone who can write here could have files of another folder deleted. Anything but a regular file (a link, a
device) counts as an unreadable object. Folders are searched only as deep as object paths may go.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_diloco.utils.urls import MAX_SERVED_PATH

UNFINISHED = "#"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOST_AND_FOUND = "lost+found"  # at the top of a file system; only root may read it
_TRIES = 20
_PIECE_BYTES = 1 << 18
_LAST_TIME = datetime.max.replace(tzinfo=UTC).timestamp() - 1


class NoFileError(OSError):
    """A symbolic link, a folder or a device lies where an object should be."""


class GoneError(OSError):
    """The whole folder is gone, or was replaced by another one."""


@dataclass(frozen=True, order=True)
class Entry:
    """A listed object: its path, its size in bytes, and its modification time by the store's clock."""

    path: str
    size: int
    modified: datetime


@dataclass(frozen=True)
class Opened:
    """An object open for reading: size and time as in `Entry`; `read(start, length)` returns its bytes."""

    size: int
    modified: datetime
    read: Callable[[int, int], bytes]

    def pieces(self, start: int, end: int, most: int = 1 << 26) -> Iterator[bytes]:
        """Yields the bytes [start, end), at most `most` at a time; ends early where the object does."""
        while start < end and (piece := self.read(start, min(end - start, most))):
            yield piece
            start += len(piece)


class Folder:
    """Reads and writes files below a folder, by relative paths without `.` and `..`. Threads may share one.

    The folder exists, and may itself be a link.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._identity = os.stat(root).st_ino

    # Reading

    def greet(self) -> None:
        """Raises `OSError` if the folder cannot be read."""
        self.find("checks")

    def read(self, path: str, limit: int) -> bytes:
        """Reads a whole file.

        Raises `FileNotFoundError`, `NoFileError` if it is no regular file, and `OverflowError`, whose only argument is
        its size, if it has more than `limit` bytes.
        """
        with self.opened(path) as file:
            if file.size > limit:
                raise OverflowError(file.size)
            return b"".join(file.pieces(0, file.size))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Reads the bytes [start, end) of a file, fewer if it ends earlier; raises as `read`."""
        with self.opened(path) as file:
            return b"".join(file.pieces(start, end))

    def find(self, prefix: str = "") -> list[Entry]:
        """Lists all files below a folder, except unfinished ones."""
        return [entry for entry, is_file in self._walk(prefix) if is_file and UNFINISHED not in entry.path]

    def unfinished(self, after: str = "") -> list[Entry]:
        """Lists unfinished files, and empty folders as paths with a trailing slash; see `ObjectStore`."""
        found = self._walk("", after)
        return [one for one, is_file in found if (is_file and UNFINISHED in one.path) or one.path.endswith("/")]

    def links(self) -> list[str]:
        """Lists paths that are neither files nor folders, and folders too deep to search."""
        return [one.path for one, is_file in self._walk("") if not is_file and not one.path.endswith("/")]

    def _walk(self, prefix: str, after: str = "") -> Iterator[tuple[Entry, bool]]:
        """Yields what lies below a folder, and whether it is a file; empty folders have a trailing slash."""
        beside, _, first = after.rpartition("/")
        try:
            folder = self._enter(prefix)
        except (FileNotFoundError, NoFileError):
            return
        try:
            names = sorted(name for name in os.listdir(folder) if prefix or name != _LOST_AND_FOUND)
            for name in names if prefix != beside else names[bisect.bisect_left(names, first) :]:
                path = f"{prefix}/{name}" if prefix else name
                try:
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if stat.S_ISDIR(found.st_mode) and len(path) <= MAX_SERVED_PATH:
                    yield from self._walk(path, after)
                else:
                    yield Entry(path, found.st_size, _time(found)), stat.S_ISREG(found.st_mode)
            if not names and prefix:
                yield Entry(f"{prefix}/", 0, _time(os.fstat(folder))), False
        finally:
            os.close(folder)

    # Writing

    def create(self, path: str, data: bytes) -> None:
        """Writes a file; raises `FileExistsError` if its path is taken."""
        if self._is_taken(path):  # saves writing a temporary file
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._write(path, [data], _link)

    def _is_taken(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        try:
            with self._within(parent) as folder:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = True
    ) -> None:
        """Writes a file, and replaces an existing one; see `ObjectStore.put`."""
        self._write(path, cut(data, pace), _rename, is_lasting)

    def assemble(self, path: str, pieces: Iterable[bytes]) -> None:
        """Writes a file from pieces, and replaces an existing one."""
        self._write(path, pieces, _rename)

    def _write(
        self,
        path: str,
        data: Iterable[bytes | memoryview[Any]],
        finish: Callable[[str, str, int], None],
        is_lasting: bool = True,
    ) -> None:
        parent, _, name = path.rpartition("/")
        unfinished = f"{name}{UNFINISHED}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        folder, file = self._begin(parent, unfinished, is_lasting)
        try:
            try:
                with os.fdopen(file, "wb", buffering=0) as writer:
                    for piece in data:
                        _write_all(writer.fileno(), piece)
                    if is_lasting:
                        os.fsync(writer.fileno())
                try:
                    finish(unfinished, name, folder)
                except FileNotFoundError:  # taken for a killed writer's while this process hung: the caller retries
                    problem = "another process deleted it before it was complete"
                    raise BlockingIOError(errno.EAGAIN, problem, path) from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(unfinished, dir_fd=folder)
            if is_lasting:
                _flush(folder)
        except BaseException:
            self._drop_empty(parent)
            raise
        finally:
            os.close(folder)

    def _begin(self, parent: str, unfinished: str, is_lasting: bool) -> tuple[int, int]:
        """Creates missing parent folders and an empty file; retries if another island removes an empty folder."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                folder = self._enter(parent, is_lasting)
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    return folder, os.open(unfinished, flags, 0o666, dir_fd=folder)
                except BaseException:
                    os.close(folder)
                    raise
        raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again", str(self._root / parent))

    # Removing

    def delete(self, paths: Sequence[str]) -> None:
        """Removes files or links, and parent folders that become empty; absent files are no error."""
        for path in paths:
            parent, _, name = path.rpartition("/")
            with contextlib.suppress(FileNotFoundError):
                with self._within(parent) as folder:
                    os.unlink(name, dir_fd=folder)
                self._drop_empty(parent)

    def drop(self, path: str) -> None:
        """Removes an entry that `unfinished` found, if it is still there."""
        if path.endswith("/"):
            self._drop_empty(path.rstrip("/"))
        else:
            self.delete([path])

    def move(self, path: str, target: str) -> None:
        """Moves a file or link, without following it; raises `FileExistsError` if `target` is taken."""
        (parent, _, name), (to_parent, _, to_name) = path.rpartition("/"), target.rpartition("/")
        with self._within(parent) as folder, self._within(to_parent, is_lasting=True) as to_folder:
            if to_name in os.listdir(to_folder):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            os.rename(name, to_name, src_dir_fd=folder, dst_dir_fd=to_folder)
            _flush(to_folder)
        self._drop_empty(parent)

    def _drop_empty(self, folder: str) -> None:
        """Removes a folder and its parents as long as they are empty."""
        while folder:
            parent, _, name = folder.rpartition("/")
            try:
                with self._within(parent) as above:
                    os.rmdir(name, dir_fd=above)
            except OSError:  # not empty, or removed by another island
                return
            folder = parent

    # Opening

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Opened]:
        """Opens a file for reading; if it is replaced meanwhile, this still reads the old one. Raises as `read`."""
        parent, _, name = path.rpartition("/")
        with self._within(parent) as folder, _no_file_is_told(path):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise NoFileError(errno.EINVAL, "is no file", path)
            yield Opened(found.st_size, _time(found), lambda start, length: os.pread(file, length, start))
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _within(self, folder: str, is_lasting: bool | None = None) -> Iterator[int]:
        """`_enter` as a context manager."""
        here = self._enter(folder, is_lasting)
        try:
            yield here
        finally:
            os.close(here)

    def _enter(self, folder: str, is_lasting: bool | None = None) -> int:
        """Opens a folder below the root, "" for the root, without following a link on the way.

        If `is_lasting` is None the folder exists. Otherwise it is created; with True it survives a power failure.
        """
        here = self._open_root()
        done: list[str] = []
        for name in folder.split("/") if folder else ():
            done.append(name)
            try:
                if is_lasting is not None:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=here)
                        if is_lasting:
                            _flush(here)
                with _no_file_is_told("/".join(done)):
                    below = os.open(name, _FOLDER, dir_fd=here)
            finally:
                os.close(here)
            here = below
        return here

    def _open_root(self) -> int:
        try:
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise GoneError(errno.ENODEV, "the folder is gone: is it still mounted?", str(self._root)) from None
        if os.fstat(root).st_ino != self._identity:
            os.close(root)
            raise GoneError(errno.ENODEV, "another folder is there now: is it still mounted?", str(self._root))
        return root


def _flush(folder: int) -> None:
    """Flushes a folder's entries to the disk, if its file system supports that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush folders
            raise


def _link(unfinished: str, name: str, folder: int) -> None:
    try:
        os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        raise OSError(error.errno, "the file system has no hard links, by which a file is created only once") from None


def _rename(unfinished: str, name: str, folder: int) -> None:
    os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _no_file_is_told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise NoFileError(error.errno, "is a symbolic link or no folder, which is not followed", path) from None
        raise


def cut(view: memoryview[Any], pace: Callable[[int], None] | None) -> Iterator[memoryview[Any]]:
    """Yields pieces of the bytes, each as soon as it may be written; see `Folder.put`."""
    for low in range(0, len(view), _PIECE_BYTES):
        piece = view[low : low + _PIECE_BYTES]
        if pace:
            pace(len(piece))
        yield piece


def _write_all(file: int, piece: bytes | memoryview[Any]) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(file, view) :]


def _time(found: os.stat_result) -> datetime:
    """Returns a file's modification time; out-of-range values, which anyone may set, are clamped."""
    return datetime.fromtimestamp(min(max(found.st_mtime, 0.0), _LAST_TIME), UTC)
