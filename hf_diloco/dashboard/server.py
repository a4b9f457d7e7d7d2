"""Serves the live page. Nothing can be changed through it, and what it loads comes from itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web

from hf_diloco.dashboard import prometheus
from hf_diloco.dashboard.page import render_live, render_page
from hf_diloco.dashboard.source import Look, Source
from hf_diloco.utils.urls import is_loopback

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
SCRIPT = "dashboard.js"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The page of one run. However many read it, the run is looked at once an interval, and never if nobody does.

    Args:
        source: looks at the run.
        interval: seconds between two looks.
        is_local: only programs of this machine are answered; of these, no page of another site that a browser here
            shows, which could make its own name mean this machine.
        has_metrics: `/metrics` is there, for Prometheus.
    """

    def __init__(self, source: Source, interval: float, is_local: bool, has_metrics: bool = False) -> None:
        self._source, self._interval = source, interval
        self._is_local, self._has_metrics = is_local, has_metrics
        self._script = files("hf_diloco").joinpath("templates", SCRIPT).read_text(encoding="utf-8")
        self._looking = asyncio.Lock()
        self._found: tuple[float, Look] | None = None
        self._live: tuple[Look, str] | None = None

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/live", self._changes)
        app.router.add_get(f"/{SCRIPT}", self._get_script)
        if self._has_metrics:
            app.router.add_get("/metrics", self._metrics)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        live = await self._rendered()
        look = await self._look()
        return web.Response(text=render_page(look.name, self._interval, live), content_type="text/html")

    async def _changes(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._rendered(), content_type="text/html")

    async def _get_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus.exposition(await self._look()), headers=prometheus.HEADERS)

    async def _look(self) -> Look:
        async with self._looking:
            if self._found is None or time.monotonic() - self._found[0] >= self._interval:
                look = await asyncio.to_thread(self._source.look)
                self._found = time.monotonic(), look
            return self._found[1]

    async def _rendered(self) -> str:
        """The part that changes, drawn once a look."""
        look = await self._look()
        async with self._looking:  # figures are drawn by one thread at a time
            if self._live is None or self._live[0] is not look:
                self._live = look, await asyncio.to_thread(render_live, look)
            return self._live[1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._is_local and not _names_this_machine(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="ask for it by a loopback address, or as localhost", headers=HEADERS)
        answer = await handler(request)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer


def _names_this_machine(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name == "localhost" or is_loopback(name.strip("[]"))
