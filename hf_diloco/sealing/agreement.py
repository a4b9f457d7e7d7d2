"""How two ends of a connection come to session keys that nobody else has: X25519, authenticated by a shared key.

    A -> B   public_A                            B -> A   public_B
    A -> B   HMAC(confirm_A, transcript, S_A) S_A   B -> A   HMAC(confirm_B, transcript, S_B) S_B

    transcript = SHA-256(protocol, mode, name, connection, low end, high end, public key of each)
    four keys  = HKDF-SHA256(salt: the shared key, input: X25519(private, public of the other), info: transcript)
    S_A        = where islands have identities: A's signature of the transcript, in the name of its island; else empty

Each pair of messages crosses on the way: a round trip in all. The schedule is that of TLS 1.3 with a pre-shared key
and an ephemeral exchange (psk_dhe_ke): who learns the shared key later cannot read what was sent before.
docs/security.md compares the two.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hf_diloco.errors import ForgedError
from hf_diloco.sealing.channel import Channel
from hf_diloco.sealing.keys import KEY_BYTES, LinkKey, pack
from hf_diloco.sealing.parties import ISLANDS, Parties

MESSAGE_BYTES = 32
"""Of a public key, and of a confirmation without a signature."""

_PROTOCOL = b"hf-diloco connection 2"
_PURPOSE = "connection"


class Agreement:
    """One end's part, for one connection; to be used once.

    Args:
        key: see `LinkKey`.
        name: of what is connected, unique in the run.
        connection: its number among those between the two.
        own: this end's number.
        peer: the other's.
        parties: which islands they are; default: of these numbers.

    Attributes:
        public: the first message, for the other end.
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
        """The second message, in answer to the other end's first.

        Raises:
            ForgedError: it is no public key.
        """
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
        """The connection's keys, if the other end's second message shows that it has them too.

        Raises:
            ForgedError: it does not.
            UnknownIdentityError: it has them, but is not the island that this connection leads to.
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
            f"who answered for {name} does not hold the run's key, or has another `encrypt` setting, or no identity "
            f"where the others have some: give all {self._parties.unit}s one key (key_file or HF_DILOCO_KEY) and the "
            "same settings, and see who listens there",
            island,
        )

    def _describe(self, public: bytes) -> bytes:
        low, high = sorted([(self._own, self.public), (self._peer, public)], key=lambda end: end[0])
        numbers = (b"%d" % number for number in (self._connection, low[0], high[0]))
        mode = (b"encrypted" if self._key.encrypt else b"authenticated") + b" signed" * (self._key.signer is not None)
        return hashlib.sha256(pack(_PROTOCOL, mode, self._name.encode(), *numbers, low[1], high[1])).digest()


def _confirmation(key: bytes, transcript: bytes, signature: bytes) -> bytes:
    return hmac.digest(key, pack(transcript, signature), "sha256")
