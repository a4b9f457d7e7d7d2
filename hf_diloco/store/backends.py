"""What stands behind each kind of address: a folder, or an object_store client with its time limits and retries."""

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
from hf_diloco.store.question import MAX_DATA_BYTES, Answer, Question
from hf_diloco.utils.urls import host_and_port, split_server_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore as Client, RetryConfig

PART_BYTES = 5 << 20  # the smallest that S3 takes: a slow uplink must bring each part across in half the time limit
PARTS_IN_FLIGHT = 4
DELETES_AT_ONCE = 1000
MAX_ANSWER_BYTES = 192 << 20
"""Of an answer of our server, which shows less: see `store.changes`."""

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
SERVER_BUCKET = "runs"
"""Where a server of `hf-diloco rendezvous` keeps all objects; see `store.server`."""
ENVIRONMENT_PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_LONGEST_REQUEST = timedelta(hours=1)
_CONNECTIONS_KEPT = 8

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class Backend(Protocol):
    """What `ObjectStore` asks of it; see `Folder` for what each does. Where there is something, `create` may return
    that."""

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
    def unfinished(self, after: str = "") -> list[Entry]: ...
    def drop(self, path: str) -> None: ...
    def links(self) -> list[str]: ...


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
        obstore.put(self._client, path, source, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)

    def read(self, path: str, limit: int) -> bytes:
        result = obstore.get(self._client, path)
        if (size := result.meta["size"]) > limit:
            raise OverflowError(size)
        return bytes(result.bytes())

    def read_tagged(self, path: str, limit: int) -> tuple[str, bytes | None]:
        """A tag that tells an object apart from what lies there later; and its bytes, if no more than `limit`.

        Raises:
            FileNotFoundError: there is none.
        """
        result = obstore.get(self._client, path)
        is_small = result.meta["size"] <= limit
        return result.meta["e_tag"] or "", bytes(result.bytes()) if is_small else None

    def replace(self, path: str, tag: str, data: bytes) -> bool:
        """Writes an object in place of that which bears a tag; whether `data` is there now."""
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
            except FileNotFoundError:  # some stores stop at the first that is absent
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

    def unfinished(self, after: str = "") -> list[Entry]:
        return []

    def drop(self, path: str) -> None:
        pass

    def links(self) -> list[str]:
        return []


class Server(Cloud):
    """Objects that a server of ours keeps; small ones travel with the questions that only such a server answers.

    Args:
        address: of the server, as http://HOST:PORT.
        path: below which this run's objects lie.
        timeout: seconds without an answer after which a request has failed.
    """

    def __init__(self, client: Client, address: str, path: str, timeout: float) -> None:
        super().__init__(client)
        self._timeout = timeout
        self._connections = urllib3.connection_from_url(address, maxsize=_CONNECTIONS_KEPT, retries=False)
        self._path = f"/changes/{path}"
        self._has_answered = False

    def greet(self) -> None:
        self._ask()  # which goes by no proxy, whatever the environment says

    def create(self, path: str, data: bytes) -> bytes:
        found = self._ask(create={path: data}).created.get(path)
        if found is None:  # too large to be told, or it cannot be read
            raise FileExistsError(path)
        return found

    def put(
        self, path: str, data: memoryview[Any], pace: Callable[[int], None] | None = None, is_lasting: bool = True
    ) -> None:
        if pace or data.nbytes > MAX_DATA_BYTES:
            super().put(path, data, pace, is_lasting)
        else:
            self._ask(put={path: bytes(data)}, is_lasting=is_lasting)

    def read(self, path: str, limit: int) -> bytes:
        _, data = self.read_tagged(path, limit)
        if data is None:  # too large to be told
            return super().read(path, limit)
        if len(data) > limit:
            raise OverflowError(len(data))
        return data

    def read_tagged(self, path: str, limit: int) -> tuple[str, bytes | None]:
        found = self._ask(paths=[path]).objects.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return found

    def replace(self, path: str, tag: str, data: bytes) -> bool:
        return self._ask(replace={path: (tag, data)}).created.get(path) == data

    def _ask(self, **what: Any) -> Answer:
        return self.ask(Question(**what))

    def ask(self, question: Question) -> Answer:
        """See `store.question`.

        Raises:
            ConnectionRefusedError: nobody listens there.
            OSError: no answer, or a refusal.
            RendezvousError: the server has never known such requests.
        """
        limits = urllib3.Timeout(connect=min(self._timeout, 5.0), read=self._timeout + question.seconds)
        try:
            said = self._connections.request(
                "POST",
                self._path,
                body=question.model_dump_json(exclude_defaults=True).encode(),
                timeout=limits,
                preload_content=False,
                decode_content=False,
            )
            data = said.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                said.close()
                raise ConnectionError(f"an answer of more than {MAX_ANSWER_BYTES:,} bytes, and none of ours")
            if said.status == 404 and not self._has_answered:  # else what stands before it does not find it now
                raise RendezvousError(
                    f"the server at {self._connections.host}:{self._connections.port} is of an older version of "
                    "hf_diloco, or none: install this version there, and start `hf-diloco rendezvous` again"
                )
            if said.status != 200:
                raise ConnectionError(f"status code: {said.status} {said.reason} {data[:300]!r}")
            answer = Answer.model_validate_json(data)
            self._has_answered = True
            return answer
        except urllib3.exceptions.NewConnectionError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there") from None
            raise ConnectionError(f"no connection ({error.__cause__ or error})") from None
        except (urllib3.exceptions.HTTPError, ValidationError) as error:
            raise ConnectionError(f"no answer in time, or none of a server of ours ({error})") from None


