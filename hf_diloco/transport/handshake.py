"""Who is on the other end of a connection: each side proves that it holds the run's key, for this very connection.

    A -> B   nonce_A                      B -> A   nonce_B
    A -> B   HMAC(key, A, B, nonce_B)     B -> A   HMAC(key, B, A, nonce_A)

What is sent afterwards is neither encrypted nor authenticated: see docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

import torch

from hf_diloco.errors import ForgedError
from hf_diloco.transport.connections import Connections, Deadline, Transfers

_NONCE_BYTES = 32
NUM_TAGS = 2
"""Tags that a handshake uses on each connection; where there is one, from 1."""


class _End(NamedTuple):
    peer: int
    connection: int


def authenticate(links: Connections, name: str, own: int, peers: list[int], key: bytes, timeout: float) -> int:
    """Returns when every peer has proved, on each connection to it, that it holds the key.

    Args:
        links: fresh connections.
        name: theirs, unique in the run; proofs for another one are worth nothing here.
        own: this end's number.
        peers: the others' numbers.
        key: of the run.
        timeout: seconds that all of it may take.

    Returns:
        The last tag that was used.

    Raises:
        ForgedError: a peer does not hold the key.
        IslandLostError: a peer is gone.
    """
    deadline = Deadline(timeout)
    ends = [_End(peer, connection) for peer in peers for connection in range(links.num_connections)]
    nonces = {end: _random() for end in ends}
    received = _swap(links, nonces, 1, deadline)
    proofs = {end: _proof(key, name, end.connection, own, end.peer, received[end]) for end in ends}
    answers = _swap(links, proofs, 2, deadline)
    for end in ends:
        expected = _proof(key, name, end.connection, end.peer, own, nonces[end])
        if not hmac.compare_digest(bytes(expected.numpy()), bytes(answers[end].numpy())):
            raise ForgedError(
                f"who answered at the address of peer {end.peer} does not hold the run's key: give all islands one "
                "key (key_file or HF_DILOCO_KEY), and see who listens there"
            )
    return _tag(links, NUM_TAGS, links.num_connections - 1)


def _swap(
    links: Connections, messages: dict[_End, torch.Tensor], step: int, deadline: Deadline
) -> dict[_End, torch.Tensor]:
    transfers = Transfers()
    received = {}
    for end, message in messages.items():
        received[end] = torch.empty_like(message)
        tag = _tag(links, step, end.connection)
        links.send(message, end.peer, tag, transfers)
        links.receive(received[end], end.peer, tag, transfers)
    links.wait(transfers, deadline)
    return received


def _tag(links: Connections, step: int, connection: int) -> int:
    """One that leads over this connection."""
    return step * links.num_connections + connection


def _random() -> torch.Tensor:
    return torch.frombuffer(bytearray(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8)


def _proof(key: bytes, name: str, connection: int, prover: int, verifier: int, nonce: torch.Tensor) -> torch.Tensor:
    code = hmac.new(key, digestmod=hashlib.sha256)
    numbers = (b"%d" % number for number in (connection, prover, verifier))
    for part in (b"hf-diloco mesh", name.encode(), *numbers, bytes(nonce.numpy())):
        code.update(len(part).to_bytes(8, "big"))
        code.update(part)
    return torch.frombuffer(bytearray(code.digest()), dtype=torch.uint8)
