"""The backend of each URL scheme: a folder, or an object_store client with its timeouts and retries."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import obstore
import urllib3
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import MemoryStore, S3Store, from_url
from pydantic import ValidationError

from hf_diloco.errors import RendezvousError
from hf_diloco.store.folder import Entry, Folder, cut
from hf_diloco.store.long_poll import MAX_DATA_BYTES, PollRequest, PollResponse
from hf_diloco.utils.urls import host_and_port, split_server_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore as Client, RetryConfig

PART_BYTES = 5 << 20  # S3's minimum: a slow uplink must send each part within half the timeout
PARTS_IN_FLIGHT = 4
DELETES_AT_ONCE = 1000
MAX_ANSWER_BYTES = 192 << 20
"""Limit for an answer of our server, which sends less: see `store.changes`."""

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
SERVER_BUCKET = "runs"
"""The bucket that a server of `hf-diloco rendezvous` keeps all objects in; see `store.server`."""
ENVIRONMENT_PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_LONGEST_REQUEST = timedelta(hours=1)
_CONNECTIONS_KEPT = 8

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class Backend(Protocol):
    """The operations that `ObjectStore` needs; `Folder` documents them. `create` may return the data that the object
    holds afterwards; None means that it wrote `data`."""

    def greet(self) -> None: ...
    def create(self, path: str, data: bytes) -> bytes | None: ...
    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = True
    ) -> None: ...
    def read(self, path: str, limit: int) -> bytes: ...
    def read_range(self, path: str, start: int, end: int) -> Any: ...
    def find(self, prefix: str = "") -> list[Entry]: ...
    def delete(self, paths: Sequence[str]) -> None: ...
    def move(self, path: str, target: str) -> None: ...


class Cloud:
    """Objects behind an object_store client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def greet(self) -> None:
        self.find("checks")

    def create(self, path: str, data: bytes) -> bytes | None:
        try:
            obstore.put(self._client, path, data, mode="create")
        except AlreadyExistsError:
            raise FileExistsError(path) from None
        return None

    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = True
    ) -> None:
        source = cut(data, pace) if pace else data
        try:
            obstore.put(self._client, path, source, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)
        except FileNotFoundError as error:  # a server that was restarted, or has completed it and lost the answer
            if lacks_bucket(error):
                raise
            raise ConnectionResetError(errno.ECONNRESET, "it has forgotten the parts of this upload") from None

    def read(self, path: str, limit: int) -> bytes:
        result = obstore.get(self._client, path)
        if (size := result.meta["size"]) > limit:
            raise OverflowError(size)
        return bytes(result.bytes())

    def read_tagged(self, path: str, limit: int) -> tuple[str, bytes | None]:
        """Returns the tag of the object's current version, and its bytes if there are no more than `limit`."""
        result = obstore.get(self._client, path)
        is_small = result.meta["size"] <= limit
        return result.meta["e_tag"] or "", bytes(result.bytes()) if is_small else None

    def replace(self, path: str, tag: str, data: bytes) -> bool:
        """Replaces the object if its version still has this tag; returns whether it now holds `data`."""
        try:
            obstore.put(self._client, path, data, mode={"e_tag": tag}, use_multipart=False)
        except (PreconditionError, FileNotFoundError):
            return False
        return True

    def read_range(self, path: str, start: int, end: int) -> Any:
        return obstore.get_range(self._client, path, start=start, end=end)

    def find(self, prefix: str = "") -> list[Entry]:
        listed = obstore.list(self._client, prefix or None).collect()
        return [Entry(meta["path"], meta["size"], meta["last_modified"]) for meta in listed]

    def delete(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), DELETES_AT_ONCE):
            batch = list(paths[first : first + DELETES_AT_ONCE])
            try:
                obstore.delete(self._client, batch)
            except FileNotFoundError:  # some stores stop at the first absent object
                for path in batch:
                    self._delete_if_there(path)

    def _delete_if_there(self, path: str) -> None:
        try:
            obstore.delete(self._client, [path])
        except FileNotFoundError as error:
            if lacks_bucket(error):
                raise

    def move(self, path: str, target: str) -> None:
        obstore.copy(self._client, path, target)
        obstore.delete(self._client, [path])


