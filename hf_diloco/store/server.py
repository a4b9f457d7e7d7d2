"""An object store for islands that have none: serves a folder to machines that cannot mount it.

It implements the part of S3's protocol that islands need, so that they use the same client as for buckets: range
reads, *create if absent* (`If-None-Match: *`), multipart uploads, lists, deletions, copies. There is one bucket. One
more request, which S3 does not have, spares islands from polling: see `store.long_poll`.

`store.folder` writes the objects, so the same folder may also be mounted, and a server that restarts resumes with it.
Parts of incomplete objects lie apart, and are deleted when the server starts.

Anyone who reaches the port can read, write and delete, as in a folder; the run's key protects records all the same.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import html
import re
import shutil
import uuid
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web
from aiohttp.typedefs import Handler

from hf_diloco.errors import RendezvousError
from hf_diloco.store.backends import SERVER_BUCKET as BUCKET
from hf_diloco.store.changes import Changes, Do
from hf_diloco.store.folder import Entry, Folder, GoneError, NoFileError
from hf_diloco.store.memory import MemoryFolder
from hf_diloco.utils.urls import MAX_SERVED_PATH, OBJECT_PATH

MAX_BODY_BYTES = 64 << 20
"""Limit for one request: islands send larger objects in parts of 5 MiB."""
_PIECE_BYTES = 1 << 19
_MAX_PARTS = 10_000
_WORD_SECONDS = 0.5
"""Interval of keep-alive bytes to a client that waits for a large object to be assembled."""
_KEPT_UPLOADS = 64

T = TypeVar("T")


class _Refused(Exception):
    """A request that is answered with an error; `code` is S3's."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class StoreServer:
    """Handles the requests of all islands to one folder.

    The folder holds the objects; it is created if its parent exists. `uploads` in it holds incomplete objects, and
    `lock` keeps other processes from serving it until the application ends. Without a folder objects are in memory,
    small, and lost with this server. It then uses no threads: Python starts none while a process exits, when peers
    still have goodbyes to send.

    Raises `OSError` if the folder cannot be written, and `RendezvousError` if another process serves it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder: Folder | MemoryFolder = MemoryFolder()
        self._uploads: Path | None = None
        self._lock: IO[str] | None = None
        self._do: Do = _do_at_once
        self._completing: dict[str, asyncio.Task[None]] = {}  # and the last completed ones
        if folder is not None:
            objects, self._uploads = folder / "objects", folder / "uploads"
            folder.mkdir(exist_ok=True)
            self._lock = _lock(folder)
            shutil.rmtree(self._uploads, ignore_errors=True)
            for needed in (objects, self._uploads):
                needed.mkdir(exist_ok=True)
            self._folder, self._do = Folder(objects), asyncio.to_thread

    def app(self) -> web.Application:
        """Builds the web application."""
        changes = Changes(self._folder, self._do)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_tell_failures, changes.notice])
        app.router.add_post("/changes/{path:.+}", changes.answer)
        app.router.add_get(f"/{BUCKET}", self._list)
        app.router.add_post(f"/{BUCKET}", self._delete_several)
        path = f"/{BUCKET}/{{path:.+}}"
        app.router.add_get(path, self._get)  # and HEAD
        app.router.add_put(path, self._put)
        app.router.add_post(path, self._upload)
        app.router.add_delete(path, self._delete)
        app.on_cleanup.extend([changes.end, self._end])
        return app

    async def _end(self, _: web.Application) -> None:
        if self._lock:
            self._lock.close()
        if isinstance(self._folder, MemoryFolder):
            self._folder.clear()  # aiohttp caches a process's last applications, and with them this folder

    # One object

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = _path_of(request)
        with self._folder.opened(path) as file:
            start, end = _range_of(request, file.size)
            answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
            answer.content_length = end - start
            answer.last_modified = file.modified
            answer.etag = f"{file.modified.timestamp()}-{file.size}"
            if answer.status == 206:
                answer.headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
            await answer.prepare(request)
            while start < end and request.method != "HEAD":
                piece = await self._do(file.read, start, min(end - start, _PIECE_BYTES))
                if not piece and request.transport:  # another process that mounts the folder truncated the file
                    request.transport.abort()
                    return answer
                await answer.write(piece)
                start += len(piece)
        await answer.write_eof()
        return answer

    async def _put(self, request: web.Request) -> web.StreamResponse:
        path = _path_of(request)
        if "uploadId" in request.query:
            return await self._put_part(request)
        if source := request.headers.get("x-amz-copy-source"):
            return await self._copy(request, _checked(unquote(source).strip("/").removeprefix(f"{BUCKET}/")), path)
        data = await request.read()
        if request.headers.get("If-None-Match") == "*":
            await self._do(self._folder.create, path, data)
        else:
            await self._do(self._folder.put, path, memoryview(data))
        return web.Response(headers={"ETag": _new_tag()})

    async def _copy(self, request: web.Request, source: str, path: str) -> web.StreamResponse:
        def copy() -> None:
            with self._folder.opened(source) as file:
                self._folder.assemble(path, file.pieces(0, file.size, _PIECE_BYTES))

        return await self._tell_when_done(request, asyncio.create_task(self._do(copy)), "CopyObjectResult")

    async def _delete(self, request: web.Request) -> web.Response:
        if "uploadId" in request.query:
            await self._do(shutil.rmtree, self._upload_of(request), True)
        else:
            await self._do(self._folder.delete, [_path_of(request)])
        return web.Response(status=204)

    # Large ones, in parts

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        """Begins a multipart upload, or completes it."""
        path = _path_of(request)
        if "uploads" in request.query:
            if self._uploads is None:
                raise _Refused(400, "InvalidRequest", "objects are small here, and travel whole")
            upload = uuid.uuid4().hex
            (self._uploads / upload).mkdir()
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        completion = await self._complete(request, path)
        return await self._tell_when_done(request, completion, "CompleteMultipartUploadResult")

    async def _complete(self, request: web.Request, path: str) -> asyncio.Task[None]:
        """Assembles an object from its parts, once, even if a client that got no answer retries."""
        name = request.query.get("uploadId", "")
        if task := self._completing.get(name):
            return task
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d{1,5})</PartNumber>", await _text(request))]
        folder = self._upload_of(request)
        if not numbers or numbers != sorted(set(numbers)):
            raise _Refused(400, "InvalidPartOrder", "parts are listed in their order")
        parts = [folder / f"{number:05d}" for number in numbers]
        if not all(part.is_file() for part in parts):
            raise _Refused(400, "InvalidPart", "a part is missing")

        async def complete() -> None:
            try:
                await self._do(self._folder.assemble, path, (part.read_bytes() for part in parts))
            except BaseException:
                del self._completing[name]  # allows a retry
                raise
            await self._do(shutil.rmtree, folder, True)

        if len(self._completing) >= _KEPT_UPLOADS:
            done = next((upload for upload, task in self._completing.items() if task.done()), None)
            self._completing.pop(done or "", None)
        self._completing[name] = task = asyncio.create_task(complete())
        return task

    async def _tell_when_done(self, request: web.Request, task: asyncio.Task[None], name: str) -> web.StreamResponse:
        """Sends white space while the task runs, as S3 does; a later error then comes in the body."""
        if (await asyncio.wait([task], timeout=_WORD_SECONDS))[0]:
            task.result()
            return _xml(name, f"<ETag>{_new_tag()}</ETag>")
        answer = web.StreamResponse(headers={"Content-Type": "application/xml"})
        await answer.prepare(request)
        while not (await asyncio.wait([task], timeout=_WORD_SECONDS))[0]:
            await answer.write(b" ")
        if error := task.exception():
            text = f"<Error><Code>InternalError</Code><Message>{escape(str(error))}</Message></Error>"
        else:
            text = f"<{name}><ETag>{_new_tag()}</ETag></{name}>"
        await answer.write(text.encode())
        await answer.write_eof()
        return answer

    async def _put_part(self, request: web.Request) -> web.Response:
        number = request.query.get("partNumber", "")
        if not re.fullmatch("[0-9]{1,5}", number) or not 1 <= int(number) <= _MAX_PARTS:
            raise _Refused(400, "InvalidArgument", f"parts are numbered from 1 to {_MAX_PARTS}")
        part = self._upload_of(request) / f"{int(number):05d}"
        await self._do(part.write_bytes, await request.read())
        return web.Response(headers={"ETag": _new_tag()})

    def _upload_of(self, request: web.Request) -> Path:
        name = request.query.get("uploadId", "")
        folder = self._uploads / name if self._uploads else None
        if not re.fullmatch("[0-9a-f]{32}", name) or folder is None or not folder.is_dir():
            raise _Refused(404, "NoSuchUpload", "this upload was not begun, or the server was started again since")
        return folder

    # Several objects

    async def _list(self, request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        above = prefix.rpartition("/")[0]
        found = await self._do(self._folder.find, _checked(above) if above else "")
        contents = "".join(_listed(entry) for entry in sorted(found) if entry.path.startswith(prefix))
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{contents}")

    async def _delete_several(self, request: web.Request) -> web.Response:
        if "delete" not in request.query:
            raise _Refused(400, "InvalidRequest", "only deletions are posted to a bucket")
        keys = re.findall(r"<Key>([^<]*)</Key>", await _text(request))
        paths = [_checked(html.unescape(key)) for key in keys]
        await self._do(self._folder.delete, paths)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(path)}</Key></Deleted>" for path in paths))


def _lock(folder: Path) -> IO[str]:
    """Locks a folder against other processes that would serve it, as long as the returned file is open; a forked
    process does not inherit the lock."""
    file = (folder / "lock").open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RendezvousError(
            f"another process serves {folder}, perhaps at another port: end that, or choose another folder"
        ) from None
    except OSError:  # the file system has no locks
        pass
    return file


async def _do_at_once(call: Callable[..., T], /, *args: Any, **named: Any) -> T:
    return call(*args, **named)


@web.middleware
async def _tell_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except FileExistsError:
        refused = _Refused(412, "PreconditionFailed", "there is such an object")
    except GoneError as error:
        refused = _Refused(503, "ServiceUnavailable", str(error.strerror))
    except (FileNotFoundError, NoFileError):
        refused = _Refused(404, "NoSuchKey", "there is no such object")
    except _Refused as error:
        refused = error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        refused = _Refused(507 if full else 500, "QuotaExceeded" if full else "InternalError", str(error.strerror))
    body = f"<Error><Code>{refused.code}</Code><Message>{escape(refused.message)}</Message></Error>"
    return web.Response(status=refused.status, text=body, content_type="application/xml")


def _path_of(request: web.Request) -> str:
    return _checked(request.match_info["path"])


def _checked(path: str) -> str:
    if len(path) > MAX_SERVED_PATH or not OBJECT_PATH.fullmatch(path):
        raise _Refused(400, "InvalidArgument", "no path of an object")
    return path


async def _text(request: web.Request) -> str:
    """Decodes a request's body, whatever charset it declares: paths and numbers are the same bytes in all."""
    return (await request.read()).decode(errors="replace")


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """Returns the bytes [start, end) that a request asks for."""
    try:
        start, end, _ = request.http_range.indices(size)
    except ValueError:  # malformed range
        start = end = size
    if start >= end and "Range" in request.headers:
        raise _Refused(416, "InvalidRange", f"the object has {size} bytes")
    return start, end


def _listed(entry: Entry) -> str:
    modified = entry.modified.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return (
        f"<Contents><Key>{escape(entry.path)}</Key><LastModified>{modified}</LastModified>"
        f"<Size>{entry.size}</Size></Contents>"
    )


def _xml(name: str, content: str) -> web.Response:
    return web.Response(text=f"<{name}>{content}</{name}>", content_type="application/xml")


def _new_tag() -> str:
    return f'"{uuid.uuid4().hex}"'
