"""Names, interfaces and ports of this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import psutil

from hf_diloco.cli.doctor.finding import Finding
from hf_diloco.utils.urls import is_loopback, is_public

_GLOO = "GLOO_SOCKET_IFNAME"


def check_host_name() -> Iterator[Finding]:
    """Gloo listens where the host name leads to, unless it is told the interface."""
    name = socket.gethostname()
    interface = os.environ.get(_GLOO)
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield _host_name(f"{name} does not resolve ({error.strerror})", interface)
        return
    if any(is_loopback(address) for address in addresses):
        yield _host_name(f"{name} resolves to this machine alone ({', '.join(addresses)})", interface)
    else:
        yield Finding("host name", "ok", f"{name} is {', '.join(addresses)}")


def _host_name(found: str, interface: str | None) -> Finding:
    if interface:
        return Finding("host name", "ok", f"{found}, but {_GLOO} is {interface}")
    return Finding(
        "host name",
        "warning",
        f"{found}: ranks of an island on several machines would not find each other",
        f"set {_GLOO} to the interface that reaches the other machines, or correct /etc/hosts; islands themselves use "
        "the address that reaches the rendezvous",
    )


def check_interfaces() -> Iterator[Finding]:
    """Which addresses there are, and whether the interface that Gloo is told is one."""
    states = psutil.net_if_stats()
    interfaces = {
        name: [str(one.address) for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    for name in filter(None, os.environ.get(_GLOO, "").split(",")):
        if not interfaces.get(name):
            known = ", ".join(one for one, addresses in interfaces.items() if addresses)
            yield Finding(
                "interfaces", "problem", f"{_GLOO}={name} is no interface with an address", f"one of {known}"
            )
            return
    outside = {
        name: [one for one in addresses if not is_loopback(one) and not one.startswith("fe80")]
        for name, addresses in interfaces.items()
    }
    shown = "; ".join(f"{name} {', '.join(found)}" for name, found in outside.items() if found)
    if not shown:
        yield Finding("interfaces", "warning", "only loopback: no other machine is reached", "connect the machine")
        return
    yield Finding("interfaces", "ok", shown)
    if public := [one for found in outside.values() for one in found if is_public(one)]:
        yield Finding(
            "interfaces",
            "warning",
            f"{', '.join(public)} can be reached from the whole internet; traffic between islands is not encrypted",
            "let islands meet at addresses of a VPN or a private network; see docs/security.md",
        )


def check_port(port: int) -> Iterator[Finding]:
    """Whether this machine may listen on a port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            remedies = {
                errno.EADDRINUSE: "choose another port, or end the program that listens there (ss -ltnp)",
                errno.EACCES: "choose a port from 1024 on",
            }
            remedy = remedies.get(error.errno or 0, "choose another port")
            yield Finding("port", "problem", f"{port} cannot be listened on ({error.strerror})", remedy)
            return
    yield Finding("port", "ok", f"{port} is free; whether a firewall lets others in, --peer shows from there")
