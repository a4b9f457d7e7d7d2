"""Who is on the other end of a connection: each side proves that it holds the run's key, for this very connection.

    A -> B   nonce_A                      B -> A   nonce_B
    A -> B   HMAC(key, A, B, nonce_B)     B -> A   HMAC(key, B, A, nonce_A)

What is sent afterwards is neither encrypted nor authenticated: see docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import torch

from hf_diloco.errors import ForgedError
from hf_diloco.exchange.connections import Connections, Deadline, Transfers

_NONCE_BYTES = 32
_NONCE_TAG, _PROOF_TAG = 1, 2
NUM_TAGS = 2
"""Tags that a handshake uses, from 1."""


def authenticate(links: Connections, name: str, own: int, peers: list[int], key: bytes, timeout: float) -> None:
    """Returns when every peer has proved that it holds the key.

    Args:
        links: fresh connections.
        name: theirs, unique in the run; proofs for another one are worth nothing here.
        own: this end's number.
        peers: the others' numbers.
        key: of the run.
        timeout: seconds that all of it may take.

    Raises:
        ForgedError: a peer does not hold the key.
        IslandLostError: a peer is gone.
    """
    deadline = Deadline(timeout)
    nonces = {peer: _random() for peer in peers}
    received = _swap(links, nonces, _NONCE_TAG, deadline)
    proofs = {peer: _proof(key, name, own, peer, received[peer]) for peer in peers}
    answers = _swap(links, proofs, _PROOF_TAG, deadline)
    for peer in peers:
        expected = _proof(key, name, peer, own, nonces[peer])
        if not hmac.compare_digest(bytes(expected.numpy()), bytes(answers[peer].numpy())):
            raise ForgedError(
                f"who answered at the address of peer {peer} does not hold the run's key: give all islands one key "
                "(key_file or HF_DILOCO_KEY), and see who listens there"
            )


def _swap(
    links: Connections, messages: dict[int, torch.Tensor], tag: int, deadline: Deadline
) -> dict[int, torch.Tensor]:
    transfers = Transfers()
    received = {}
    for peer, message in messages.items():
        received[peer] = torch.empty_like(message)
        links.send(message, peer, tag, transfers)
        links.receive(received[peer], peer, tag, transfers)
    links.wait(transfers, deadline)
    return received


def _random() -> torch.Tensor:
    return torch.frombuffer(bytearray(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8)


def _proof(key: bytes, name: str, prover: int, verifier: int, nonce: torch.Tensor) -> torch.Tensor:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"hf-diloco mesh", name.encode(), b"%d" % prover, b"%d" % verifier, bytes(nonce.numpy())):
        code.update(len(part).to_bytes(8, "big"))
        code.update(part)
    return torch.frombuffer(bytearray(code.digest()), dtype=torch.uint8)