def lacks_bucket(error: Exception) -> bool:
    """Whether it is the bucket that does not exist, and not an object."""
    return _NO_BUCKET.search(str(error)) is not None


def open_backend(url: str, timeout: float, read_only: bool) -> Backend:
    """A client for a checked URL; see `ObjectStore` for the rest."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        with _memory_lock:
            return Cloud(_memory.setdefault(rest, MemoryStore()))
    if scheme == "file":
        folder = Path(unquote(rest))
        return _open_to_look(folder) if read_only else _open_folder(folder, url)
    half = timedelta(seconds=timeout / 2)
    client: ClientConfig = {
        "connect_timeout": min(half, timedelta(seconds=5)),
        "read_timeout": half,
        "timeout": _LONGEST_REQUEST,
        **client_options(ENVIRONMENT_PREFIX.get(scheme), os.environ),  # type: ignore[typeddict-item]
    }
    retry: RetryConfig = {
        "max_retries": 1000,  # the time limit is what counts
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
        if scheme == "http":  # the way of `Server.ask`, by no proxy that the environment may name
            client |= {"allow_http": True, "proxy_url": address, "proxy_excludes": host}
        cloud = _open_server(address, path, client, retry)
        # Behind TLS there is a proxy, which may not like requests that wait.
        return Server(cloud, address, path, timeout / 2) if scheme == "http" else Cloud(cloud)
    return Cloud(from_url(url, client_options=client, retry_config=retry))


def forget_memory(name: str) -> None:
    """Nobody opens `memory://NAME` any more: it lasts as long as who has it open."""
    with _memory_lock:
        _memory.pop(name, None)


def _open_server(address: str, path: str, client: ClientConfig, retry: RetryConfig) -> Client:
    """Islands are clients of S3 to a server of `hf-diloco rendezvous`, which asks for no credentials."""
    return S3Store(
        SERVER_BUCKET,
        prefix=path or None,
        endpoint=address,
        region="local",
        skip_signature=True,
        client_options=client,
        retry_config=retry,
    )


def _open_folder(folder: Path, url: str) -> Folder:
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


def _open_to_look(folder: Path) -> Backend:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise PermissionError(f"no permission to read in {folder}")
    return Folder(folder)


def client_options(prefix: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the client would read from the environment by itself, if it were not given options.

    Args:
        prefix: of the provider's variables; None: there are none.
    """
    options: dict[str, Any] = {}
    if prefix is None:
        return options
    for name in ("allow_http", "allow_invalid_certificates"):
        value = environment.get(f"{prefix}_{name.upper()}", "").strip().lower()
        if value:
            options[name] = value in ("1", "true", "on", "yes", "y")
    if proxy := environment.get(f"{prefix}_PROXY_URL"):
        options["proxy_url"] = proxy
    return options
