"""Checks of the network: host name, interfaces and ports; latency and bandwidth to a peer or the store.

Both machines run `hf-diloco doctor` to measure the link between them. The one with `--listen` answers all clients at
once. A request is 13 bytes: a magic word, one letter, and a number of bytes N. E: answer with one byte. S: N bytes
follow, then answer with one byte. R: send N bytes. The bytes have no meaning and are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import statistics
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil

from hf_diloco.cli.devices import bind_error
from hf_diloco.cli.doctor import Finding, judge
from hf_diloco.errors import ConfigError, DiLoCoError, RendezvousError
from hf_diloco.planning.quantities import bit_rate, duration
from hf_diloco.utils import text
from hf_diloco.utils.urls import host_and_port, is_loopback, is_public, split_tcp_url

if TYPE_CHECKING:
    from hf_diloco.store.objects import ObjectStore

_GLOO = "GLOO_SOCKET_IFNAME"

MAGIC = b"hfdoctr1"
MOST_BYTES = 1 << 30
NUM_CLIENTS = 64
_REQUEST = struct.Struct("<8scI")
_BLOCK = bytes(1 << 16)
_TIMEOUT = 20.0
_SECONDS = 1.5  # target duration of a measurement, after slow start
_LONGEST_SECONDS = 10.0  # limit of one transfer: the bytes moved by then give the rate
_FIRST_BYTES = 1 << 18
_NUM_ECHOES = 7

NUM_WRITERS = 8
NUM_CONTESTS = 4
_STORE_TIMEOUT = 15.0
_NUM_TRIPS = 5
_PROBE = 8 << 20  # bytes written and read to measure the store's bandwidth
_FAR = 0.5  # seconds


def check_host_name() -> Iterator[Finding]:
    """Checks where the host name resolves to, as Gloo listens there unless an interface is set."""
    name = socket.gethostname()
    interface = os.environ.get(_GLOO)
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield _host_name(f"{name} does not resolve ({error.strerror})", interface)
        return
    if any(is_loopback(address) for address in addresses):
        yield _host_name(f"{name} resolves to this machine alone ({', '.join(addresses)})", interface)
    elif all(bind_error(address, 0) for address in addresses):
        yield _host_name(f"{name} resolves to another machine ({', '.join(addresses)})", interface)
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
    """Lists the addresses of this machine, and checks the interface that is set for Gloo."""
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
            f"{', '.join(public)} can be reached from the whole internet; without a key traffic between islands is "
            "neither encrypted nor authenticated",
            "let islands meet at addresses of a VPN or a private network; see docs/security.md",
        )


def check_port(port: int) -> Iterator[Finding]:
    """Checks that this machine can listen on a port."""
    error = bind_error("", port)
    if error is not None:
        remedies = {
            errno.EADDRINUSE: "choose another port, or end the program that listens there (ss -ltnp)",
            errno.EACCES: "choose a port from 1024 on",
        }
        remedy = remedies.get(error.errno or 0, "choose another port")
        yield Finding("port", "problem", f"{port} cannot be listened on ({error.strerror})", remedy)
        return
    yield Finding("port", "ok", f"{port} is free; whether a firewall lets others in, --peer shows from there")


# Another machine


def split_peer(text: str) -> tuple[str, int]:
    """Returns host and port of `--peer`; raises `ConfigError` if it is not HOST:PORT."""
    try:
        return split_tcp_url(f"tcp://{text.removeprefix('tcp://')}")
    except ValueError:
        raise ConfigError(f"--peer {text}: give HOST:PORT, as 10.0.0.1:29400") from None


def serve(listener: socket.socket) -> None:
    """Answers up to `NUM_CLIENTS` clients at once, until the process ends: a slow one keeps no others out."""
    free = threading.Semaphore(NUM_CLIENTS)

    def answer(client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError, ValueError):
                client.settimeout(_TIMEOUT)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _answer(client)
        finally:
            free.release()

    while True:
        client, _ = listener.accept()
        free.acquire()
        threading.Thread(target=answer, args=[client], name="hf-diloco-doctor", daemon=True).start()


def _answer(client: socket.socket) -> None:
    """Answers a client's requests until it disconnects; raises `ValueError` for another protocol."""
    while request := _read_request(client):
        magic, kind, num_bytes = _REQUEST.unpack(request)
        if magic != MAGIC or num_bytes > MOST_BYTES:
            raise ValueError("no request")
        if kind == b"S":
            _skip(client, num_bytes)
        if kind == b"R":
            _send(client, num_bytes)
        else:
            client.sendall(b"!")


