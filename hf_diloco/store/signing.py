"""Records that only an island of this run can have written, and only for the place where they lie.

A sealed record is JSON, {"body": TEXT, "mac": HEX}. TEXT is JSON as well, and is authenticated as it stands, before
anything parses it: HMAC-SHA256 (RFC 2104) over protocol, run id, path and text, each preceded by its length, so that
no two records have the same input. A record that was moved to another path (an older round, another island), or
comes from another run, does not open.

Without a key everybody can compute the code: it then guards against accidents, not against attackers.

Where islands have identities, {"by": ISLAND, "signature": BASE64} stand beside it: see `sealing.identity`, and
`authors` for who may sign what. Where the store is encrypted, all of it is the text of {"sealed": BASE64}, AES-256-GCM
with the path as associated data.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from hf_diloco.errors import ConfigError, ForgedError, UnknownIdentityError
from hf_diloco.sealing import Signer, ValueSeal
from hf_diloco.sealing.blocks import BlockSeal
from hf_diloco.store.authors import RUN_PATH, check_author, round_of_history

ENV_KEY = "HF_DILOCO_KEY"
MIN_KEY_BYTES = 16
MAX_RECORD_BYTES = 4 << 20
_PROTOCOL = b"hf-diloco sealed record 1"
_PURPOSE = "record"
_SIGNED = frozenset({"by", "signature"})
_MAC_DIGITS = 64
MAKE_KEY = "`hf-diloco keys make --shared FILE`"
"""What makes a run's key."""


class Seal:
    """Wraps and opens the records of one run.

    Args:
        key: the run's key, at least 16 bytes; empty for none.
        run_id: names the run; records of another do not open.
        signer: this island's identity; then all records must be signed by who may write them. Default: none has one.
        encrypt: records, and the objects that they name, are written so that only holders of the key read them.
            Records that are encrypted are read in any case.

    Attributes:
        blocks: seals objects; None if they are not encrypted.
    """

    def __init__(self, key: bytes, run_id: str, signer: Signer | None = None, encrypt: bool = False) -> None:
        if key and len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the run's key has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make one by {MAKE_KEY}"
            )
        self._key = key
        self._signer = signer
        self._encrypts = encrypt and bool(key)
        self._cipher = ValueSeal(key, run_id) if key else None
        self.blocks = BlockSeal(key, run_id) if self._encrypts else None
        self.run_id = run_id

    def of(self, run_id: str) -> Seal:
        """The same for another run."""
        return Seal(self._key, run_id, self._signer, self._encrypts)

    def __repr__(self) -> str:
        return f"Seal(run_id={self.run_id!r}, {'with' if self._key else 'without'} a key)"

    def __reduce__(self) -> Any:
        raise TypeError("a Seal holds a key: it is neither copied nor pickled")

    @property
    def has_key(self) -> bool:
        """Whether records are safe from attackers, and not from accidents alone."""
        return bool(self._key)

    @property
    def identities(self) -> dict[str, list[str]]:
        """The public keys that speak for each island, here; none without identities."""
        return self._signer.roster.texts if self._signer else {}

    @property
    def signer(self) -> Signer | None:
        """This island's identity."""
        return self._signer

    def wrap(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The bytes of a record for `path`.

        Raises:
            ValueError: the body is not JSON (NaN and infinities are not), or too large.
        """
        text = json.dumps(dict(body), allow_nan=False, separators=(",", ":"), sort_keys=True)
        record: dict[str, Any] = {"body": text, "mac": self.mac(path, text.encode())}
        if self._signer:
            signature = self._signer.sign(_PURPOSE, self.run_id.encode(), path.encode(), text.encode())
            record |= {"by": self._signer.number, "signature": base64.b64encode(signature).decode()}
        data = json.dumps(record).encode()
        if self._encrypts and self._cipher:
            data = json.dumps({"sealed": self._cipher.wrap(path, data)}).encode()
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        return data

    def open(self, path: str, data: bytes) -> dict[str, Any]:
        """The body of the record that lies at `path`.

        Raises:
            ForgedError: it was altered, cut short, moved from another path, written in another run or with another
                key, or never was a record.
            UnknownIdentityError: whoever wrote it holds the run's key, but must not write this.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise ForgedError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        record = _parse(path, data)
        if record.keys() == {"sealed"}:
            record = _parse(path, self._decrypt(path, record["sealed"]))
        body, mac = record.get("body"), record.get("mac")
        if record.keys() - _SIGNED != {"body", "mac"} or not isinstance(body, str) or not isinstance(mac, str):
            raise ForgedError(f"the record {path} is not one of hf_diloco's: {_ORIGIN}")
        try:
            text, claimed = body.encode(), mac.encode("ascii")
        except UnicodeEncodeError:  # half a surrogate pair
            raise ForgedError(f"the record {path} holds no text: {_ORIGIN}") from None
        if len(claimed) != _MAC_DIGITS or not hmac.compare_digest(claimed, self.mac(path, text).encode()):
            raise ForgedError(f"the record {path} was not sealed with this run's key for this place: {_ORIGIN}")
        parsed = _parse(path, text)
        if self._signer and path != RUN_PATH:
            self._check_signature(self._signer, path, record, parsed)
        return parsed

    def _decrypt(self, path: str, sealed: object) -> bytes:
        if self._cipher is None or not isinstance(sealed, str) or not sealed.isascii():
            raise ForgedError(f"the record {path} is encrypted, and there is no key here: {_ORIGIN}")
        return self._cipher.open(path, sealed.encode())

    def _check_signature(self, signer: Signer, path: str, record: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        by, signature = record.get("by"), record.get("signature")
        if not isinstance(by, int) or isinstance(by, bool) or not isinstance(signature, str):
            raise UnknownIdentityError(
                f"the record {path} is not signed, and this run's {signer.roster.unit}s have identities: its writer "
                "has the run's key alone; give it its identity_file and the list of identities"
            )
        try:
            raw = base64.b64decode(signature, validate=True)
        except ValueError:
            raise ForgedError(f"the record {path} bears no signature: {_ORIGIN}") from None
        said = (self.run_id.encode(), path.encode(), record["body"].encode())
        signer.check(by, raw, _PURPOSE, *said, last_round=round_of_history(path))
        check_author(path, body, by, signer.roster.unit)

    def mac(self, path: str, text: bytes) -> str:
        """The code that seals a text at a path; without a key, a checksum."""
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (_PROTOCOL, self.run_id.encode(), path.encode(), text):
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.hexdigest()


_ORIGIN = (
    "it was altered or cut short, belongs to another place or run, or its writer has another key; give all islands "
    f"one key (key_file or {ENV_KEY}) and keep others away from the store"
)


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # also what is nested without end, and numbers of endless digits
        raise ForgedError(f"the record {path} is not JSON: {_ORIGIN}") from None
    if not isinstance(parsed, dict):
        raise ForgedError(f"the record {path} is no JSON object: {_ORIGIN}")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


__all__ = ["ENV_KEY", "MAKE_KEY", "MAX_RECORD_BYTES", "MIN_KEY_BYTES", "Seal"]
