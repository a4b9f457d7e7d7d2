"""Sealed records: each was written by an island of this run, and for the path where it lies.

A sealed record is JSON, {"body": TEXT, "mac": HEX}. TEXT is JSON as well, and is authenticated as a byte string before
anything parses it: HMAC-SHA256 (RFC 2104) over protocol, run id, path and text, each preceded by its length, so that
no two records have the same input. A record that was moved to another path (an older round, another island), or comes
from another run, does not open.

Without a key anyone can compute the MAC: it then guards against accidents, not against attackers.

Where islands have identities, {"by": ISLAND, "signature": BASE64} are added: see `sealing.identity`. Some records may
be signed by one island only (`check_author`). Any participant may write plans, outcomes, averages and the like: the
store's *create if absent* decides among them. Where the store is encrypted, the whole record is the plaintext of
{"sealed": BASE64}, AES-256-GCM with the path as associated data.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

from hf_diloco.errors import ConfigError, ForgedError, UnknownIdentityError
from hf_diloco.sealing.identity import Signer
from hf_diloco.sealing.keys import Secret, pack
from hf_diloco.sealing.stored import BlockSeal, ValueSeal

ENV_KEY = "HF_DILOCO_KEY"
MIN_KEY_BYTES = 16
MAX_RECORD_BYTES = 4 << 20
_PROTOCOL = b"hf-diloco sealed record 1"
_PURPOSE = "record"
_SIGNED = frozenset({"by", "signature"})
_MAC_DIGITS = 64
MAKE_KEY = "`hf-diloco keys make --shared FILE`"
"""The command that makes a run's key."""

RUN_PATH = "run.json"
"""The record that names a run. Its signature is not checked, so it stays valid if the island that wrote it is no
longer listed. Someone with the run's key who replaces it can do no more harm than by deleting it."""

NO_RUN = "-"
"""The run id under which the record that names a run is sealed."""

MEETING = "hf-diloco/run"
"""The record that names a run at tcp://."""

_OBJECTS = re.compile(
    r"(?:incarnations|heartbeats)/(\d{1,9})/|rounds/\d+/\d+/(?:offers|missing)/(\d+)-|rounds/\d+/\d+/votes/(\d+)\."
    r"|snapshots/\d+/(\d+)-"
)
_VOTE = re.compile(r"rounds/\d+/\d+/votes/")
_HISTORY = re.compile(r"(?:rounds|snapshots)/(\d+)/")
_STANDING = re.compile(r"incarnations/|start(?:-\d)?\.json")

VALUES = "values/"
"""The folder of values of islands with fixed membership, and of nodes."""

_VALUES = re.compile(
    r"(?:^|/)(?:(?:join|state|done|checkpoints\d*|sound\d*|waits|averaged|average\d+|share/[^/]+/\d+|at"
    r"|greet/\d+/\d+|entry/\d+/\d+/\d+|again/[^/]+/[^/]+/\d+/\d+)/(\d+)"
    r"|entry/(\d+)/\d+/(?:company|proposal|asks/\d+)|again/(\d+)-\d+/[^/]+/\d+/proposal)$"
)


def check_author(path: str, body: Mapping[str, Any], by: int, unit: str) -> None:
    """Raises `UnknownIdentityError` if an object store's record was signed by another island than its own."""
    if _VOTE.match(path) and body.get("mean") == "":  # others may abstain for an island that is gone
        return
    owner = _owner_of(path)
    for name in (owner, body.get("island") if owner is not None else None, body.get("by")):
        if name is not None and name != by:
            raise UnknownIdentityError(
                f"{unit} {by} has signed {path} in the name of {unit} {name}: nobody may sign for another; check "
                f"{unit} {by}, and remove it from identities unless this was a mistake",
                by,
            )


def _owner_of(path: str) -> int | None:
    """Returns the only island that may write a record of the log; None if all may."""
    if path == MEETING:
        return 0
    if path.startswith(VALUES):
        key = path.removeprefix(VALUES).removesuffix(".json")
        # Anyone may write the records of connections: both ends authenticate when they connect.
        match = None if key.startswith(("mesh/", "lost/")) else _VALUES.search(key)
    else:
        match = _OBJECTS.match(path)
    return int(next(filter(None, match.groups()))) if match else None  # the one group that has matched


def round_of_history(path: str) -> int | None:
    """Returns the round of a record that outlives its writer's membership, 0 without one; None if of the present."""
    match = _HISTORY.match(path)
    return int(match[1]) if match else 0 if _STANDING.match(path) else None


