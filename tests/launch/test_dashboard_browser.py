"""The live page in a real browser."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.browser import find_browser, open_tab
from tests.clocks import LONG
from tests.processes import Process, Processes, find_free_port
from tests.report_runs import start, sync, train, write_island

PROGRAM = [sys.executable, "-m", "hf_diloco.cli", "dashboard"]


def write_islands(folder: Path, num_rounds: int) -> None:
    rounds = [sync(number, 2 * number, waiting=1.0) for number in range(1, num_rounds + 1)]
    for island in (0, 1):
        write_island(folder, island, [start(island), train(1, 3.0 + island), *rounds])


@pytest.mark.slow
def test_the_page_follows_the_run(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium is installed (Debian: apt install chromium)")
    folder = tmp_path / "demo"
    write_islands(folder, 1)
    with Processes() as processes:
        place = f"127.0.0.1:{find_free_port()}"
        program = processes.spawn([*PROGRAM, folder, "--interval", "1", "--listen", place])
        address = program.wait_for(r"open (\S+)/ in a browser", LONG)[1]
        asyncio.run(_look(browser, tmp_path / "profile", address, folder, program))


async def _look(browser: str, profile: Path, address: str, folder: Path, program: Process) -> None:
    async with open_tab(browser, profile) as tab:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        await tab.call("Page.navigate", url=f"{address}/")
        await tab.wait_until("document.querySelectorAll('figure svg').length === 4")
        assert "Every round (1)" in await tab.value("document.body.innerText")
        # A variable of the page colours the figures: its style sheet is in force.
        assert await tab.value("getComputedStyle(document.documentElement).getPropertyValue('--c0')") != ""
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        await tab.value("document.querySelector('#rounds').open = true")

        write_islands(folder, 2)
        await tab.wait_until("document.body.innerText.includes('Every round (2)')")
        assert await tab.value("document.querySelector('#rounds').open")
        assert await tab.value("document.querySelector('#note').textContent.startsWith('as of')")
        requests = [found["request"]["url"] for method, found in tab.events if method == "Network.requestWillBeSent"]
        assert len(requests) > 2
        assert [url for url in requests if not url.startswith((f"{address}/", "data:"))] == []
        logged = [found["entry"] for method, found in tab.events if method == "Log.entryAdded"]
        assert [entry["text"] for entry in logged if entry["level"] == "error"] == []
        assert [found for method, found in tab.events if method == "Runtime.exceptionThrown"] == []

        program.interrupt()
        await tab.wait_until("document.querySelector('#note').textContent.includes('no answer')")
        assert "Every round (2)" in await tab.value("document.body.innerText")
