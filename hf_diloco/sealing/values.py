"""Records in a store that others reach too: only holders of the run's key can make or read them, each for one place.

sealed value   base64 of: nonce (12 random bytes) | AES-256-GCM of the value, with its path as associated data
"""

from __future__ import annotations

import base64
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hf_diloco.errors import ForgedError
from hf_diloco.sealing.keys import derive

_NONCE_BYTES, _TAG_BYTES = 12, 16


class ValueSeal:
    """Seals the values of one run. Two sealed values are never equal.

    Args:
        key: the run's.
        run: names the run; values of another do not open.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self._cipher = AESGCM(derive(key, "encrypted records", run))

    def wrap(self, path: str, value: bytes) -> str:
        """The sealed value for a place."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, value, path.encode())).decode()

    def open(self, path: str, sealed: bytes) -> bytes:
        """The value that lies at a place.

        Raises:
            ForgedError: nobody of this run has put it there.
        """
        try:
            raw = base64.b64decode(sealed, validate=True)
            if base64.b64encode(raw) != sealed:  # another spelling of the same bytes
                raise ValueError
            return self._open(path, raw)
        except (ValueError, InvalidTag):
            raise ForgedError(
                f"the record {path} was not sealed with this run's key for this place: it was altered or cut short, "
                "belongs to another place or run, or its writer has another key; give all one key (key_file or "
                "HF_DILOCO_KEY) and keep others away from the rendezvous"
            ) from None

    def _open(self, path: str, sealed: bytes) -> bytes:
        if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
            raise InvalidTag
        return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], path.encode())
