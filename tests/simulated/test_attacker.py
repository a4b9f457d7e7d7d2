"""Somebody on the way between two islands, through whom all bytes go: a proxy for Gloo's own connections.

He knows how Gloo frames what it carries (`Frame`), and does to messages what he likes. What he cannot do is in
docs/security.md, and so is what stays: to Gloo's frames themselves, which are not sealed, he can do anything.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch.distributed import HashStore

from hf_diloco.codecs import CODECS
from hf_diloco.errors import DamagedTransferError, IslandLostError
from hf_diloco.sealing import LinkKey
from hf_diloco.transport.gloo_addresses import GlooAddresses
from hf_diloco.transport.mesh import MeshExchange
from tests.clocks import LONG
from tests.islands import run_islands

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one loopback address only")

KEY = LinkKey(b"0123456789abcdef")
PROXY, ADDRESSES = "127.0.0.1", ["127.0.0.5", "127.0.0.7"]
"""Of two ends the one with the higher address connects: it must find that of the proxy lower than its own."""

SIZE = 5000  # values; one message each way and round
LEAST_BYTES = 4096  # of a message that the attacker takes for a payload

_PREAMBLE = struct.Struct("<6Q")
_AF_INET = struct.pack("=H", socket.AF_INET)


class Frame(NamedTuple):
    """One message of Gloo's as it is on the wire."""

    preamble: bytes
    payload: bytes


class Attacker:
    """A proxy for each of island 0's ports for Gloo, and what went through all.

    Args:
        attack: says what goes on instead of a payload, by its number among those of its connection and direction;
            None cuts the connection.
    """

    def __init__(self, attack: Callable[[Attacker, int, bytes], bytes | None]) -> None:
        self.seen = bytearray()
        self.kept: list[bytes] = []
        self.num_changed = 0
        self._attack = attack
        self._listeners: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def divert(self, address: bytes) -> bytes:
        """What Gloo tells of its address, with the proxy's instead of island 0's."""
        at = address.find(socket.inet_aton(ADDRESSES[0])) - 4
        if at < 0 or address[at : at + 2] != _AF_INET:
            return address
        port = int.from_bytes(address[at + 2 : at + 4], "big")
        with self._lock:
            if port not in self._listeners:
                self._listeners[port] = socket.create_server((PROXY, port))
                threading.Thread(target=self._serve, args=(port,), daemon=True).start()
        return address[: at + 4] + socket.inet_aton(PROXY) + address[at + 8 :]

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()

    def _serve(self, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listeners[port].accept()
                far = socket.create_connection((ADDRESSES[0], port))
                sequence = _read(near, 8)  # says which pair calls
                far.sendall(sequence)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        number = 0
        with contextlib.suppress(OSError, EOFError):
            while True:
                preamble = _read(source, _PREAMBLE.size)
                payload: bytes | None = _read(source, _PREAMBLE.unpack(preamble)[0] - _PREAMBLE.size)
                assert payload is not None
                with self._lock:
                    self.seen += preamble + payload
                    if len(payload) >= LEAST_BYTES:
                        before, payload = payload, self._attack(self, number, payload)
                        self.num_changed += payload != before
                        number += 1
                if payload is None:
                    break
                sink.sendall(preamble + payload)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _read(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = source.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


@pytest.fixture
def attackers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Attacker]]:
    """The first one sits between all who connect from now on."""
    listed: list[Attacker] = []
    hear = GlooAddresses.hear

    def diverted(self: GlooAddresses, peer: int, message: bytes) -> None:
        key, value = json.loads(message)
        hear(self, peer, json.dumps([key, listed[0].divert(bytes.fromhex(value)).hex()]).encode())

    monkeypatch.setattr(GlooAddresses, "hear", diverted)
    yield listed
    for attacker in listed:
        attacker.close()


def make_values(island: int, number: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * number + island))


