"""Addresses on which islands and nodes may listen and meet."""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(host: str) -> Address | None:
    """A numeric address, in any form that the system takes (0, 127.1, ::ffff:10.0.0.1); None for a name."""
    try:
        address: Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def check_specific(host: str) -> str:
    """Returns `host`.

    Raises:
        ValueError: it stands for all interfaces of a machine, public ones included, and is no address to reach.
    """
    address = parse_address(host)
    if address is not None and address.is_unspecified:
        raise ValueError(
            f"{host} stands for every interface of the machine, public ones included, and leads nowhere from another "
            "machine: give the one address that the others reach, in a private network or a VPN; on one machine "
            "127.0.0.1"
        )
    return host


def is_public(numeric: str) -> bool:
    """Whether an address is one of the internet."""
    address = parse_address(numeric)
    return address is not None and address.is_global


def is_loopback(numeric: str) -> bool:
    """Whether an address reaches this machine alone."""
    address = parse_address(numeric)
    return address is not None and address.is_loopback
