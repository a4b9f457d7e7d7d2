"""Blocks of an object in a store that others read too: AES-256-GCM, each for its place in one object of one run.

    sealed block     nonce (12 random bytes) | ciphertext | tag (16 bytes)
    key              HKDF-SHA256 of the run's, for the object's path
    associated data  the block's number, 8 bytes

Each block opens by itself, so that a reader takes those that it needs. How many an object has, and their digests, says
the record that announces it.
"""

from __future__ import annotations

import secrets
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.utils import Buffer

from hf_diloco.sealing.keys import derive

_NONCE_BYTES, _TAG_BYTES = 12, 16
BLOCK_OVERHEAD = _NONCE_BYTES + _TAG_BYTES
"""Bytes that a sealed block has more than the block."""


class BlockSeal:
    """Seals and opens the objects of one run. Any number of threads may use it.

    Args:
        key: the run's.
        run: names the run; blocks of another do not open.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self._key = derive(key, "encrypted objects", run)

    def __reduce__(self) -> Any:
        raise TypeError("a BlockSeal holds a key: it is neither copied nor pickled")

    def seal_into(self, path: str, number: int, block: Buffer, sealed: memoryview) -> None:
        """Writes a sealed block to `sealed`, which is `BLOCK_OVERHEAD` bytes longer.

        Args:
            path: of the object.
            number: of the block in it, from 0.
            block: its bytes.
            sealed: where to.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed[:_NONCE_BYTES] = nonce
        self._cipher(path).encrypt_into(nonce, block, _place(number), sealed[_NONCE_BYTES:])

    def open(self, path: str, number: int, sealed: memoryview) -> bytes | None:
        """The block; None if nobody of this run has sealed it for this place."""
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
