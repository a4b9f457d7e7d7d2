"""Seals values and blocks in a shared store: only holders of the run's key can make or read them, each for one path.

    sealed value     base64 of: nonce (12 random bytes) | AES-256-GCM of the value, with its path as associated data
    sealed block     nonce (12 random bytes) | ciphertext | tag (16 bytes)
    key              HKDF-SHA256 of the run's, for the object's path
    associated data  the block's number, 8 bytes

Each block of an object opens by itself, so that a reader fetches only those that it needs. The record that announces
the object has the number of blocks and their digests.
"""

from __future__ import annotations

import base64
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.utils import Buffer

from hf_diloco.sealing.keys import Secret, derive

_NONCE_BYTES = 12
BLOCK_OVERHEAD = _NONCE_BYTES + 16  # and the tag
"""Bytes that sealing adds to a block."""


class ValueSeal:
    """Seals the values of one run, with the run's key; those of other runs do not open. No two are equal."""

    def __init__(self, key: bytes, run: str) -> None:
        self._cipher = AESGCM(derive(key, "encrypted records", run))

    def wrap(self, path: str, value: bytes) -> str:
        """Seals a value for a path."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, value, path.encode())).decode()

    def open(self, path: str, sealed: bytes) -> bytes | None:
        """Opens a value; None if it was not sealed in this run for this path."""
        try:
            raw = base64.b64decode(sealed, validate=True)
            if base64.b64encode(raw) != sealed:  # another base64 encoding of the same bytes
                raise ValueError
            return self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], path.encode())
        except (ValueError, InvalidTag):
            return None


class BlockSeal(Secret):
    """Seals and opens the objects of one run, with the run's key; those of other runs do not open.

    Any number of threads may use it.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self._key = derive(key, "encrypted objects", run)

    def seal_into(self, path: str, number: int, block: Buffer, sealed: memoryview) -> None:
        """Writes block `number` of the object `path`, sealed, to `sealed`, which is `BLOCK_OVERHEAD` bytes longer."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed[:_NONCE_BYTES] = nonce
        self._cipher(path).encrypt_into(nonce, block, _place(number), sealed[_NONCE_BYTES:])

    def open(self, path: str, number: int, sealed: memoryview) -> bytes | None:
        """Opens a block; None if it was not sealed in this run for this path and number."""
        if sealed.nbytes < BLOCK_OVERHEAD:
            return None
        try:
            return self._cipher(path).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _place(number))
        except InvalidTag:
            return None

    def _cipher(self, path: str) -> AESGCM:
        return AESGCM(derive(self._key, "object", path))


def _place(number: int) -> bytes:
    return number.to_bytes(8, "big")
