"""`hf-diloco rendezvous`: a place to meet for islands that have no bucket, on a machine that all of them reach."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from hf_diloco.errors import ConfigError, RendezvousError
from hf_diloco.utils.addresses import is_loopback, is_public
from hf_diloco.utils.limits import raise_file_limit
from hf_diloco.utils.urls import split_tcp_url

logger = logging.getLogger("hf_diloco")


@dataclass(frozen=True)
class RendezvousOptions:
    """What the command line asks for.

    Attributes:
        address: HOST:PORT, where to listen.
        folder: that holds what islands leave for each other.
        allow_public_address: listen also where strangers may reach the port.
    """

    address: str
    folder: Path
    allow_public_address: bool = False


def run_rendezvous(options: RendezvousOptions) -> int:
    """Runs `hf-diloco rendezvous` until SIGINT or SIGTERM; returns its exit code.

    Raises:
        ConfigError: the address is none, or the folder cannot be used.
        RendezvousError: the address is public or not this machine's, or the port is in use.
    """
    from aiohttp import web

    from hf_diloco.store.server import StoreServer

    listener = _listen(options)
    host, port = listener.getsockname()[:2]
    try:
        app = StoreServer(options.folder).app()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--folder {options.folder}: {error.strerror or error}. Name a folder whose parent is there, with space "
            "for a few copies of the model"
        ) from None
    raise_file_limit()
    if not is_loopback(host):
        logger.warning(
            "who reaches %s:%d can read the weights, and delete what lies here: keep strangers out by a firewall or a "
            "VPN, and give the islands a key, so that nobody forges it (docs/security.md)",
            host,
            port,
        )
    print(f"islands meet at http://{_shown(host)}:{port}/NAME, kept in {options.folder}; Ctrl-C ends this", flush=True)
    web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=5)
    return 0


def _listen(options: RendezvousOptions) -> socket.socket:
    try:
        host, port = split_tcp_url(f"tcp://{options.address}")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (ValueError, socket.gaierror):
        raise ConfigError(
            f"address {options.address!r}: expected HOST:PORT, this machine's address as the islands see it, as in "
            "10.0.0.1:29400"
        ) from None
    if is_public(str(address[0])) and not options.allow_public_address:
        raise RendezvousError(
            f"{address[0]} is a public address, and nothing that goes there is encrypted: join the machines by a VPN "
            "and use its addresses (docs/security.md has a recipe). Where a firewall lets nobody else in, add "
            "--allow-public-address"
        )
    try:
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise RendezvousError(_problem(options.address, error)) from None


def _problem(address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port of {address} is in use: choose another, or end the program that has it"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is no address of this machine: give the one by which the islands reach it"
    return f"cannot listen at {address}: {error.strerror or error}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
