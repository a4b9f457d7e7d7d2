"""The store that island 0, or node 0, keeps at tcp://HOST:PORT: `store.server` on a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

from hf_diloco.errors import RendezvousError
from hf_diloco.store.rendezvous import Place, await_host, listen, local_address, refuse_public
from hf_diloco.utils.limits import raise_file_limit
from hf_diloco.utils.urls import split_tcp_url
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

_RUN = "run"


def url_of(rendezvous: str) -> str:
    """Address, as an object store's, of what island 0 keeps at tcp://HOST:PORT."""
    host, port = split_tcp_url(rendezvous)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/{_RUN}"


def address_towards(rendezvous: str) -> str:
    """The local address that reaches island 0, which is where this rank listens for other islands."""
    return local_address(*split_tcp_url(rendezvous))


def find_store(config: Place, notes: WaitNotes | None = None) -> None:
    """Waits until island 0 listens.

    Args:
        config: where to meet.
        notes: say for whom this waits; default: nothing is said.

    Raises:
        RendezvousError: nobody answers within `join_timeout`, or traffic would cross a public network.
    """
    host, port = _checked(config)
    await_host(host, port, config, notes)


class StoreHost:
    """Serves a folder to the other islands until it is closed.

    Args:
        config: where to meet.
        folder: what islands leave for each other; a host that is started again with it goes on where it was. Default:
            it is in memory, and gone with this.

    Raises:
        RendezvousError: the port is in use, HOST is not this machine, the folder cannot be written, or traffic would
            cross a public network.
    """

    def __init__(self, config: Place, folder: Path | None = None) -> None:
        from hf_diloco.store.server import StoreServer
        from hf_diloco.store.serving import Serving

        host, port = _checked(config)
        raise_file_limit()
        listener = listen(host, port, config)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            app = StoreServer(folder).app()
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"island 0 keeps what islands leave for each other in {folder}, which cannot be written "
                f"({error.strerror or error}): choose another output_dir, with space for a few copies of the model"
            ) from None
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._serving = Serving(app, listener)
        self._thread = threading.Thread(target=self._serve, name="hf-diloco-store", daemon=True)
        self._thread.start()
        if folder:
            logger.info("islands meet here, at %s; what they leave for each other is in %s", config.rendezvous, folder)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serving.begin())
        self._loop.run_forever()
        self._loop.run_until_complete(self._serving.end())
        self._loop.close()

    def close(self) -> None:
        """Returns when nobody is served any more, and the port is free."""
        if os.getpid() != self._process:  # a fork has no such thread
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:  # which may be the one that collects garbage
                self._thread.join()


def _checked(config: Place) -> tuple[str, int]:
    assert config.rendezvous is not None
    host, port = split_tcp_url(config.rendezvous)
    for address in filter(None, (host, config.bind_address)):
        refuse_public(address, port, config)
    return host, port
