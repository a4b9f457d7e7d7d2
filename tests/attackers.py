"""Somebody on the way between islands, through whom all bytes go.

It knows how Gloo frames what it carries, and does to its messages what it likes. What it cannot do is in
docs/security.md, and so is what stays: to Gloo's frames themselves, which are not sealed, it can do anything.

It gets onto the way in one of two places. `attackers` has the islands of this process tell each other its ports in
place of Gloo's own; that needs Linux' many loopback addresses. `tests/programs/attacked_islands.py` makes it the
router between two islands with networks of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest

from hf_diloco.transport.handshake import GlooAddresses

PROXY, ADDRESSES = "127.0.0.1", ["127.0.0.5", "127.0.0.7", "127.0.0.9"]
"""Of two ends the one with the higher address connects: it must find that of the proxy lower than its own."""

_PREAMBLE = struct.Struct("<6Q")
_AF_INET = struct.pack("=H", socket.AF_INET)


class Way(NamedTuple):
    """One direction of one connection: the connections are numbered as they come."""

    connection: int
    is_answer: bool


Attack = Callable[["Attacker", Way, int], list[bytes] | None]
"""What goes on in the place of `attacker.kept[way][number]`, all framed as that was; None cuts the connection."""


class Attacker:
    """A proxy for the connections between islands, and what went through all.

    Args:
        attack: what is done to each payload.
        least_bytes: of a message that is taken for a payload.

    Attributes:
        seen: all that came, whoever sent it.
        kept: the payloads of each way, as they came.
        num_changed: for how many something else went on.
    """

    def __init__(self, attack: Attack, least_bytes: int = 4096) -> None:
        self.seen = bytearray()
        self.kept: defaultdict[Way, list[bytes]] = defaultdict(list)
        self.num_changed = 0
        self._attack = attack
        self._least_bytes = least_bytes
        self._numbers = itertools.count()
        self._listeners: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def divert(self, address: bytes) -> bytes:
        """What Gloo tells of its address, with the proxy's instead of the first island's."""
        at = address.find(socket.inet_aton(ADDRESSES[0])) - 4
        if at < 0 or address[at : at + 2] != _AF_INET:
            return address
        port = int.from_bytes(address[at + 2 : at + 4], "big")
        with self._lock:
            if port not in self._listeners:
                self._listeners[port] = socket.create_server((PROXY, 0))
                threading.Thread(target=self._serve, args=(port,), daemon=True).start()
        own = self._listeners[port].getsockname()[1]
        return address[: at + 2] + own.to_bytes(2, "big") + socket.inet_aton(PROXY) + address[at + 8 :]

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()

    def relay(self, near: socket.socket, far: socket.socket) -> None:
        """Passes on what two ends of a connection of Gloo's say, as the attack will have it."""
        number = next(self._numbers)
        _send_at_once(near, far)
        far.sendall(read(near, 8))  # says which pair calls
        for way, ends in ((Way(number, False), (near, far)), (Way(number, True), (far, near))):
            threading.Thread(target=self._pump, args=(way, *ends), daemon=True).start()

    def relay_as_it_is(self, near: socket.socket, far: socket.socket) -> None:
        """Passes on what others say."""
        _send_at_once(near, far)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _serve(self, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listeners[port].accept()
                self.relay(near, socket.create_connection((ADDRESSES[0], port)))

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                preamble = read(source, _PREAMBLE.size)
                payload = read(source, _PREAMBLE.unpack(preamble)[0] - _PREAMBLE.size)
                with self._lock:
                    self.seen += preamble + payload
                    passed = self._meddle(way, payload)
                if passed is None:
                    break
                for payload in passed:
                    sink.sendall(preamble + payload)
        _close(source, sink)

    def _meddle(self, way: Way, payload: bytes) -> list[bytes] | None:
        if len(payload) < self._least_bytes:
            return [payload]
        self.kept[way].append(payload)
        passed = self._attack(self, way, len(self.kept[way]) - 1)
        self.num_changed += passed != [payload]
        return passed

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.seen += data
                sink.sendall(data)
        _close(source, sink)


def read(source: socket.socket, length: int) -> bytes:
    """So many bytes; raises `EOFError` if they do not come."""
    data = bytearray()
    while len(data) < length:
        part = source.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def have_64_bytes_in_common(seen: bytes | bytearray, secret: bytes) -> bool:
    """Whether a run of so many bytes of the secret was seen; or of 32, if these begin at a multiple of that."""
    blocks = {secret[start : start + 32] for start in range(0, len(secret) - 31, 32)}
    return any(bytes(seen[start : start + 32]) in blocks for start in range(len(seen) - 31))


def _send_at_once(*ends: socket.socket) -> None:
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@pytest.fixture
def attackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Attacker]]:
    """The first one sits between the first island and all others of this process that connect from now on."""
    listed: list[Attacker] = []
    hear = GlooAddresses.hear

    def diverted(self: GlooAddresses, peer: int, message: bytes) -> None:
        key, value = json.loads(message)
        hear(self, peer, json.dumps([key, listed[0].divert(bytes.fromhex(value)).hex()]).encode())

    monkeypatch.setattr(GlooAddresses, "hear", diverted)
    yield listed
    for attacker in listed:
        attacker.close()


# Attacks


def pass_on(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    return [attacker.kept[way][number]]


def drop(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    return []


def cut(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    return None


def flip(where: int) -> Attack:
    """Alters one bit of the byte at this index."""

    def attack(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
        altered = bytearray(attacker.kept[way][number])
        altered[where] ^= 1
        return [bytes(altered)]

    return attack


def blank(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    return [bytes(len(attacker.kept[way][number]))]


def earlier(by: int) -> Attack:
    """What the same end has sent so many payloads before."""
    return lambda attacker, way, number: [attacker.kept[way][number - by]]


def reflect(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    """What the other end of the connection has sent last."""
    return [attacker.kept[Way(way.connection, not way.is_answer)][-1]]


def of_another_island(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    """What was said last to the same end, or by it, over the connection with another island."""
    others = (other for other in attacker.kept if other.is_answer == way.is_answer and other != way)
    return [attacker.kept[next(others)][-1]]


def late(attacker: Attacker, way: Way, number: int) -> list[bytes] | None:
    """The payload before, which was dropped, behind this one."""
    return attacker.kept[way][number - 1 : number + 1][::-1]


def at(script: Mapping[int, Attack]) -> Attack:
    """Does something to payloads with these numbers, and lets the others pass."""
    return lambda attacker, way, number: script.get(number, pass_on)(attacker, way, number)


def attacks(parts: int) -> dict[str, dict[int, Attack]]:
    """Each attack that makes an end refuse what it has received: what is done to the payloads of one exchange.

    Args:
        parts: payloads that an exchange sends over a way; at least two. One exchange has gone before.
    """
    return {
        "first byte": {0: flip(0)},
        "tag": {0: flip(-20)},
        "counter": {0: flip(-1)},
        "blank": {0: blank},
        "round": {0: earlier(parts)},
        "chunk": {1: earlier(1)},
        "reflected": {0: reflect},
        "reordered": {0: drop, 1: late},
    }
