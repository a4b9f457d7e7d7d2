"""Identities: each island signs with its own Ed25519 key (RFC 8032), whose public key the others list.

signature   public key (32 bytes) | Ed25519 signature (64 bytes) of
            "hf-diloco identity 1", the purpose, the island's number, and the signed parts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hf_diloco.errors import ConfigError, UnknownIdentityError
from hf_diloco.sealing.keys import Secret, pack
from hf_diloco.utils.public_keys import ListedKey, parse_public, show_public

PUBLIC_BYTES = 32
_PROTOCOL = b"hf-diloco identity 1"


class Roster:
    """The public keys listed for each island; `unit` is what the run calls a participant."""

    def __init__(self, keys: Mapping[int, Sequence[str]], unit: str = "island") -> None:
        self.texts = {str(island): sorted(texts) for island, texts in sorted(keys.items())}
        self.unit = unit
        self._listed = {island: [parse_public(text) for text in texts] for island, texts in keys.items()}

    def find(self, island: int, public: bytes) -> ListedKey:
        """Returns the entry of an island's key; raises `UnknownIdentityError` if it is not listed for this island."""
        for listed in self._listed.get(island, ()):
            if listed.public == public:
                return listed
        raise UnknownIdentityError(
            f"{self.unit} {island} shows the identity {show_public(public)}, which is not listed for it here "
            f"(identities.{island}): it was removed, was never added, or another process uses this number. If it is "
            f"to take part, add it to identities on all {self.unit}s",
            island,
        )

    def find_current(self, signer: Signer) -> None:
        """Raises `UnknownIdentityError` if an island's key is not listed, or is valid until some round only."""
        last = self.find(signer.number, signer.public).last_round
        if last is not None:
            raise self.retired(signer.number, signer.public, last)

    def retired(self, island: int, public: bytes, last_round: int) -> UnknownIdentityError:
        """Returns the error for an island whose key is valid until some round only."""
        return UnknownIdentityError(
            f"{self.unit} {island} shows the identity {show_public(public)}, which counts until round {last_round} "
            f"only (identities.{island}): it was replaced, or the {self.unit} removed. If it is to take part, make "
            f"a new one by `hf-diloco keys make FILE`, list it on all {self.unit}s, and give it to {self.unit} "
            f"{island} as identity_file",
            island,
        )


class Signer(Secret):
    """An island's own identity, and those of the others.

    Raises `ConfigError` if the roster does not list the key for this island, or lists it until some round only.
    """

    def __init__(self, private: Ed25519PrivateKey, number: int, roster: Roster) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()
        self.number = number
        self.roster = roster
        try:
            last = roster.find(number, self.public).last_round
        except UnknownIdentityError:
            unit = roster.unit
            raise ConfigError(
                f"{unit} {number}'s identity is {show_public(self.public)}, and identities.{number} does not list it: "
                f"add it there, on all {unit}s, or give {unit} {number} its own identity_file"
            ) from None
        if last is not None:
            raise ConfigError(str(roster.retired(number, self.public, last)))

    def __repr__(self) -> str:
        return f"Signer({self.roster.unit} {self.number}, {show_public(self.public)})"

    def sign(self, purpose: str, *said: bytes) -> bytes:
        """Signs a statement, in parts, for one purpose only; returns this island's public key and the signature."""
        return self.public + self._private.sign(_text(purpose, self.number, said))

    def check(self, island: int, signature: bytes, purpose: str, *said: bytes, last_round: int | None = None) -> None:
        """Checks that an island signed a statement, see `sign`; raises `UnknownIdentityError`, which says why, if it
        did not.

        `last_round` is the round of the run's history that the statement belongs to; None: the present. A key that was
        replaced is valid up to its last round.
        """
        public, proof = signature[:PUBLIC_BYTES], signature[PUBLIC_BYTES:]
        listed = self.roster.find(island, public)
        if listed.last_round is not None and (last_round is None or last_round > listed.last_round):
            raise self.roster.retired(island, public, listed.last_round)
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(proof, _text(purpose, island, said))
        except (InvalidSignature, ValueError):
            raise UnknownIdentityError(
                f"data in the name of {self.roster.unit} {island} was not signed with its identity "
                f"{show_public(public)}: it was altered, or another process sent it; keep others away",
                island,
            ) from None


def _text(purpose: str, island: int, said: Sequence[bytes]) -> bytes:
    return pack(_PROTOCOL, purpose.encode(), b"%d" % island, *said)
