"""A real browser for tests: Chromium without a window, told what to do by its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.clocks import LONG
from tests.processes import Processes

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")


def find_browser() -> str | None:
    """The first browser of `PROGRAMS` that is installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Tab:
    """One tab of a browser.

    Attributes:
        events: what the browser has told: method and parameters, in order.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def listen(self) -> None:
        """Reads what the browser says, until it ends."""
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            else:
                self.events.append((found["method"], found.get("params", {})))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; returns its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, 2 * LONG)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_until(self, expression: str, seconds: float = 2 * LONG) -> None:
        """Waits until an expression is true in the page."""
        end = asyncio.get_running_loop().time() + seconds
        while not await self.value(expression):
            text = await self.value("document.body.innerText")
            assert asyncio.get_running_loop().time() < end, f"not true: {expression}\n{text}"
            await asyncio.sleep(0.2)


@asynccontextmanager
async def open_tab(program: str, folder: Path) -> AsyncIterator[Tab]:
    """A tab of a new browser that keeps its files in `folder`, and ends with the block."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    plain = ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
    command = [program, "--headless", *plain, *sandbox, f"--user-data-dir={folder}", "--remote-debugging-port=0"]
    with Processes() as processes:
        browser = processes.spawn([*command, "about:blank"])
        match = browser.wait_for(r"DevTools listening on ws://([\d.]+:\d+)/", 2 * LONG)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{match[1]}/json/list") as answer:
                tabs = await answer.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                listener = asyncio.create_task(tab.listen())
                yield tab
            await listener
