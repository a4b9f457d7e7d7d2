"""Keys derived from the run's key: one for each purpose and run, so that no key has two uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

if TYPE_CHECKING:
    from hf_diloco.sealing.identity import Signer

KEY_BYTES = 32


def derive(key: bytes, purpose: str, run: str) -> bytes:
    """Derives a key for one purpose in one run: HKDF-SHA256 (RFC 5869). It reveals nothing about other keys."""
    info = pack(b"hf-diloco key 1", purpose.encode(), run.encode())
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(key)


def pack(*parts: bytes) -> bytes:
    """Joins the parts, each after its length, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


class Secret:
    """Base class of objects that hold a key: they cannot be copied or pickled."""

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} holds a key: it is neither copied nor pickled")


@dataclass(frozen=True, repr=False)
class LinkKey(Secret):
    """What the ends of a connection authenticate each other with: a secret, and a mode (with or without encryption),
    which are the same at both ends. If the run has identities, each end proves its own as well."""

    secret: bytes
    encrypt: bool = True
    signer: Signer | None = None
