"""The store in which an island's own processes meet: on one address of the machine instead of on all of them.

    python -m hf_diloco.apps.common.island_store ARGUMENT...

is `accelerate launch ARGUMENT...` with such a store. Torch's listens on every interface, and has no setting for that.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from torch.distributed import TCPStore


class IslandStore(TCPStore):
    """As torch's, but its host listens on the address of `host_name` alone, if that is one of this machine."""

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
    """Has torch make its stores this way in this process, where it hosts what its processes meet in."""
    for name in ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"):
        module: Any = importlib.import_module(name)  # by name: torch.distributed has a function `rendezvous`
        module.TCPStore = IslandStore


def _listen(host: str, port: int) -> socket.socket | None:
    """None if that address is not this machine's, as the name of a service may be."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError:
        return None


def main() -> None:
    """`accelerate launch` with the arguments of the command line."""
    from accelerate.commands.launch import main as launch

    use_island_store()
    launch()


if __name__ == "__main__":
    main()
