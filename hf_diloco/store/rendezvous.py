"""Ports at which islands meet, and addresses at which they listen for each other."""

from __future__ import annotations

import errno
import logging
import socket
import time
from typing import Protocol

from hf_diloco.errors import RendezvousError
from hf_diloco.utils.addresses import check_specific, is_loopback, is_public
from hf_diloco.utils.limits import raise_file_limit
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_ELSEWHERE = "192.0.2.1"  # an address of nobody, RFC 5737


class Place(Protocol):
    """The settings that say where to meet; see `DiLoCoConfig`."""

    @property
    def rendezvous(self) -> str | None:
        """tcp://HOST:PORT."""

    @property
    def bind_address(self) -> str | None:
        """Where to listen."""

    @property
    def allow_public_address(self) -> bool:
        """Whether that may be a public address."""

    @property
    def join_timeout(self) -> float:
        """Seconds to wait for the others."""


def find_address(config: Place) -> str:
    """Where this rank listens for other islands that it has met elsewhere: `bind_address`, or the usual way out.

    Raises:
        RendezvousError: that is a public address.
    """
    raise_file_limit()
    address = config.bind_address
    if address is None:
        try:
            address = local_address(_ELSEWHERE, 1)
        except OSError:  # this machine is connected to no other
            address = "127.0.0.1"
    refuse_public(address, 1, config)
    return address


def warn_if_exposed(address: str) -> None:
    """Names the risk of talking without authentication at an address that other machines reach."""
    try:
        _, numeric = _resolve(address, 1)
    except socket.gaierror:
        return
    if not is_loopback(numeric):
        logger.warning(
            "what goes over %s is neither encrypted nor authenticated: who reaches its ports can read the weights, "
            "change them, or end the run. Give all one key (key_file or HF_DILOCO_KEY), and keep strangers out by a "
            "firewall or a VPN (docs/security.md has a recipe)",
            address,
        )


def refuse_public(address: str, port: int, config: Place) -> None:
    """What goes between islands is neither encrypted nor authenticated: whoever wants that in public must say so."""
    try:
        _, numeric = _resolve(address, port)
    except socket.gaierror:
        return  # which is reported where it is met
    try:
        check_specific(numeric)
    except ValueError as error:
        raise RendezvousError(f"{address}: {error}") from None
    if not config.allow_public_address and is_public(numeric):
        raise RendezvousError(
            f"{address} ({numeric}) is a public address, and traffic between islands is neither encrypted nor "
            "authenticated without a key; with one, strangers who reach a port can still end a process: join the "
            "machines by a VPN and use its addresses (docs/security.md has a recipe), or meet in an object store. "
            "Where a firewall lets nobody else in, set allow_public_address: true"
        )


def listen(host: str, port: int, config: Place) -> socket.socket:
    """Opens the port on HOST's own address only, not on every interface of the machine."""
    address = config.bind_address or host
    try:
        family, numeric = _resolve(address, port)
        return socket.create_server((numeric, port), family=family, backlog=2048)
    except OSError as error:
        raise RendezvousError(_listen_problem(address, port, error)) from None


def _listen_problem(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {address} is in use: another program has it, or island 0 of this run is running already. "
            "End that, or choose another port for all islands (rendezvous)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{address} is not an address of this machine, but island 0 keeps the rendezvous: start island 0 on "
            "that machine, or, behind NAT, set bind_address to this machine's own address"
        )
    return f"cannot open the rendezvous at {address}:{port}: {error}. Check the rendezvous setting of island 0"


def await_host(host: str, port: int, config: Place, notes: WaitNotes | None) -> None:
    """Knocks until island 0 answers."""
    deadline = time.monotonic() + config.join_timeout
    wait = notes.begin(config.join_timeout, where=config.rendezvous) if notes else None
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except socket.gaierror as error:
            raise RendezvousError(f"rendezvous host {host!r} has no address ({error.strerror}): correct it") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"nobody answers at {config.rendezvous} after {config.join_timeout:g} s (join_timeout): "
                    f"{error.strerror or error}. Is island 0 running there, and does its firewall let this machine in?"
                ) from None
        if wait:
            wait.look([0])
        time.sleep(_RETRY_SECONDS)


def local_address(host: str, port: int) -> str:
    """The address of the interface that leads to the rendezvous."""
    family, numeric = _resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((numeric, port))  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """The numeric address of a host: of version 4 if it has one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])