def averages(key: LinkKey | None, num_rounds: int = 4, payload: str = "fp32") -> list[list[object]]:
    """What each island has after each exchange: the average, or the error."""
    store = HashStore()

    def run(island: int) -> list[object]:
        mesh = MeshExchange(store, "lane", island, 2, ADDRESSES[island], LONG, key)
        outcomes: list[object] = []
        for number in range(num_rounds):
            values = make_values(island, number)
            try:
                mesh.average(values, [1.0, 1.0], CODECS[payload])
            except (DamagedTransferError, IslandLostError) as error:
                outcomes.append(error)
                if isinstance(error, IslandLostError):
                    break
            else:
                outcomes.append(values)
        mesh.close()
        return outcomes

    return run_islands(2, run)


def pass_on(attacker: Attacker, number: int, payload: bytes) -> bytes:
    return payload


def alter(attacker: Attacker, number: int, payload: bytes) -> bytes:
    return payload if number != 1 else payload[:-1] + bytes([payload[-1] ^ 1])


def alter_tag(attacker: Attacker, number: int, payload: bytes) -> bytes:
    return payload if number != 1 else payload[:-20] + bytes([payload[-20] ^ 128]) + payload[-19:]


def blank(attacker: Attacker, number: int, payload: bytes) -> bytes:
    return payload if number != 1 else bytes(len(payload))


def replay(attacker: Attacker, number: int, payload: bytes) -> bytes:
    """The message of the round before, of the same island; it was genuine there."""
    if number == 0:
        attacker.kept.append(payload)
    return payload if number != 1 else attacker.kept[0]


def reflect(attacker: Attacker, number: int, payload: bytes) -> bytes:
    """What the other island has sent in the same round, or the one before."""
    attacker.kept.append(payload)
    return payload if number != 1 else next(kept for kept in reversed(attacker.kept[:-1]) if kept != payload)


ATTACKS = {attack.__name__: attack for attack in (alter, alter_tag, blank, replay, reflect)}


def test_the_wire_carries_nothing_of_a_payload(attackers: list[Attacker]) -> None:
    for payload in ("fp32", "int8"):
        attackers.insert(0, Attacker(pass_on))
        assert all(isinstance(kept, torch.Tensor) for kept in averages(KEY, 2, payload)[0])
        seen = bytes(attackers[0].seen)
        assert len(seen) > 2 * SIZE
        windows = {seen[start : start + 32] for start in range(len(seen) - 31)}
        for number in range(2):
            for island in range(2):
                values = make_values(island, number)
                code = torch.empty(CODECS[payload].num_bytes(SIZE), dtype=torch.uint8)
                CODECS[payload].encode(values, code)
                plain = bytes(code.numpy())
                blocks = {plain[start : start + 32] for start in range(0, len(plain) - 31, 32)}
                assert not blocks & windows, "64 equal bytes would hold one of these blocks"


def test_the_same_proxy_sees_all_where_there_is_no_key(attackers: list[Attacker]) -> None:
    attackers.append(Attacker(pass_on))
    averages(None, 1)
    assert make_values(0, 0).numpy().tobytes()[:64] in bytes(attackers[0].seen)


@pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "authenticated"])
@pytest.mark.parametrize("name", ATTACKS)
def test_what_was_done_to_a_message_is_refused_and_the_next_round_goes_well(
    attackers: list[Attacker], name: str, encrypt: bool
) -> None:
    attackers.append(Attacker(ATTACKS[name]))
    outcomes = averages(LinkKey(KEY.secret, encrypt))
    assert attackers[0].num_changed
    refused = 0
    for island, found in enumerate(outcomes):
        for number, outcome in enumerate(found):
            if isinstance(outcome, torch.Tensor):
                mean = (make_values(0, number) + make_values(1, number)) / 2
                assert torch.allclose(outcome, mean), "what was altered was taken"
            else:
                assert isinstance(outcome, DamagedTransferError), outcome
                assert outcome.islands == (1 - island,)
                assert "altered on its way" in str(outcome)
                refused += 1
        assert isinstance(found[-1], torch.Tensor), "the round after it"
    assert refused == attackers[0].num_changed


def test_who_cuts_a_connection_is_not_waited_out(attackers: list[Attacker]) -> None:
    attackers.append(Attacker(lambda attacker, number, payload: payload if number < 1 else None))
    for island, found in enumerate(averages(KEY)):
        assert isinstance(found[0], torch.Tensor)
        assert isinstance(found[-1], IslandLostError)
        assert found[-1].islands == (1 - island,)
