"""A server's side of `store.question`: tells islands that wait what has changed in a folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import xxhash
from aiohttp import web

from hf_diloco.store.folder import Folder, NoFileError
from hf_diloco.store.memory import MemoryFolder
from hf_diloco.store.question import MAX_DATA_BYTES, Answer, Question, check_path

_STALE_SECONDS = 0.25
"""How old a look at the folder may be, which somebody may have mounted, though nothing has come by the server."""
MAX_ITEMS = 1 << 17
"""Values in a question, more than its form allows: a value takes its sender two bytes, and a hundred here."""
_ITEM_SIGNS = b"[", b"{", b","  # which stand in no path, tag or base64
_MAX_REASON = 1000
MAX_WAITING = 1024
"""Questions that wait at a time. A further one is answered at once: islands then ask again after a pause."""
MAX_WAITING_BYTES = 64 << 20
"""Of questions that wait at a time, as they were sent; likewise."""
MAX_TOLD_BYTES = 64 << 20
"""Of objects in all answers that are being sent; and of those below one prefix. Data beyond that are left out."""
TELL_SECONDS = 300.0
"""How long an answer may take to be sent."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ABSENT = FileNotFoundError.__name__
Found = dict[str, tuple[str, bytes | None]]
"""Tag and data of objects, by path."""


