"""Web applications in this process, that of `hf-diloco rendezvous` above all."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from hf_diloco.store.server import StoreServer


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server of `folder`, which ends with the block."""
    with serving_app(StoreServer(folder).app()) as address:
        yield address


@contextmanager
def serving_app(app: web.Application) -> Iterator[str]:
    """The address of a server of `app`, which ends with the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
