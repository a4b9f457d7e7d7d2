"""Serves a web application at a port that outsiders may reach, and limits what idle connections can hold.

A connection has `STRANGER_SECONDS` to send its first request. At most `MAX_STRANGERS` connections may be waiting for
it: beyond that the oldest is closed. Of more than `MAX_CONNECTIONS` the oldest that is not being answered is closed,
and so is one that sends no further request for `IDLE_SECONDS`.

A request's body has `BODY_SECONDS` to arrive; the application limits its size. All bodies that are still arriving may
together hold `MAX_COMING_BYTES`: beyond that the oldest request is dropped. All answers that clients have yet to read
may together hold `MAX_UNREAD_BYTES`: beyond that the client that has read nothing for the longest is cut off. So is
one that reads nothing for `UNREAD_SECONDS`.

The port stops answering while the process has few file descriptors left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import StreamReader, http_exceptions, web
from aiohttp.typedefs import Handler

from hf_diloco.utils.listening import Door, keep_door

logger = logging.getLogger("hf_diloco.serving")

STRANGER_SECONDS = 10.0
MAX_STRANGERS = 256
BODY_SECONDS = 300.0
"""Parts of objects have at most a few megabytes, and links may be slow."""
MAX_COMING_BYTES = 1 << 30
MAX_CONNECTIONS = 4096
IDLE_SECONDS = 120.0
"""Longer than clients of object stores keep idle connections, so that they rarely use one that is being closed."""
UNREAD_SECONDS = 300.0
MAX_UNREAD_BYTES = 192 << 20
_LOOK_SECONDS = 0.05  # interval of checking how much has arrived, and has been read
_END_SECONDS = 5.0
_LINGER_SECONDS = 1.0  # to read the rest of a refused request
_MOMENT = 0.01


class Serving:
    """Serves one application, not yet started, in the running event loop, on a listening socket that `end` closes."""

    def __init__(self, app: web.Application, listener: socket.socket) -> None:
        self._strangers: dict[asyncio.Protocol, asyncio.TimerHandle] = {}  # by time of arrival
        app.middlewares.insert(0, self._note)
        logger.addFilter(_is_worth_a_line)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            shutdown_timeout=_END_SECONDS,
            lingering_time=_LINGER_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
            auto_decompress=False,  # no client of ours compresses, and this stops decompression bombs
        )
        self._coming: dict[StreamReader, asyncio.Timeout] = {}  # by time of arrival
        self._answered: set[asyncio.BaseProtocol] = set()
        self._unread: dict[Any, tuple[int, float]] = {}  # bytes, and since when so many; the longest first
        self._looking: asyncio.TimerHandle | None = None
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._let_door_go: Callable[[], object] = lambda: None

    async def begin(self) -> None:
        """Starts to answer requests."""
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._receive, sock=self._listener)
        if sys.platform == "linux":
            self._let_door_go = keep_door(Door(self._listener.fileno()), self)

    async def end(self) -> None:
        """Answers the requests in flight, accepts no new ones, and frees the port."""
        self._let_door_go()
        with contextlib.suppress(OSError):  # otherwise forked processes would keep the port open
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _receive(self) -> asyncio.Protocol:
        """Returns the protocol that handles a new connection."""
        assert self._runner.server is not None
        answering = self._runner.server()
        loop = asyncio.get_running_loop()
        self._strangers[answering] = loop.call_later(STRANGER_SECONDS, self._send_away, answering)
        loop.call_later(_MOMENT, self._make_room)  # delayed, because many may arrive before the first has a transport
        return answering

    def _make_room(self) -> None:
        if len(self._strangers) > MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        connections = self._connections
        if (too_many := len(connections) - MAX_CONNECTIONS) > 0:
            for oldest in [one for one in connections if one not in self._answered][:too_many]:
                _cut_off(oldest)

    def _send_away(self, answering: Any) -> None:
        self._strangers.pop(answering).cancel()
        _cut_off(answering)

    @property
    def _connections(self) -> list[Any]:
        """Those that are open, in the order of their coming."""
        return [one for one in self._runner.server.connections if one.transport] if self._runner.server else []

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Stops a connection's first-request timer, and passes the request on when its whole body has arrived."""
        timer = self._strangers.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        if request.can_read_body:
            if (request.content_length or 0) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
            try:
                async with asyncio.timeout(BODY_SECONDS) as patience:
                    self._coming[request.content] = patience
                    self._look_later()
                    await request.read()
            except (OSError, RuntimeError):  # a timeout, or the connection was closed
                raise web.HTTPRequestTimeout from None
            finally:
                self._coming.pop(request.content, None)
        self._answered.add(request.protocol)
        try:
            self._look_later()
            answer = await handler(request)
            with contextlib.suppress(ConnectionError):
                await answer.prepare(request)
                await answer.write_eof()
            return answer
        finally:
            self._answered.discard(request.protocol)

    def _look_later(self) -> None:
        if self._looking is None and (self._coming or self._answered or self._unread):
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Drops the oldest requests still arriving, and slow readers, until the others are within the limits."""
        self._looking = None
        now = asyncio.get_running_loop().time()
        too_many = sum(body.total_bytes for body in self._coming) - MAX_COMING_BYTES
        while too_many > 0:
            oldest = next(iter(self._coming))
            self._coming.pop(oldest).reschedule(now)
            too_many -= oldest.total_bytes
        self._look_at_readers(now)
        self._make_room()  # where too many were being answered before
        self._look_later()

    def _look_at_readers(self, now: float) -> None:
        left = {one: size for one in self._connections if (size := one.transport.get_write_buffer_size())}
        stuck = {one: seen for one, seen in self._unread.items() if seen[0] == left.get(one)}
        self._unread = stuck | {one: (size, now) for one, size in left.items() if one not in stuck}
        too_many = sum(left.values()) - MAX_UNREAD_BYTES
        for one, (size, since) in list(self._unread.items()):
            if too_many > 0 or now - since >= UNREAD_SECONDS:
                _cut_off(one)
                too_many -= size


async def serve_until_stopped(app: web.Application, listener: socket.socket, begun: Callable[[], object]) -> None:
    """Serves an application until Ctrl-C or SIGTERM; `begun` is called when it does."""
    stopped, serving = asyncio.Event(), Serving(app, listener)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serving.begin()
    begun()
    await stopped.wait()
    await serving.end()


def _cut_off(answering: Any) -> None:
    if answering.transport is not None:
        answering.transport.abort()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Keeps malformed requests out of the log: outsiders could fill it."""
    return not (record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError))