class Do(Protocol):
    """Calls a function, perhaps in a thread, and returns what that returns."""

    def __call__(self, call: Callable[..., T], /, *args: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


class Changes:
    """The questions of all islands about one folder.

    Args:
        do: has it do something.
    """

    def __init__(self, folder: Folder | MemoryFolder, do: Do) -> None:
        self._folder = folder
        self._do = do
        self._count = 0
        self._changed = asyncio.Event()
        self._num_waiting = self._bytes_waiting = self._bytes_told = 0
        self._replacing = asyncio.Lock()
        self._looks: dict[str, tuple[int, float, asyncio.Task[Found]]] = {}

    @web.middleware
    async def notice(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Wakes all that wait after a request that may have changed something."""
        try:
            return await handler(request)
        finally:
            if request.method not in ("GET", "HEAD") and request.match_info.handler != self.answer:
                self._tell()

    async def end(self, _: web.Application) -> None:
        """Forgets what was seen last."""
        self._looks.clear()

    async def answer(self, request: web.Request) -> web.Response:
        """Answers a question."""
        try:
            root = check_path(request.match_info["path"])
            asked = await request.read()
            if sum(map(asked.count, _ITEM_SIGNS)) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS:,} values")
            question = Question.model_validate_json(asked)
        except ValueError as error:
            return web.Response(status=400, text=str(error)[:_MAX_REASON])
        created = await self._write(root, question)
        may_wait = self._num_waiting < MAX_WAITING and self._bytes_waiting + len(asked) <= MAX_WAITING_BYTES
        self._num_waiting += may_wait
        self._bytes_waiting += may_wait * len(asked)
        try:
            found = await self._await_change(root, question, may_wait)
        finally:
            self._num_waiting -= may_wait
            self._bytes_waiting -= may_wait * len(asked)
        objects = {path.removeprefix(f"{root}/"): read for path, read in found.items()}
        return await self._send(request, created, objects, question.known or {})

    async def _send(
        self, request: web.Request, created: dict[str, bytes | None], objects: Found, known: dict[str, str]
    ) -> web.Response:
        """Answers; what is too much beside all that is being sent is left out, and whoever needs it asks for it."""
        left = MAX_TOLD_BYTES - self._bytes_told

        def within(data: bytes | None) -> bytes | None:
            nonlocal left
            if data is None or len(data) > left:
                return None
            left -= len(data)
            return data

        answer = Answer.model_construct(
            created={path: within(data) for path, data in created.items()},
            objects={
                path: (tag, None if known.get(path) == tag else within(data)) for path, (tag, data) in objects.items()
            },
        )
        size = MAX_TOLD_BYTES - self._bytes_told - left
        self._bytes_told += size
        try:
            response = web.Response(text=answer.model_dump_json(), content_type="application/json")
            async with asyncio.timeout(TELL_SECONDS):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport:
                request.transport.abort()
        finally:
            self._bytes_told -= size
        return response

    async def _write(self, root: str, question: Question) -> dict[str, bytes | None]:
        """Writes what an island wants to be there; returns what lies where that depends on what lay there."""
        found = {path: await self._create(f"{root}/{path}", data) for path, data in question.create.items()}
        for path, (tag, data) in question.replace.items():
            found[path] = await self._replace(f"{root}/{path}", tag, data)
        for path, data in question.put.items():
            await self._do(self._folder.put, f"{root}/{path}", memoryview(data), is_lasting=question.is_lasting)
        if found or question.put:
            self._tell()
        return found

    async def _await_change(self, root: str, question: Question, may_wait: bool) -> Found:
        """All objects below the prefixes, once they are others than those known, and what is awaited is among them or
        did not come in time; at the latest when the time is over."""
        clock = asyncio.get_running_loop().time
        awaited, linger = (f"{root}/{one.path}", one.linger) if (one := question.awaited) else ("", 0.0)
        known = {f"{root}/{path}": tag for path, tag in (question.known or {}).items()}
        is_news = question.known is None
        until = clock() + (linger if is_news else question.seconds)
        while True:
            changed = self._changed  # before looking: what comes meanwhile is not missed
            found: Found = {}
            for prefix in question.prefixes:
                found |= await self._look(f"{root}/{prefix}")
            if question.paths:
                found |= await self._do(self._read_some, [f"{root}/{path}" for path in question.paths])
            if not is_news and known != {path: tag for path, (tag, _) in found.items()}:
                is_news, until = True, min(until, clock() + linger)
            left = until - clock()
            is_complete = is_news and (not awaited or awaited in found)
            if is_complete or left <= 0 or not may_wait:
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, 2 * _STALE_SECONDS))

    async def _create(self, path: str, data: bytes) -> bytes | None:
        """What lies at a path then; None if that cannot be read."""

        def create() -> bytes | None:
            try:
                self._folder.create(path, data)
                return data
            except FileExistsError:
                return self._read(path)[1]

        return await self._do(create)

    async def _replace(self, path: str, tag: str, data: bytes) -> bytes | None:
        """What lies at a path, once `data` is there if it was what the tag says; None if that cannot be read."""

        def replace() -> bytes | None:
            found = self._read_some([path]).get(path)
            if found is None or found[0] != tag:
                return found[1] if found else None
            self._folder.put(path, memoryview(data))
            return data

        async with self._replacing:
            return await self._do(replace)

    def _tell(self) -> None:
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self, prefix: str) -> Found:
        """All objects below a prefix. Islands that ask at the same time share one look at the folder."""
        now = asyncio.get_running_loop().time()
        count, at, task = self._looks.get(prefix, (-1, now, None))
        if task is None or count != self._count or now - at >= _STALE_SECONDS:
            self._looks = {name: look for name, look in self._looks.items() if now - look[1] < _STALE_SECONDS}
            task = asyncio.create_task(self._do(self._read_all, prefix))
            self._looks[prefix] = self._count, now, task
        return await asyncio.shield(task)  # others may want it if this island goes

    def _read_all(self, prefix: str) -> Found:
        found: Found = {}
        left = MAX_TOLD_BYTES
        for entry in self._folder.find(prefix):
            if entry.size > left:
                found[entry.path] = f"{entry.size}-{entry.modified.timestamp()}", None
            else:
                found[entry.path] = self._read(entry.path)
                left -= entry.size
        return found

    def _read_some(self, paths: Sequence[str]) -> Found:
        """Those of some objects that are there."""
        found = {path: self._read(path) for path in paths}
        return {path: read for path, read in found.items() if read[0] != _ABSENT}

    def _read(self, path: str) -> tuple[str, bytes | None]:
        try:
            data = self._folder.read(path, MAX_DATA_BYTES)
        except (FileNotFoundError, NoFileError, OverflowError) as error:  # who needs it learns the reason by itself
            return type(error).__name__, None
        return xxhash.xxh3_64_hexdigest(data), data
