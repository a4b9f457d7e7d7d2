"""Opens a port at an address that a user gives, with errors that say what is wrong with it."""

from __future__ import annotations

import errno
import socket

from hf_diloco.errors import ConfigError, RendezvousError
from hf_diloco.utils.urls import is_public, split_tcp_url


def listen(address: str, readers: str, allow_public_address: bool | None = None) -> socket.socket:
    """Listens at HOST:PORT, which `readers` (as in "the islands") reach this machine by.

    Args:
        address: HOST:PORT.
        readers: for messages.
        allow_public_address: the option of that name; None for a command that has none.

    Raises:
        ConfigError: the address is none.
        RendezvousError: the address is public or not this machine's, or the port is in use.
    """
    try:
        host, port = split_tcp_url(f"tcp://{address}")
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (ValueError, socket.gaierror):
        raise ConfigError(
            f"address {address!r}: expected HOST:PORT, this machine's address as {readers} see it, as in "
            "10.0.0.1:29400"
        ) from None
    if is_public(str(found[0])) and not allow_public_address:
        raise RendezvousError(
            f"{found[0]} is a public address, and nothing that goes there is encrypted: join the machines by a VPN "
            "and use its addresses (docs/security.md has a recipe)"
            + (
                ". Where a firewall lets nobody else in, add --allow-public-address"
                if allow_public_address is False
                else ""
            )
        )
    try:
        return socket.create_server(found[:2], family=family, backlog=1024)
    except OSError as error:
        raise RendezvousError(_problem(address, readers, error)) from None


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket, as `http://HOST:PORT`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _problem(address: str, readers: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port of {address} is in use: choose another, or end the program that has it"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is no address of this machine: give the one by which {readers} reach it"
    return f"cannot listen at {address}: {error.strerror or error}"
