"""Objects in a bucket or folder that all islands reach; the protocol needs only *create if absent* of the store.

`utils.urls` lists the forms of its address. Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*), or from
the provider's machine identity.

A reader sees an object whole or not at all, and a completed write survives a power failure; `folder` says how files do
that.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, ParamSpec, TypeVar

from obstore.exceptions import BaseError

from hf_diloco.errors import RendezvousError, StoreError
from hf_diloco.store.backends import Cloud, Server, lacks_bucket, open_backend
from hf_diloco.store.failures import (
    AbsentError,
    Failures,
    NotYetVisibleError,
    TooLargeError,
    TruncatedError,
    UnreadableError,
    reason_of,
)
from hf_diloco.store.folder import Entry, Folder, NoFileError
from hf_diloco.store.long_poll import ListingCache, PollRequest, PollResponse
from hf_diloco.utils.urls import MAX_PATH, check_store_url, is_object_path

P = ParamSpec("P")
T = TypeVar("T")

_BEYOND_END = re.compile(r"InvalidRange|416 Range|range was invalid|Invalid range|starting at \d+, but object")

NEAR = frozenset({"memory", "file"})
"""Schemes of stores that answer faster than a thread starts."""


class ObjectStore:
    """Objects under one prefix of an object store. Threads may share one; a forked process may not use its parent's.

    Paths are relative: segments of letters, digits and ``._=+-``, joined by ``/``. Transient failures are retried with
    growing pauses. If the store is silent, a call fails after about `timeout` seconds. A transfer that makes progress
    may take longer: the limit applies to each read, and to each uploaded part of 5 MiB, which must complete within
    half of it. Every call raises `StoreError` if there is no answer, or access is denied.

    Args:
        url: one of the forms that `utils.urls` lists.
        read_only: only read; a folder is not created, and need not be writable.
        gone_after: seconds without a listener at a server's port after which it counts as lost; default: as long as it
            may be silent, because a server may restart.

    Attributes:
        tells_changes: this is a server of ours, which answers a `PollRequest`.

    Raises:
        ConfigError: the URL has none of these forms.
        RendezvousError: the store cannot be reached, does not exist or denies access.
    """

    def __init__(
        self, url: str, timeout: float = 30.0, read_only: bool = False, gone_after: float | None = None
    ) -> None:
        self.url = check_store_url(url)
        self.timeout = timeout
        self._scheme = self.url.partition(":")[0]
        self.listings = ListingCache()
        self._failures = Failures(self.url, timeout, read_only, gone_after is not None)
        self._patience = 0.6 * timeout
        self._patience_if_refused = self._patience if gone_after is None else gone_after
        try:
            self._backend = open_backend(self.url, timeout, read_only)
            self.tells_changes = isinstance(self._backend, Server)
            self._retry("list", "", self._backend.greet)
        except StoreError as error:
            raise RendezvousError(f"the rendezvous cannot be used: {error}") from None
        except (BaseError, OSError, ValueError) as error:
            raise RendezvousError(
                f"the rendezvous {self.url} cannot be opened ({reason_of(error)}): {self._failures.remedy()}"
            ) from None

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r}, timeout={self.timeout:g})"

    def check_creation(self) -> None:
        """Raises `RendezvousError` if the store lets a second creation overwrite the first, as some do that speak S3's
        protocol: all agreement rests on *create if absent*."""
        path = f"checks/{uuid.uuid4().hex}"
        probe = copy(self)  # its client does not repeat a request that the store does not know (501)
        probe._backend = open_backend(self.url, self.timeout, False, max_retries=0)
        keeps_first = probe.create(path, b"first") and not probe.create(path, b"second")
        self.delete([path])
        if not keeps_first:
            raise RendezvousError(
                f"{self.url} overwrites what was to be created only if absent (If-None-Match is ignored): "
                "islands cannot agree there; use another store, or a newer version of this one"
            )

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object unless it exists; returns whether it holds `data` now.

        True also if it held the same bytes before, because the answer to an earlier attempt may have been lost.
        Competing writers must write different bytes. After a `StoreError` it is unknown whether the object was
        written: retry.
        """
        try:
            return self._create_or_read(path, data, len(data)) == data
        except OverflowError:
            return False

    def decide(self, path: str, data: bytes, limit: int) -> bytes:
        """Writes an object unless it exists; returns its content, at most `limit` bytes. Raises as `get`."""
        try:
            return self._create_or_read(path, data, limit)
        except OverflowError as size:
            raise self._too_large(path, size, limit) from None

    def _create_or_read(self, path: str, data: bytes, limit: int) -> bytes:
        _check_path(path)

        def attempt() -> bytes:
            with suppress(FileExistsError):
                found = self._backend.create(path, data)
                return data if found is None else found
            try:
                return self._backend.read(path, limit)
            except FileNotFoundError:  # deleted meanwhile, or the store rejected two concurrent writers
                raise NotYetVisibleError from None
            except NoFileError:
                return b""

        return self._write("create", path, attempt)

    def _too_large(self, path: str, size: OverflowError, limit: int) -> TooLargeError:
        return TooLargeError(f"{self.url}: {path} has {size} bytes, more than the {limit} that it may have")

    def get_tagged(self, path: str, limit: int) -> tuple[str, bytes | None] | None:
        """Returns an object's tag, for `replace`, and its bytes up to `limit`; None if absent. Folders have no
        tags."""
        _check_path(path)
        assert isinstance(self._backend, Cloud)
        try:
            return self._retry("read", path, self._backend.read_tagged, path, limit)
        except AbsentError:
            return None

    def replace(self, path: str, tag: str, data: bytes) -> bool:
        """Replaces the version of an object that `get_tagged` returned; returns False if it has changed since. After a
        `StoreError` it is unknown whether the object was written."""
        _check_path(path)
        assert isinstance(self._backend, Cloud)
        return self._write("replace", path, self._backend.replace, path, tag, data)

    def poll(self, poll: PollRequest) -> PollResponse:
        """Sends a long poll; see `store.long_poll`."""
        assert isinstance(self._backend, Server)
        return self._write("answer", "a question", self._backend.poll, poll)

    @property
    def is_near(self) -> bool:
        """Whether calls return at once; otherwise callers run several calls in threads."""
        return self._scheme in NEAR or self.listings.current is not None

    def put(
        self,
        path: str,
        data: bytes | bytearray | memoryview[Any],
        pace: Callable[[int], None] | None = None,
        is_lasting: bool = True,
    ) -> None:
        """Writes an object, and replaces an existing one. Large objects travel in parts, and appear with the last
        part.

        Args:
            pace: called with a number of bytes before they are sent; returns when they may be.
            is_lasting: the object must survive a power failure; a folder's file is then flushed to the disk.

        Raises `StoreFullError` if there is no space left.
        """
        _check_path(path)
        view = memoryview(data).cast("B")
        self._write("write", path, self._backend.put, path, view, pace, is_lasting)

    def get(self, path: str, limit: int) -> bytes | None:
        """Returns an object, None if absent.

        Raises `TooLargeError` if it is larger than `limit` bytes (it is not downloaded), and `UnreadableError` for a
        symbolic link or device in a folder.
        """
        _check_path(path)
        if (listing := self.listings.current) and listing.covers(path):
            if path not in listing.objects:
                return None
            if (seen := listing.objects[path]) is not None and len(seen) <= limit:
                return seen
        try:
            return self._retry("read", path, self._backend.read, path, limit)
        except AbsentError:
            return None
        except OverflowError as size:
            raise self._too_large(path, size, limit) from None

    def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Returns the bytes [start, end) of an object; raises `TruncatedError` if it is absent, or ends before."""
        _check_path(path)
        try:
            found = memoryview(self._retry("read", path, self._backend.read_range, path, start, end))
        except AbsentError:
            raise TruncatedError(f"{self.url}: {path} is absent, but should be there") from None
        except UnreadableError as error:
            raise TruncatedError(str(error)) from None
        except StoreError as error:
            if _BEYOND_END.search(str(error)):
                raise TruncatedError(f"{self.url}: {path} ends before byte {start}") from None
            raise
        if found.nbytes != end - start:
            raise TruncatedError(f"{self.url}: {path} ends at byte {start + found.nbytes}, before byte {end}")
        return found

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Returns path and size (bytes) of all objects below `prefix`, a whole number of path segments, in order.
        Leaves out objects that this class could not have written (with other characters in their names)."""
        prefix = prefix.rstrip("/")
        if (listing := self.listings.current) and listing.covers(prefix):
            return listing.below(prefix)
        return [(entry.path, entry.size) for entry in self.entries(prefix)]

    def entries(self, prefix: str = "") -> Sequence[Entry]:
        """Like `list`, with the modification time of each object."""
        prefix = prefix.rstrip("/")
        if prefix:
            _check_path(prefix)
        try:
            found = self._retry("list", prefix, self._backend.find, prefix)
        except AbsentError:  # the folder was removed meanwhile
            return []
        return sorted(entry for entry in found if is_object_path(entry.path))

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; absent ones are no error. Some may have been deleted before a `StoreError`."""
        for path in paths:
            _check_path(path)
        if paths:
            self._write("delete", paths[0], self._backend.delete, paths)

    def unfinished(self, after: str = "") -> Sequence[Entry]:
        """Lists what killed writers may have left in a folder: unfinished files, and empty folders (with a /).

        `after` is a path such as "rounds/00000100": entries of its folder that sort before it are skipped.
        """
        folder = self._backend
        return sorted(self._retry("list", "", folder.unfinished, after)) if isinstance(folder, Folder) else []

    def drop(self, unfinished: Sequence[Entry]) -> None:
        """Removes entries that `unfinished` returned; no process may still be writing them."""
        for entry in unfinished:
            assert isinstance(self._backend, Folder)
            self._retry("delete", entry.path, self._backend.drop, entry.path)

    def links(self) -> Sequence[str]:
        """Lists entries below a folder that are neither files nor folders; they are listed nowhere else."""
        folder = self._backend
        return self._retry("list", "", folder.links) if isinstance(folder, Folder) else []

    def move(self, path: str, target: str) -> None:
        """Gives an object another path; a link is not followed. Raises `TruncatedError` if there is no such object."""
        _check_path(target)
        self.listings.current = None
        try:
            self._retry("move", path, self._backend.move, path, target)
        except AbsentError:
            raise TruncatedError(f"{self.url}: {path} is absent, and cannot be moved") from None

    def _write(self, verb: str, path: str, attempt: Callable[P, T], *args: P.args, **settings: P.kwargs) -> T:
        self.listings.current = None  # a write makes cached objects stale
        try:
            return self._retry(verb, path, attempt, *args, **settings)
        except UnreadableError as error:
            raise StoreError(str(error)) from None
        except AbsentError:
            raise StoreError(
                f"{self.url} does not {verb} {path} (not found): is the bucket or folder still there?"
            ) from None

    def _retry(self, verb: str, path: str, attempt: Callable[P, T], *args: P.args, **settings: P.kwargs) -> T:
        """Calls `attempt` until it returns, and retries with backoff after failures that may pass.

        The store's client itself retries for half of the timeout, but not a write whose answer was lost. This loop
        starts no attempt after 0.6 of the timeout. Raises `AbsentError` if the store answers that the object does not
        exist.
        """
        begun, pause = time.monotonic(), 0.05
        while True:
            try:
                return attempt(*args, **settings)
            except FileNotFoundError as error:
                if self._scheme == "file" or not lacks_bucket(error):
                    raise AbsentError from None
                raise self._failures.error_for(verb, path, error) from None
            except (BaseError, OSError, NotYetVisibleError) as error:
                is_refused = isinstance(error, ConnectionRefusedError)
                patience = self._patience_if_refused if is_refused else self._patience
                if not self._failures.is_transient(error) or time.monotonic() - begun >= patience:
                    raise self._failures.error_for(verb, path, error) from None
            time.sleep(random.uniform(0.5, 1.0) * pause)  # spreads the retries of islands that failed together
            pause = min(2 * pause, 1.0, 0.05 * self.timeout)


def _check_path(path: str) -> None:
    """Raises `StoreError` if no object may have this path."""
    if not is_object_path(path):  # the path may come from another island's record
        raise StoreError(
            f"{path[:MAX_PATH]!r} is no path in an object store: it must be relative, of segments of letters, digits "
            "and ._=+- between single slashes"
        )
