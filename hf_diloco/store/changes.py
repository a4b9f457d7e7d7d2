"""The server's side of `store.long_poll`: tells waiting islands what has changed in a folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from hf_diloco.store.folder import Folder, NoFileError
from hf_diloco.store.long_poll import MAX_DATA_BYTES, PollRequest, PollResponse, check_path
from hf_diloco.store.memory import MemoryFolder

_STALE_SECONDS = 0.25
"""Maximum age in seconds of a cached look at the folder: others may have mounted it and change it without the
server."""
MAX_ITEMS = 1 << 17
"""Limit of values in a poll, checked before parsing, and above what its schema allows: a value that takes its
sender two bytes takes a hundred here."""
_ITEM_SIGNS = b"[", b"{", b","  # never part of a path, a tag or base64
_MAX_REASON = 1000
MAX_WAITING = 1024
"""Questions that wait at a time. Further ones are answered at once: islands then ask again after a pause."""
MAX_WAITING_BYTES = 64 << 20
"""Total size of the waiting polls, as sent; beyond it, too, polls are answered at once."""
MAX_TOLD_BYTES = 64 << 20
"""Limit of object data in all answers being sent, and below one prefix. Data beyond it are left out."""
TELL_SECONDS = 300.0
"""Timeout for sending an answer."""

T = TypeVar("T")
_ABSENT = FileNotFoundError.__name__
Found = dict[str, tuple[str, bytes | None]]
"""Tag and data of objects, by path."""


class Do(Protocol):
    """Calls a function, perhaps in a thread, and returns its result."""

    def __call__(self, call: Callable[..., T], /, *args: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


class Changes:
    """Answers the polls of all islands about one folder, whose operations `do` runs, perhaps in a thread."""

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
        """Wakes all waiting polls after a request that may have changed the folder."""
        try:
            return await handler(request)
        finally:
            if request.method not in ("GET", "HEAD") and request.match_info.handler != self.answer:
                self._tell()

    async def end(self, _: web.Application) -> None:
        """Drops the cached looks at the folder."""
        self._looks.clear()

    async def answer(self, request: web.Request) -> web.Response:
        """Answers a poll."""
        try:
            root = check_path(request.match_info["path"])
            asked = await request.read()
            if sum(map(asked.count, _ITEM_SIGNS)) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS:,} values")
            poll = PollRequest.model_validate_json(asked)
        except ValueError as error:
            return web.Response(status=400, text=str(error)[:_MAX_REASON])
        created = await self._write(root, poll)
        may_wait = self._num_waiting < MAX_WAITING and self._bytes_waiting + len(asked) <= MAX_WAITING_BYTES
        self._num_waiting += may_wait
        self._bytes_waiting += may_wait * len(asked)
        try:
            found = await self._await_change(root, poll, may_wait)
        finally:
            self._num_waiting -= may_wait
            self._bytes_waiting -= may_wait * len(asked)
        objects = {path.removeprefix(f"{root}/"): read for path, read in found.items()}
        return await self._send(request, created, objects, poll.known or {})

    async def _send(
        self, request: web.Request, created: dict[str, bytes | None], objects: Found, known: dict[str, str]
    ) -> web.Response:
        """Sends an answer without the data that exceed the limit of all in flight; islands request them separately."""
        left = MAX_TOLD_BYTES - self._bytes_told

        def within(data: bytes | None) -> bytes | None:
            nonlocal left
            if data is None or len(data) > left:
                return None
            left -= len(data)
            return data

        answer = PollResponse.model_construct(
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

    async def _write(self, root: str, poll: PollRequest) -> dict[str, bytes | None]:
        """Does the writes of a poll; returns the data now at each path that it creates or replaces."""
        found = {path: await self._do(self._create, f"{root}/{path}", data) for path, data in poll.create.items()}
        for path, (tag, data) in poll.replace.items():
            async with self._replacing:
                found[path] = await self._do(self._replace, f"{root}/{path}", tag, data)
        for path, data in poll.put.items():
            await self._do(self._folder.put, f"{root}/{path}", memoryview(data), is_lasting=poll.is_lasting)
        if found or poll.put:
            self._tell()
        return found

    async def _await_change(self, root: str, poll: PollRequest, may_wait: bool) -> Found:
        """Waits until the objects below the prefixes differ from the known ones and the awaited object is there or its
        linger time is over, at most until the poll's time is over; returns all of them."""
        clock = asyncio.get_running_loop().time
        awaited, linger = (f"{root}/{one.path}", one.linger) if (one := poll.awaited) else ("", 0.0)
        known = {f"{root}/{path}": tag for path, tag in (poll.known or {}).items()}
        is_news = poll.known is None
        until = clock() + (linger if is_news else poll.seconds)
        while True:
            changed = self._changed  # before looking, so that no later change is missed
            found: Found = {}
            for prefix in poll.prefixes:
                found |= await self._look(f"{root}/{prefix}")
            if poll.paths:
                found |= await self._do(self._read_some, [f"{root}/{path}" for path in poll.paths])
            if not is_news and known != {path: tag for path, (tag, _) in found.items()}:
                is_news, until = True, min(until, clock() + linger)
            left = until - clock()
            is_complete = is_news and (not awaited or awaited in found)
            if is_complete or left <= 0 or not may_wait:
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, 2 * _STALE_SECONDS))

    def _create(self, path: str, data: bytes) -> bytes | None:
        """Creates an object unless it exists; returns its data, None if unreadable."""
        try:
            self._folder.create(path, data)
            return data
        except FileExistsError:
            return self._read(path)[1]

    def _replace(self, path: str, tag: str, data: bytes) -> bytes | None:
        """Replaces the object if it still has this tag; returns its data now, None if unreadable."""
        found_tag, found = self._read(path)
        if found_tag == _ABSENT or found_tag != tag:
            return found
        self._folder.put(path, memoryview(data))
        return data

    def _tell(self) -> None:
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self, prefix: str) -> Found:
        """Returns all objects below a prefix. Concurrent polls share one look at the folder."""
        now = asyncio.get_running_loop().time()
        count, at, task = self._looks.get(prefix, (-1, now, None))
        if task is None or count != self._count or now - at >= _STALE_SECONDS:
            self._looks = {name: look for name, look in self._looks.items() if now - look[1] < _STALE_SECONDS}
            task = asyncio.create_task(self._do(self._read_all, prefix))
            self._looks[prefix] = self._count, now, task
        return await asyncio.shield(task)  # other polls may need the look if this island disconnects

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
        """Reads several objects; leaves out absent ones."""
        found = {path: self._read(path) for path in paths}
        return {path: read for path, read in found.items() if read[0] != _ABSENT}

    def _read(self, path: str) -> tuple[str, bytes | None]:
        try:
            data = self._folder.read(path, MAX_DATA_BYTES)
        # an island that needs the object gets the reason when it reads it
        except (FileNotFoundError, NoFileError, OverflowError) as error:
            return type(error).__name__, None
        return xxhash.xxh3_64_hexdigest(data), data
