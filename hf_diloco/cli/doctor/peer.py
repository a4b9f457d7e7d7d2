"""How far another machine is, and how much the way carries: measured between two that run `hf-diloco doctor`.

The one that was asked to listen answers one client at a time. A request is 13 bytes: a magic word, one letter, and a
number of bytes. E: echo one byte. S: so many bytes follow, then answer with one. R: send so many bytes. What is sent
means nothing and is thrown away.
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import time
from collections.abc import Iterator

from hf_diloco.cli.doctor.finding import Finding
from hf_diloco.errors import ConfigError
from hf_diloco.planning.quantities import bit_rate, duration
from hf_diloco.utils.urls import split_tcp_url

MAGIC = b"hfdoctr1"
MOST_BYTES = 1 << 30
_REQUEST = struct.Struct("<8scI")
_BLOCK = bytes(1 << 16)
_TIMEOUT = 20.0
_SECONDS = 1.5
"""That a measurement should take, once slow start is over."""

_LONGEST_SECONDS = 10.0
"""Of one transfer: what has been moved by then tells the rate too."""

_FIRST_BYTES = 1 << 18
_NUM_ECHOES = 7


def split_address(text: str, option: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: it is no HOST:PORT, naming the option.
    """
    try:
        return split_tcp_url(f"tcp://{text.removeprefix('tcp://')}")
    except ValueError:
        raise ConfigError(f"{option} {text}: give HOST:PORT, as 10.0.0.1:29400") from None


def serve(listener: socket.socket) -> None:
    """Answers clients, one after the other, until the process ends."""
    while True:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError, ValueError):
            client.settimeout(_TIMEOUT)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(client)


def _answer(client: socket.socket) -> None:
    """All requests of a client, until it goes; raises ValueError if it speaks something else."""
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
    """Connects, and measures if the other end answers `hf-diloco doctor --listen`."""
    begin = time.perf_counter()
    try:
        connection = _connect(host, port)
    except OSError as error:
        yield Finding(
            "peer",
            "problem",
            f"{host}:{port} cannot be reached ({error.strerror or error})",
            f"run `hf-diloco doctor --listen {host}:{port}` there, and let firewalls pass that port",
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
            f"{host}:{port} answers after {duration(trip)}, but not as a doctor: its rate was not measured",
            f"run `hf-diloco doctor --listen {host}:{port}` there",
        )
        return
    yield Finding(
        "peer",
        "ok",
        f"{host}:{port}: {duration(trip)} there and back, {bit_rate(there)} there, {bit_rate(back)} back, by one "
        "connection",
    )


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _rate(connection: socket.socket, kind: bytes, trip: float) -> float:
    """Bits a second: of more and more bytes, until they take long enough to tell. The connection is then used up."""
    num_bytes = _FIRST_BYTES
    while True:
        moved, seconds = _timed(connection, kind, num_bytes)
        seconds = max(seconds - trip, 1e-6)
        if moved < num_bytes or seconds >= _SECONDS / 3 or num_bytes >= MOST_BYTES // 4:
            return 8 * moved / seconds
        num_bytes = min(MOST_BYTES // 4, max(2 * num_bytes, round(num_bytes * _SECONDS / (seconds + trip))))


def _timed(connection: socket.socket, kind: bytes, num_bytes: int) -> tuple[int, float]:
    """Bytes moved, and the seconds they took; fewer than asked for where `_LONGEST_SECONDS` are over.

    Raises:
        ValueError: the other end gave no answer.
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
    """Sends so many bytes; returns how many it has, where time is over before."""
    for start in range(0, num_bytes, len(_BLOCK)):
        if time.perf_counter() >= until:
            return start
        connection.sendall(_BLOCK[: num_bytes - start])
    return num_bytes


def _skip(connection: socket.socket, num_bytes: int, until: float = math.inf) -> int:
    """Receives so many bytes and forgets them; returns how many are left, where time is over before.

    Raises:
        ValueError: the other end has gone.
    """
    while num_bytes and time.perf_counter() < until:
        received = len(connection.recv(min(num_bytes, len(_BLOCK))))
        if not received:
            raise ValueError("no answer")
        num_bytes -= received
    return num_bytes


def _read_request(client: socket.socket) -> bytes:
    """The next request; nothing if the client has gone."""
    request = b""
    while len(request) < _REQUEST.size and (more := client.recv(_REQUEST.size - len(request))):
        request += more
    return request if len(request) == _REQUEST.size else b""