class Server(Cloud):
    """Objects on a server of ours at http://HOST:PORT, below `path`. Small ones travel in the long polls that only
    such a server answers."""

    def __init__(self, client: Client, address: str, path: str, timeout: float) -> None:
        super().__init__(client)
        self._timeout = timeout
        self._connections = urllib3.connection_from_url(address, maxsize=_CONNECTIONS_KEPT, retries=False)
        self._path = f"/changes/{path}"
        self._has_answered = False

    def greet(self) -> None:
        self.poll(PollRequest())  # bypasses the proxies that the environment names

    def create(self, path: str, data: bytes) -> bytes:
        found = self.poll(PollRequest(create={path: data})).created.get(path)
        if found is None:  # an existing object that is too large to send, or unreadable
            raise FileExistsError(path)
        return found

    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = True
    ) -> None:
        if pace or data.nbytes > MAX_DATA_BYTES:
            super().put(path, data, pace, is_lasting)
        else:
            self.poll(PollRequest(put={path: bytes(data)}, is_lasting=is_lasting))

    def read(self, path: str, limit: int) -> bytes:
        _, data = self.read_tagged(path, limit)
        if data is None:  # too large to send in an answer
            return super().read(path, limit)
        if len(data) > limit:
            raise OverflowError(len(data))
        return data

    def read_tagged(self, path: str, limit: int) -> tuple[str, bytes | None]:
        found = self.poll(PollRequest(paths=[path])).objects.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return found

    def replace(self, path: str, tag: str, data: bytes) -> bool:
        return self.poll(PollRequest(replace={path: (tag, data)})).created.get(path) == data

    def poll(self, poll: PollRequest) -> PollResponse:
        """Sends a long poll; see `store.long_poll`.

        Raises `ConnectionRefusedError` if nobody listens there, another `OSError` without an answer, and
        `RendezvousError` if the server does not know such requests and has never answered one.
        """
        limits = urllib3.Timeout(connect=min(self._timeout, 5.0), read=self._timeout + poll.seconds)
        try:
            said = self._connections.request(
                "POST",
                self._path,
                body=poll.model_dump_json(exclude_defaults=True).encode(),
                timeout=limits,
                preload_content=False,
                decode_content=False,
            )
            data = said.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                said.close()
                raise ConnectionError(
                    f"an answer of more than {MAX_ANSWER_BYTES:,} bytes, not from a server of hf_diloco"
                )
            if said.status == 404 and not self._has_answered:  # a later 404 is a proxy's that cannot reach the server
                raise RendezvousError(
                    f"the server at {self._connections.host}:{self._connections.port} is of an older version of "
                    "hf_diloco, or none: install this version there, and start `hf-diloco rendezvous` again"
                )
            if said.status != 200:
                raise ConnectionError(f"status code: {said.status} {said.reason} {data[:300]!r}")
            answer = PollResponse.model_validate_json(data)
            self._has_answered = True
            return answer
        except urllib3.exceptions.NewConnectionError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there") from None
            raise ConnectionError(f"no connection ({error.__cause__ or error})") from None
        except (urllib3.exceptions.HTTPError, ValidationError) as error:
            raise ConnectionError(f"no answer in time, or not from a server of hf_diloco ({error})") from None


def lacks_bucket(error: Exception) -> bool:
    """Whether the bucket is missing, rather than an object."""
    return _NO_BUCKET.search(str(error)) is not None


def open_backend(url: str, timeout: float, read_only: bool, max_retries: int = 1000) -> Backend:
    """Opens the backend of a checked URL; see `ObjectStore`. A cloud's client retries within half of the timeout."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        with _memory_lock:
            return Cloud(_memory.setdefault(rest, MemoryStore()))
    if scheme == "file":
        return _open_folder(Path(unquote(rest)), url, read_only)
    half = timedelta(seconds=timeout / 2)
    client: ClientConfig = {
        "connect_timeout": min(half, timedelta(seconds=5)),
        "read_timeout": half,
        "timeout": _LONGEST_REQUEST,
    }
    if prefix := ENVIRONMENT_PREFIX.get(scheme):
        client |= client_options(prefix, os.environ)  # type: ignore[typeddict-item]
    retry: RetryConfig = {
        "max_retries": max_retries,  # by default the timeout is the real limit
        "retry_timeout": half,
        "backoff": {
            "init_backoff": timedelta(seconds=min(0.1, timeout / 50)),
            "max_backoff": timedelta(seconds=min(2.0, timeout / 20)),
            "base": 2,
        },
    }
    if server := split_server_url(url):
        scheme, host, port, path = server
        address = f"{scheme}://{host_and_port(host, port)}"
        if scheme == "http":  # connect directly, as `Server.poll` does
            client |= {"allow_http": True, "proxy_url": address, "proxy_excludes": host}
        cloud = S3Store(
            SERVER_BUCKET,
            prefix=path,
            endpoint=address,
            region="local",
            skip_signature=True,  # such a server needs no credentials
            client_options=client,
            retry_config=retry,
        )
        # With TLS there is a proxy in front, which may not tolerate requests that wait.
        return Server(cloud, address, path, timeout / 2) if scheme == "http" else Cloud(cloud)
    return Cloud(from_url(url, client_options=client, retry_config=retry))


def forget_memory(name: str) -> None:
    """Removes `memory://NAME` from the registry; its objects live on while a store has them open."""
    with _memory_lock:
        _memory.pop(name, None)


def _open_folder(folder: Path, url: str, read_only: bool) -> Folder:
    if read_only:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise PermissionError(f"no permission to read in {folder}")
        return Folder(folder)
    if not folder.parent.exists():
        raise RendezvousError(
            f"the rendezvous {url} cannot be opened: there is no folder {folder.parent}. If a shared file system is "
            "to be there, mount it; else make the folder on the islands' machines. It is not made for you, because "
            "an island that does not see the others' folder would start a run of its own"
        )
    folder.mkdir(exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to read and write in {folder}")
    return Folder(folder)


def client_options(prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options, from a provider's variables, that the client itself would read if it were given none."""
    options: dict[str, Any] = {}
    for name in ("allow_http", "allow_invalid_certificates"):
        value = environment.get(f"{prefix}_{name.upper()}", "").strip().lower()
        if value:
            options[name] = value in ("1", "true", "on", "yes", "y")
    if proxy := environment.get(f"{prefix}_PROXY_URL"):
        options["proxy_url"] = proxy
    return options
