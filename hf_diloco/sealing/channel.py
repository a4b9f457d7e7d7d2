"""Connections that nobody in between can read or alter: how the two ends agree on keys, and how they seal messages.

X25519, authenticated by a shared key:

    A -> B   public_A                            B -> A   public_B
    A -> B   HMAC(confirm_A, transcript, S_A) S_A   B -> A   HMAC(confirm_B, transcript, S_B) S_B

    transcript = SHA-256(protocol, mode, name, connection, low end, high end, public key of each)
    four keys  = HKDF-SHA256(salt: the shared key, input: X25519(private, public of the other), info: transcript)
    S_A        = where islands have identities: A's signature of the transcript, in the name of its island; else empty

The two messages of each pair cross on the wire: one round trip in all. The schedule is that of TLS 1.3 with a
pre-shared key and an ephemeral exchange (psk_dhe_ke): someone who learns the shared key later cannot read earlier
traffic. docs/security.md compares the two.

Then AES-256-GCM:

    sealed message   ciphertext | tag (16 bytes) | counter (8 bytes)
    key              of this connection and direction alone
    nonce            4 bytes of zeros | counter, which counts this key's messages: no nonce is used twice
    associated data  the message's place: number of the transfer | number of the part in it, 8 bytes each

Both ends know a message's place without sending it, and each place has one message: a replayed message, or one for
another transfer, connection, direction or run, does not open. Without encryption the message travels in clear, and the
tag is that of an empty ciphertext with place and message as associated data (GMAC).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections.abc import Collection
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.utils import Buffer

from hf_diloco.errors import ForgedError
from hf_diloco.sealing.keys import KEY_BYTES, LinkKey, pack
from hf_diloco.utils.text import name_all


@dataclass(frozen=True)
class Parties:
    """Maps the ends of a lane, which are numbered from 0, to islands; without `islands` the numbers are the islands'.
    `unit` is what the run calls a participant."""

    islands: tuple[int, ...] = ()
    unit: str = "island"

    def island(self, end: int) -> int:
        """Returns the island of an end."""
        return self.islands[end] if self.islands else end

    def name(self, end: int) -> str:
        """Returns for example "island 3"."""
        return f"{self.unit} {self.island(end)}"

    def names(self, ends: Collection[int]) -> str:
        """Returns for example "islands 1, 3"."""
        return name_all([self.island(end) for end in ends], self.unit)


ISLANDS = Parties()
"""Ends that have the numbers of their islands."""

TAG_BYTES, COUNTER_BYTES = 16, 8
OVERHEAD = TAG_BYTES + COUNTER_BYTES
"""Bytes that sealing adds to a message."""


class Channel:
    """One end of a connection; without `encrypt` messages are only authenticated. Any number of threads may use it."""

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
        """Opens a sealed message into `message`; returns False if the other end did not seal it for this place."""
        nonce = _nonce(sealed[-COUNTER_BYTES:])
        try:
            self._receive.decrypt_into(nonce, sealed[:-COUNTER_BYTES], _pack(place), message)
        except InvalidTag:
            return False
        return True

    def sign(self, place: tuple[int, int], message: Buffer) -> bytes:
        """Returns the `OVERHEAD` bytes that authenticate a message in clear; they are sent after it."""
        counter = self._next_counter()
        cipher = Cipher(AES256(self._send_key), GCM(_nonce(counter))).encryptor()
        cipher.authenticate_additional_data(_pack(place))
        cipher.authenticate_additional_data(message)
        cipher.finalize()
        return cipher.tag + counter

    def verify(self, place: tuple[int, int], message: Buffer, signature: bytes) -> bool:
        """Whether the other end signed this message in clear for this place."""
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
        """Seals a small message, with or without encryption as the connection requires."""
        if not self.encrypts:
            return message + self.sign(place, message)
        sealed = bytearray(len(message) + OVERHEAD)
        self.seal_into(place, message, memoryview(sealed))
        return bytes(sealed)

    def open(self, place: tuple[int, int], sealed: bytes) -> bytes | None:
        """Opens a small message; None if the other end did not seal it for this place."""
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


MESSAGE_BYTES = 32
"""Size of a public key, and of a confirmation without a signature."""

_PROTOCOL = b"hf-diloco connection 2"
_PURPOSE = "connection"


class Agreement:
    """One end's part of a key agreement, for one connection; to be used once. `public` is the first message, for the
    other end.

    `name` is of the lane, unique in the run; `connection` is its number among those between the two.
    """

    def __init__(
        self, key: LinkKey, name: str, connection: int, own: int, peer: int, parties: Parties = ISLANDS
    ) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self._key = key
        self._name = name
        self._connection = connection
        self._own = own
        self._peer = peer
        self._parties = parties

    def confirm(self, public: bytes) -> bytes:
        """Returns the second message, in answer to the other end's first; `ForgedError` if that is no public key."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point of small order, which would make every secret the same
            raise self._refusal() from None
        self._transcript = self._describe(public)
        keys = HKDF(SHA256(), 4 * KEY_BYTES, salt=self._key.secret, info=self._transcript).derive(shared)
        low, high, confirm_low, confirm_high = (keys[start : start + KEY_BYTES] for start in range(0, 128, KEY_BYTES))
        is_low = self._own < self._peer
        self._keys = (low, high) if is_low else (high, low)
        mine, self._theirs = (confirm_low, confirm_high) if is_low else (confirm_high, confirm_low)
        signature = self._key.signer.sign(_PURPOSE, self._transcript) if self._key.signer else b""
        return _confirmation(mine, self._transcript, signature) + signature

    def finish(self, confirmation: bytes) -> Channel:
        """Returns the connection's channel, if the other end's second message proves that it has the same keys.

        Raises `ForgedError` if it does not, and `UnknownIdentityError` if it does, but is not the island that this
        connection leads to.
        """
        code, signature = confirmation[:MESSAGE_BYTES], confirmation[MESSAGE_BYTES:]
        if not hmac.compare_digest(code, _confirmation(self._theirs, self._transcript, signature)):
            raise self._refusal()
        if self._key.signer:
            self._key.signer.check(self._parties.island(self._peer), signature, _PURPOSE, self._transcript)
        return Channel(*self._keys, self._key.encrypt)

    def _refusal(self) -> ForgedError:
        name, island = self._parties.name(self._peer), self._parties.island(self._peer)
        return ForgedError(
            f"the process that answered for {name} does not hold the run's key, or has another `encrypt` setting, or "
            f"no identity where the others have some: give all {self._parties.unit}s one key (key_file or "
            "HF_DILOCO_KEY) and the same settings, and see who listens there",
            island,
        )

    def _describe(self, public: bytes) -> bytes:
        low, high = sorted([(self._own, self.public), (self._peer, public)], key=lambda end: end[0])
        numbers = (b"%d" % number for number in (self._connection, low[0], high[0]))
        mode = (b"encrypted" if self._key.encrypt else b"authenticated") + b" signed" * (self._key.signer is not None)
        return hashlib.sha256(pack(_PROTOCOL, mode, self._name.encode(), *numbers, low[1], high[1])).digest()


def _confirmation(key: bytes, transcript: bytes, signature: bytes) -> bytes:
    return hmac.digest(key, pack(transcript, signature), "sha256")
