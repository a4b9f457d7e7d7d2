"""The dashboard: the report of a run folder, and the store's state of islands, rounds and objects.

The page can change nothing, and loads nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hf_diloco.dashboard import prometheus
from hf_diloco.dashboard.source import Look, Now, Source
from hf_diloco.report.figures import LegendEntry, Plot, colour, columns, draw
from hf_diloco.report.html import figures_of, fill
from hf_diloco.report.rows import Tile
from hf_diloco.status import models
from hf_diloco.status.models import RunStatus
from hf_diloco.utils import text
from hf_diloco.utils.urls import is_loopback

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
SCRIPT = "dashboard.js"
# A look that takes longer is followed by a pause of `_REST` times the excess: in a long run one look takes minutes.
_QUICK_SECONDS, _REST = 1.0, 4
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOW_COLUMNS = ("", "state", "step", "round", "loss", "speed", "written", "message")


class Dashboard:
    """The page of one run. However many clients read it, the run is read once per interval, and never without clients.

    Args:
        source: reads the run.
        interval: seconds between two looks.
        is_local: answer only programs of this machine, and only under its own name: otherwise a page of another site
            in a local browser could rebind its name to this machine.
        has_metrics: serve `/metrics`, for Prometheus.
    """

    def __init__(self, source: Source, interval: float, is_local: bool, has_metrics: bool = False) -> None:
        self._source, self._interval = source, interval
        self._is_local, self._has_metrics = is_local, has_metrics
        self._script = files("hf_diloco").joinpath("templates", SCRIPT).read_text(encoding="utf-8")
        self._looking = asyncio.Lock()
        self._found: tuple[float, Look] | None = None  # the time of the next look, and the last look
        self._live: tuple[Look, str] | None = None

    def app(self) -> web.Application:
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
        page = fill("dashboard.html.j2", title=look.name, interval=f"{self._interval:g}", live=live)
        return web.Response(text=page, content_type="text/html")

    async def _changes(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._rendered(), content_type="text/html")

    async def _get_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus.exposition(await self._look()), headers=prometheus.HEADERS)

    async def _look(self) -> Look:
        async with self._looking:
            begun = time.monotonic()
            if self._found is None or begun >= self._found[0]:
                look = await asyncio.to_thread(self._source.look)
                ended = time.monotonic()
                self._found = ended + max(self._interval, _REST * (ended - begun - _QUICK_SECONDS)), look
            return self._found[1]

    async def _rendered(self) -> str:
        """Returns the live part of the page, rendered once per look."""
        look = await self._look()
        async with self._looking:  # matplotlib draws in one thread at a time
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


def render_live(look: Look) -> str:
    """Renders the live part of the page."""
    figures = figures_of(look.run, look.report) if look.run and look.report else None
    return fill(
        "live.html.j2",
        name=look.name,
        figures=figures,
        warnings=[*look.problems, *(look.report.warnings if look.report else ())],
        now_columns=NOW_COLUMNS,
        now=[_now_row(look, number, now) for number, now in look.now.items()],
        store=_of_store(look.status) if look.status else None,
    )


def _now_row(look: Look, number: int, now: Now) -> tuple[str, ...]:
    """Returns the progress of an island or node, in the order of `NOW_COLUMNS`."""
    progress = now.progress
    steps = text.count(progress.step) + (f" of {progress.max_steps:,}" if progress.max_steps else "")
    speed = (
        f"{text.rate(progress.tokens_per_second)} {progress.unit}/s" if progress.tokens_per_second else text.MISSING
    )
    return (
        f"{look.report.noun if look.report else 'island'} {number}",
        progress.state,
        steps,
        text.count(progress.round),
        text.loss(progress.loss),
        speed,
        f"{text.seconds(round(now.age))} ago",
        text.printable(progress.message) or text.MISSING,
    )


def _of_store(status: RunStatus) -> dict[str, Any]:
    numbers = [island.island for island in status.islands]
    return {
        "subtitle": text.name_all(numbers, status.unit),
        "unit": status.unit,
        "tiles": tiles(status),
        "plots": plots(status),
        "figures": models.figures(status),
        "island_columns": models.island_columns(status),
        "island_rows": [_printable(models.island_row(status, island)) for island in status.islands],
        "round_columns": models.ROUND_COLUMNS,
        "round_rows": [_printable(models.round_row(entry)) for entry in status.rounds],
        "refused": [_printable(entry) for entry in status.refused.items()],
    }


def _printable(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.printable(cell) for cell in cells)


def tiles(status: RunStatus) -> list[Tile]:
    """Returns the headline figures, if only the store is available."""
    alive = [island for island in status.islands if island.presence == "alive"]
    silent = [island.island for island in status.islands if island.presence == "silent"]
    speed = sum(island.tokens_per_second or 0 for island in alive)
    sent = sum(entry.payload_bytes or 0 for entry in status.rounds)
    of_all = f"of {status.num_rounds:,}" if status.num_rounds is not None else "committed"
    who = Tile(f"{status.unit.capitalize()}s", f"{len(alive)} alive", f"silent: {text.numbers(silent) or 'none'}")
    refused = Tile("Refused", text.count(len(status.refused)), text.plural("object", len(status.refused)))
    if status.unit == "node":
        furthest = max((node.steps or 0 for node in status.islands), default=0)
        return [who, Tile("Steps", text.count(furthest), "of the furthest node"), refused]
    rounds = f"in the last {text.counted(len(status.rounds), 'round')}"
    return [
        Tile("Rounds", text.count(status.round), of_all),
        Tile("A round takes", models.took(status.seconds_per_round), f"median of the last {len(status.rounds)}"),
        who,
        Tile("Tokens/s", text.rate(speed or None), "of the islands that are alive"),
        *([] if status.waits_for_all else [Tile("Offered", text.size(sent), rounds)]),
        refused,
    ]


def plots(status: RunStatus) -> list[Plot]:
    """Returns plots of the last rounds' traffic and time. Losses are in the islands' own records, not in the store."""
    rounds = sorted(status.rounds, key=lambda entry: entry.round)
    payload = tuple((float(one.round), float(one.payload_bytes)) for one in rounds if one.payload_bytes is not None)
    took = tuple((float(one.round), one.seconds) for one in rounds if one.seconds is not None)
    if status.unit == "node":
        return []
    traffic = [] if status.waits_for_all else [_bars("Traffic of each round", "pseudo-gradients offered", payload, 0)]
    return [*traffic, _bars("Time of each round", "from the commit of the round before", took, 2)]


@functools.lru_cache(maxsize=2)  # a page has two plots; many looks find no new round
def _bars(title: str, label: str, points: tuple[tuple[float, float], ...], number: int) -> Plot:
    if not points:
        return Plot(title, "Nothing is known of it yet.", None)

    def paint(axes: Axes) -> None:
        axes.bar(*columns(points), color=colour(number), linewidth=0)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: text.seconds(value) if number else text.size(value))
        axes.set(xlabel="round")

    legend = (LegendEntry(label, colour(number), "box"),)
    return Plot(title, "", draw(title.partition(" ")[0].lower(), paint), legend)
