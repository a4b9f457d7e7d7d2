"""Records that only an island of this run can have written, and only for the place where they lie.

A sealed record is JSON, {"body": TEXT, "mac": HEX}. TEXT is JSON as well, and is authenticated as it stands, before
anything parses it: HMAC-SHA256 (RFC 2104) over protocol, run id, path and text, each preceded by its length, so that
no two records have the same input. A record that was moved to another path (an older round, another island), or
comes from another run, does not open.

Without a key everybody can compute the code: it then guards against accidents, not against attackers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hf_diloco.errors import ConfigError, ForgedError

ENV_KEY = "HF_DILOCO_KEY"
MIN_KEY_BYTES = 16
MAX_KEY_FILE_BYTES = 4096
MAX_RECORD_BYTES = 4 << 20
_PROTOCOL = b"hf-diloco sealed record 1"
_MAC_DIGITS = 64
_MAKE_KEY = 'python -c "import secrets; print(secrets.token_hex(32))"'


class Seal:
    """Wraps and opens the records of one run.

    Args:
        key: the run's key, at least 16 bytes; empty for none.
        run_id: names the run; records of another do not open.
    """

    def __init__(self, key: bytes, run_id: str) -> None:
        if key and len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the run's key has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make one by {_MAKE_KEY}"
            )
        self._key = key
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"Seal(run_id={self.run_id!r}, {'with' if self._key else 'without'} a key)"

    def __reduce__(self) -> Any:
        raise TypeError("a Seal holds a key: it is neither copied nor pickled")

    @property
    def has_key(self) -> bool:
        """Whether records are safe from attackers, and not from accidents alone."""
        return bool(self._key)

    def wrap(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The bytes of a record for `path`.

        Raises:
            ValueError: the body is not JSON (NaN and infinities are not), or too large.
        """
        text = json.dumps(dict(body), allow_nan=False, separators=(",", ":"), sort_keys=True)
        data = json.dumps({"body": text, "mac": self.mac(path, text.encode())}).encode()
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        return data

    def open(self, path: str, data: bytes) -> dict[str, Any]:
        """The body of the record that lies at `path`.

        Raises:
            ForgedError: it was altered, cut short, moved from another path, written in another run or with another
                key, or never was a record.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise ForgedError(f"the record {path} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
        record = _parse(path, data)
        body, mac = record.get("body"), record.get("mac")
        if record.keys() != {"body", "mac"} or not isinstance(body, str) or not isinstance(mac, str):
            raise ForgedError(f"the record {path} is not one of hf_diloco's: {_ORIGIN}")
        try:
            text, claimed = body.encode(), mac.encode("ascii")
        except UnicodeEncodeError:  # half a surrogate pair
            raise ForgedError(f"the record {path} holds no text: {_ORIGIN}") from None
        if len(claimed) != _MAC_DIGITS or not hmac.compare_digest(claimed, self.mac(path, text).encode()):
            raise ForgedError(f"the record {path} was not sealed with this run's key for this place: {_ORIGIN}")
        return _parse(path, text)

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


class KeySettings(Protocol):
    """The settings that say where the run's key is; see `DiLoCoConfig`."""

    @property
    def key_file(self) -> Path | None:
        """See `load_key`."""

    @property
    def require_key(self) -> bool:
        """Whether there must be one."""


def find_key(config: KeySettings) -> bytes:
    """The run's key; empty if there is none.

    Raises:
        ConfigError: as `load_key`; or there is none, and `require_key` wants one.
    """
    key = load_key(config.key_file)
    if config.require_key and not key:
        raise ConfigError(
            f"require_key=true, and there is no key: make one by {_MAKE_KEY}, and give it to all as key_file or "
            f"{ENV_KEY}; or leave require_key out"
        )
    return key


def load_key(key_file: Path | None) -> bytes:
    """Returns the run's key: the first line of `key_file`, else HF_DILOCO_KEY, else none (empty).

    Raises:
        ConfigError: the file cannot be read, or others on this machine can read it, or the key is too short.
    """
    if key_file is not None:
        return _checked(_read_key(key_file), f"key_file={key_file}")
    value = os.environ.get(ENV_KEY, "").strip()
    return _checked(value.encode(errors="surrogateescape"), ENV_KEY) if value else b""


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read(MAX_KEY_FILE_BYTES + 1).splitlines()
    except OSError as error:
        raise ConfigError(
            f"key_file={path}: {error.strerror}. Put the run's key there ({_MAKE_KEY}), the same on all islands"
        ) from None
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"key_file={path}: other users of this machine can read it: chmod 600 it")
    key = lines[0].strip() if lines else b""
    if len(key) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"key_file={path}: the first line has more than {MAX_KEY_FILE_BYTES} bytes; is it a key?")
    return key


def _checked(key: bytes, origin: str) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{origin}: the run's key has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make one by {_MAKE_KEY}, and "
            "give the same to all islands"
        )
    return key


__all__ = ["ENV_KEY", "MAX_RECORD_BYTES", "Seal", "find_key", "load_key"]