def check_peer(host: str, port: int) -> Iterator[Finding]:
    """Connects, and measures the link if the peer runs `hf-diloco doctor --listen`."""
    begin, where = time.perf_counter(), host_and_port(host, port)
    try:
        connection = _connect(host, port)
    except OSError as error:
        yield Finding(
            "peer",
            "problem",
            f"{where} cannot be reached ({error.strerror or error})",
            f"run `hf-diloco doctor --listen {where}` there, and let firewalls pass that port",
        )
        return
    trip = time.perf_counter() - begin
    try:
        with connection:
            trip = min(trip, statistics.median(_timed(connection, b"E", 0)[1] for _ in range(_NUM_ECHOES)))
            there = _rate(connection, b"S", trip)
        with _connect(host, port) as connection:
            back = _rate(connection, b"R", trip)
    except (OSError, ValueError):
        yield Finding(
            "peer",
            "warning",
            f"{where} answers after {duration(trip)}, but not as a doctor: its rate was not measured",
            f"run `hf-diloco doctor --listen {where}` there",
        )
        return
    yield Finding(
        "peer",
        "ok",
        f"{where}: {duration(trip)} there and back, {bit_rate(there)} there, {bit_rate(back)} back, by one connection",
    )


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _rate(connection: socket.socket, kind: bytes, trip: float) -> float:
    """Measures bits per second, with more and more bytes until they take long enough. Do not reuse the connection."""
    num_bytes = _FIRST_BYTES
    while True:
        moved, seconds = _timed(connection, kind, num_bytes)
        seconds = max(seconds - trip, 1e-6)
        if moved < num_bytes or seconds >= _SECONDS / 3 or num_bytes >= MOST_BYTES // 4:
            return 8 * moved / seconds
        num_bytes = min(MOST_BYTES // 4, max(2 * num_bytes, round(num_bytes * _SECONDS / (seconds + trip))))


def _timed(connection: socket.socket, kind: bytes, num_bytes: int) -> tuple[int, float]:
    """Makes a request; returns the bytes moved and the seconds. Stops early after `_LONGEST_SECONDS`.

    Raises `ValueError` if the peer does not answer.
    """
    begin = time.perf_counter()
    until = begin + _LONGEST_SECONDS
    connection.sendall(_REQUEST.pack(MAGIC, kind, num_bytes))
    moved = _send(connection, num_bytes, until) if kind == b"S" else num_bytes
    if kind == b"R":
        moved = num_bytes - _skip(connection, num_bytes, until)
    elif moved == num_bytes:
        _skip(connection, 1)
    return moved, time.perf_counter() - begin


def _send(connection: socket.socket, num_bytes: int, until: float = math.inf) -> int:
    """Sends `num_bytes`, or stops after the first block past `until`; returns the bytes sent."""
    for start in range(0, num_bytes, len(_BLOCK)):
        connection.sendall(_BLOCK[: num_bytes - start])
        if time.perf_counter() >= until:
            return min(num_bytes, start + len(_BLOCK))
    return num_bytes


def _skip(connection: socket.socket, num_bytes: int, until: float = math.inf) -> int:
    """Receives and drops `num_bytes`, or stops after the first read past `until`; returns the bytes left.

    Raises `ValueError` if the peer has closed the connection.
    """
    while num_bytes:
        received = len(connection.recv(min(num_bytes, len(_BLOCK))))
        if not received:
            raise ValueError("no answer")
        num_bytes -= received
        if time.perf_counter() >= until:
            break
    return num_bytes


def _read_request(client: socket.socket) -> bytes:
    """Reads the next request; empty if the client has disconnected."""
    request = b""
    while len(request) < _REQUEST.size and (more := client.recv(_REQUEST.size - len(request))):
        request += more
    return request if len(request) == _REQUEST.size else b""


# The store in which islands meet


def check_store(url: str) -> Iterator[Finding]:
    """Writes, reads, lists and deletes a few objects below `checks/`, which islands ignore."""
    from hf_diloco.store.objects import ObjectStore

    try:
        store = ObjectStore(url, _STORE_TIMEOUT)
    except RendezvousError as error:
        yield Finding("store", "problem", str(error), "see docs/launching.md and docs/security.md (rights)")
        return
    name = f"checks/doctor-{uuid.uuid4().hex}"
    try:
        yield from _rights(store, name)
        yield _contests(store, name)
        yield _speed(store, name)
    except DiLoCoError as error:
        yield Finding("store", "problem", str(error), "give this machine the right to read, write, list and delete")
    finally:
        _clear(store, name)


def _rights(store: ObjectStore, name: str) -> Iterator[Finding]:
    store.check_creation()  # raises, with its own remedy, if a second creation overwrites
    path = f"{name}-rights"
    store.put(path, b"first")
    store.put(path, b"second")
    if store.get(path, 100) != b"second" or path not in {entry.path for entry in store.entries("checks")}:
        yield Finding(
            "store", "problem", f"{store.url} does not show what was just written", "use a store that is consistent"
        )
        return
    store.delete([path])
    if store.get(path, 100) is not None:
        yield Finding("store", "problem", f"{store.url} still shows what was deleted", "give the right to delete")
        return
    yield Finding("store", "ok", f"{store.url} can be read, written, listed and cleared")


def _contests(store: ObjectStore, name: str) -> Finding:
    """Checks create-if-absent: of several concurrent creations exactly one must succeed, and its value must stay."""
    for contest in range(NUM_CONTESTS):
        path = f"{name}-contest-{contest}"

        def create(writer: int, path: str = path) -> bool:
            return store.create(path, f"writer {writer}".encode())

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            won = [writer for writer, wins in enumerate(pool.map(create, range(NUM_WRITERS))) if wins]
        kept = store.get(path, 100)
        if len(won) != 1 or kept != f"writer {won[0]}".encode():
            return Finding(
                "create if absent",
                "problem",
                f"of {NUM_WRITERS} that created one object at once, {len(won)} were told that they had",
                "islands cannot agree there: use another store, or a newer version of this one",
            )
    return Finding(
        "create if absent", "ok", f"of {NUM_WRITERS} at once exactly one wins, {NUM_CONTESTS} times of {NUM_CONTESTS}"
    )


def _speed(store: ObjectStore, name: str) -> Finding:
    trip = statistics.median(_seconds(lambda: store.get(f"{name}-none", 100)) for _ in range(_NUM_TRIPS))
    values = memoryview(uuid.uuid4().bytes * (_PROBE // 16))
    writing = _seconds(lambda: store.put(f"{name}-probe", values))
    reading = _seconds(lambda: store.get(f"{name}-probe", _PROBE))
    found = (
        f"a request takes {duration(trip)}; {text.size(_PROBE)} are written at {bit_rate(8 * _PROBE / writing)}, "
        f"read at {bit_rate(8 * _PROBE / reading)}"
    )
    return judge("speed of the store", trip < _FAR, found, "use a store nearer by, or a larger diloco.sync_every")


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return max(time.perf_counter() - begin, 1e-9)


def _clear(store: ObjectStore, name: str) -> None:
    with contextlib.suppress(DiLoCoError):  # a missing right to delete has been reported
        store.delete(
            [f"{name}-{what}" for what in ("rights", "probe", *(f"contest-{n}" for n in range(NUM_CONTESTS)))]
        )
