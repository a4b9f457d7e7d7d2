"""The TCP store in which an island's own processes meet, listening on one address instead of on all interfaces.

    python -m hf_diloco.apps.common.island_store ARGUMENT...

runs `accelerate launch ARGUMENT...` with this store. Torch's store always listens on all interfaces.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from torch.distributed import TCPStore


class IslandStore(TCPStore):
    """Torch's store, but the host listens only on the address of `host_name`, if that belongs to this machine."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_master and kwargs.get("master_listen_fd") is None:
            listener = _listen(host_name, port)
            if listener is not None:
                kwargs["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, *args, **kwargs)


def use_island_store() -> None:
    """Makes torch's rendezvous in this process use `IslandStore`."""
    for name in ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"):
        module: Any = importlib.import_module(name)  # by name: torch.distributed has a function `rendezvous`
        module.TCPStore = IslandStore


def _listen(host: str, port: int) -> socket.socket | None:
    """Opens a listening socket; None if the address is not this machine's, such as a service name."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError:
        return None


def main() -> None:
    """Runs `accelerate launch` with the arguments of the command line."""
    from accelerate.commands.launch import main as launch

    use_island_store()
    launch()


if __name__ == "__main__":
    main()
