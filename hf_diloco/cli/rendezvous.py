"""`hf-diloco rendezvous`: a place to meet for islands that have no bucket, on a machine that all of them reach."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from hf_diloco.cli.listening import listen, url_of
from hf_diloco.errors import ConfigError
from hf_diloco.utils.limits import raise_file_limit
from hf_diloco.utils.urls import is_loopback

logger = logging.getLogger("hf_diloco")


def run_rendezvous(address: str, folder: Path, allow_public_address: bool) -> int:
    """Runs `hf-diloco rendezvous` until SIGINT or SIGTERM; returns its exit code.

    Args:
        address: HOST:PORT, where to listen.
        folder: that holds what islands leave for each other.
        allow_public_address: listen also where strangers may reach the port.

    Raises:
        ConfigError: the address is none, or the folder cannot be used.
        RendezvousError: the address is public or not this machine's, or the port is in use.
    """
    from hf_diloco.store.server import StoreServer
    from hf_diloco.store.serving import Serving

    listener = listen(address, "the islands", allow_public_address)
    url = url_of(listener)
    try:
        app = StoreServer(folder).app()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--folder {folder}: {error.strerror or error}. Name a folder whose parent is there, with space "
            "for a few copies of the model"
        ) from None
    raise_file_limit()
    if not is_loopback(listener.getsockname()[0]):
        logger.warning(
            "who reaches %s can read the weights, and delete what lies here: keep strangers out by a firewall or a "
            "VPN, and give the islands a key, so that nobody forges it (docs/security.md)",
            url,
        )

    async def serve() -> None:
        stopped, serving = asyncio.Event(), Serving(app, listener)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await serving.begin()
        print(f"islands meet at {url}/NAME, kept in {folder}; Ctrl-C ends this", flush=True)
        await stopped.wait()
        await serving.end()

    asyncio.run(serve())
    return 0
