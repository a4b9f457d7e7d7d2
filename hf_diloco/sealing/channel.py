"""Messages over one connection that nobody on the way can read, alter, replay or put in another place: AES-256-GCM.

    sealed message   ciphertext | tag (16 bytes) | counter (8 bytes)
    key              of this connection and direction alone; see `agreement`
    nonce            4 bytes of zeros | counter, which counts this key's messages: no nonce is used twice
    associated data  the message's place: number of the transfer | number of the part in it, 8 bytes each

Both ends know a message's place without being told, and each place has one message: one that was sent before, or for
another transfer, connection, direction or run, does not open. Without encryption the message stands in clear, and
the tag is that of an empty ciphertext with place and message as associated data (GMAC).
"""

from __future__ import annotations

import itertools
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.utils import Buffer

TAG_BYTES, COUNTER_BYTES = 16, 8
OVERHEAD = TAG_BYTES + COUNTER_BYTES
"""Bytes that a sealed message has more than the message."""


class Channel:
    """One end of a connection. Any number of threads may use it.

    Args:
        send_key: for what this end sends.
        receive_key: for what the other end sends.
        encrypt: whether messages are encrypted, or only authenticated.
    """

    def __init__(self, send_key: bytes, receive_key: bytes, encrypt: bool = True) -> None:
        self.encrypts = encrypt
        self._send_key, self._receive_key = send_key, receive_key
        self._send, self._receive = AESGCM(send_key), AESGCM(receive_key)
        self._counter = itertools.count()

    def seal_into(self, place: tuple[int, int], message: Buffer, sealed: memoryview) -> None:
        """Writes the sealed message to `sealed`, which is `OVERHEAD` bytes longer."""
        counter = self._next_counter()
        sealed[-COUNTER_BYTES:] = counter
        self._send.encrypt_into(_nonce(counter), message, _pack(place), sealed[:-COUNTER_BYTES])

    def open_into(self, place: tuple[int, int], sealed: memoryview, message: Buffer) -> bool:
        """Writes the message to `message`; False if it is not what the other end sealed for this place."""
        nonce = _nonce(sealed[-COUNTER_BYTES:])
        try:
            self._receive.decrypt_into(nonce, sealed[:-COUNTER_BYTES], _pack(place), message)
        except InvalidTag:
            return False
        return True

    def sign(self, place: tuple[int, int], message: Buffer) -> bytes:
        """What goes behind a message in clear, `OVERHEAD` bytes."""
        counter = self._next_counter()
        cipher = Cipher(AES256(self._send_key), GCM(_nonce(counter))).encryptor()
        cipher.authenticate_additional_data(_pack(place))
        cipher.authenticate_additional_data(message)
        cipher.finalize()
        return cipher.tag + counter

    def verify(self, place: tuple[int, int], message: Buffer, signature: bytes) -> bool:
        """Whether a message in clear is what the other end has signed for this place."""
        tag, counter = signature[:TAG_BYTES], signature[TAG_BYTES:]
        cipher = Cipher(AES256(self._receive_key), GCM(_nonce(counter), tag)).decryptor()
        cipher.authenticate_additional_data(_pack(place))
        cipher.authenticate_additional_data(message)
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True

    def seal(self, place: tuple[int, int], message: bytes) -> bytes:
        """A small message, sealed in the way of this connection."""
        if not self.encrypts:
            return message + self.sign(place, message)
        sealed = bytearray(len(message) + OVERHEAD)
        self.seal_into(place, message, memoryview(sealed))
        return bytes(sealed)

    def open(self, place: tuple[int, int], sealed: bytes) -> bytes | None:
        """The message; None if it is not what the other end sealed for this place."""
        if len(sealed) < OVERHEAD:
            return None
        message = bytearray(sealed[:-OVERHEAD])
        if not self.encrypts:
            return bytes(message) if self.verify(place, message, sealed[-OVERHEAD:]) else None
        return bytes(message) if self.open_into(place, memoryview(sealed), message) else None

    def _next_counter(self) -> bytes:
        return next(self._counter).to_bytes(COUNTER_BYTES, "big")


def _nonce(counter: Buffer) -> bytes:
    return bytes(4) + bytes(counter)


def _pack(place: tuple[int, int]) -> bytes:
    return struct.pack(">QQ", *place)