class Seal(Secret):
    """Wraps and opens the records of one run; those of other runs do not open.

    Args:
        key: the run's key, at least 16 bytes; empty for none.
        signer: this island's identity; then every record must be signed by an island that may write it. Default: no
            islands have identities.
        encrypt: encrypt written records, and the objects that they name, for holders of the key. Encrypted records are
            always readable with the key, whatever this says.

    Attributes:
        blocks: seals objects; None if they are not encrypted.
    """

    def __init__(self, key: bytes, run_id: str, signer: Signer | None = None, encrypt: bool = False) -> None:
        if key and len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the run's key has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make one by {MAKE_KEY}"
            )
        self._key = key
        self.signer = signer
        self._encrypts = encrypt and bool(key)
        self._cipher = ValueSeal(key, run_id) if key else None
        self.blocks = BlockSeal(key, run_id) if self._encrypts else None
        self.run_id = run_id

    def of(self, run_id: str) -> Seal:
        """Returns the same seal for another run."""
        return Seal(self._key, run_id, self.signer, self._encrypts)

    def __repr__(self) -> str:
        return f"Seal(run_id={self.run_id!r}, {'with' if self._key else 'without'} a key)"

    @property
    def has_key(self) -> bool:
        """Whether records are authenticated against attackers, not only checked for accidents."""
        return bool(self._key)

    @property
    def identities(self) -> dict[str, list[str]]:
        """The public keys listed here for each island; empty without identities."""
        return self.signer.roster.texts if self.signer else {}

    def wrap(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Returns the bytes of a sealed record for `path`.

        Raises `ValueError` if the body is not JSON (NaN and infinities are not), or too large.
        """
        text = json.dumps(dict(body), allow_nan=False, separators=(",", ":"), sort_keys=True)
        record: dict[str, Any] = {"body": text, "mac": self.mac(path, text.encode())}
        if self.signer:
            signature = self.signer.sign(_PURPOSE, self.run_id.encode(), path.encode(), text.encode())
            record |= {"by": self.signer.number, "signature": base64.b64encode(signature).decode()}
        data = json.dumps(record).encode()
        if self._encrypts and self._cipher:
            data = json.dumps({"sealed": self._cipher.wrap(path, data)}).encode()
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        return data

    def open(self, path: str, data: bytes, is_of_now: bool = False) -> dict[str, Any]:
        """Authenticates the record at `path` and returns its body; `is_of_now`: only if its writer may take part now
        (`round_of_history`).

        Raises `ForgedError` if it was altered, cut short, moved from another path, written in another run or with
        another key, or is no record at all; `UnknownIdentityError` if its writer holds the run's key, but may not
        write it.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise ForgedError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        record = _parse(path, data)
        if record.keys() == {"sealed"}:
            record = _parse(path, self._decrypt(path, record["sealed"]))
        body, mac = record.get("body"), record.get("mac")
        if not _has_form(record) or not isinstance(body, str) or not isinstance(mac, str):
            raise ForgedError(f"the record {path} is not one of hf_diloco's: {ORIGIN}")
        try:
            text, claimed = body.encode(), mac.encode("ascii")
        except UnicodeEncodeError:  # a lone surrogate
            raise ForgedError(f"the record {path} holds no text: {ORIGIN}") from None
        if len(claimed) != _MAC_DIGITS or not hmac.compare_digest(claimed, self.mac(path, text).encode()):
            raise _not_ours(path)
        parsed = _parse(path, text)
        if self.signer and path != RUN_PATH:
            self._check_signature(self.signer, path, record, parsed, None if is_of_now else round_of_history(path))
        return parsed

    def _decrypt(self, path: str, sealed: object) -> bytes:
        if self._cipher is None or not isinstance(sealed, str) or not sealed.isascii():
            raise ForgedError(f"the record {path} is encrypted, and there is no key here: {ORIGIN}")
        value = self._cipher.open(path, sealed.encode())
        if value is None:
            raise _not_ours(path)
        return value

    def _check_signature(
        self, signer: Signer, path: str, record: Mapping[str, Any], body: Mapping[str, Any], last_round: int | None
    ) -> None:
        by, signature = record.get("by"), record.get("signature")
        if not isinstance(by, int) or isinstance(by, bool) or not isinstance(signature, str):
            raise UnknownIdentityError(
                f"the record {path} is not signed, and this run's {signer.roster.unit}s have identities: its writer "
                "has the run's key alone; give it its identity_file and the list of identities"
            )
        try:
            raw = base64.b64decode(signature, validate=True)
        except ValueError:
            raise ForgedError(f"the record {path} bears no signature: {ORIGIN}") from None
        said = (self.run_id.encode(), path.encode(), record["body"].encode())
        signer.check(by, raw, _PURPOSE, *said, last_round=last_round)
        check_author(path, body, by, signer.roster.unit)

    def mac(self, path: str, text: bytes) -> str:
        """Returns the MAC of a text at a path; without a key, a checksum."""
        said = pack(_PROTOCOL, self.run_id.encode(), path.encode(), text)
        return hmac.digest(self._key, said, "sha256").hex()


ORIGIN = (
    "it was altered or cut short, belongs to another place or run, or its writer has another key; give all "
    f"one key (key_file or {ENV_KEY}) and keep others away from the store"
)


def _not_ours(path: str) -> ForgedError:
    return ForgedError(f"the record {path} was not sealed with this run's key for this place: {ORIGIN}")


def is_wrapped(record: object) -> bool:
    """Whether a JSON value has the form that `Seal.wrap` writes, whoever wrote it and for whatever path."""
    return isinstance(record, dict) and (record.keys() == {"sealed"} or _has_form(record))


def _has_form(record: Mapping[str, Any]) -> bool:
    return record.keys() - _SIGNED == {"body", "mac"}


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # includes endless nesting and numbers with too many digits
        raise ForgedError(f"the record {path} is not JSON: {ORIGIN}") from None
    if not isinstance(parsed, dict):
        raise ForgedError(f"the record {path} is no JSON object: {ORIGIN}")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
