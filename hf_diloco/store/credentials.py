"""The secrets of one island: the run's key, which all share, and its own identity."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from hf_diloco.errors import ConfigError
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey, Secret, derive
from hf_diloco.store.signing import ENV_KEY, MAKE_KEY, MIN_KEY_BYTES, Seal

ENV_IDENTITY = "HF_DILOCO_IDENTITY"
MAX_KEY_FILE_BYTES = 4096


class KeySettings(Protocol):
    """The settings that say where the secrets are, and which identities to trust; see `DiLoCoConfig`."""

    @property
    def key_file(self) -> Path | None: ...

    @property
    def require_key(self) -> bool: ...

    @property
    def identity_file(self) -> Path | None: ...

    @property
    def identities(self) -> Mapping[int, list[str]]: ...

    @property
    def encrypt(self) -> bool: ...

    @property
    def encrypts_store(self) -> bool: ...


@dataclass(frozen=True, repr=False)
class Credentials(Secret):
    """The secrets with which an island authenticates and encrypts: the run's key (empty for none), and its identity.

    `encrypt` is for direct traffic between islands, `encrypts_store` for records and objects in an object store.
    """

    key: bytes = b""
    signer: Signer | None = None
    encrypt: bool = True
    encrypts_store: bool = False

    def seal(self, run_id: str) -> Seal:
        """Returns the seal for the records of a run."""
        return Seal(self.key, run_id, self.signer, self.encrypts_store)

    def link_key(self, run_id: str) -> LinkKey | None:
        """Returns the key for connections of a run; None without a key."""
        if not self.key:
            return None
        return LinkKey(derive(self.key, "connections", run_id), self.encrypt, self.signer)

    def facts(self, is_direct: bool) -> dict[str, str]:
        """Returns the security settings that all islands must share; `is_direct`: values go from island to island."""
        found = {}
        if self.key and is_direct:
            found["links"] = "encrypted" if self.encrypt else "authenticated"
        if self.encrypts_store:
            found["store"] = "encrypted"
        if self.signer:
            found["identities"] = "listed"
        return found


def find_credentials(config: KeySettings, number: int, unit: str = "island") -> Credentials:
    """Loads this island's secrets from its settings and the environment.

    Raises `ConfigError` if a file cannot be read, or others can read it, or a key is missing, too short, or not listed
    for this island.
    """
    key = find_key(config)
    signer = _find_signer(config, number, unit)
    if not key and (signer or config.encrypts_store):
        name = "identities" if signer else "encrypt_store"
        raise ConfigError(
            f"{name} needs the run's key as well, which all {unit}s share: make one by {MAKE_KEY}, and give it to "
            f"all as key_file or {ENV_KEY}"
        )
    return Credentials(key, signer, config.encrypt, config.encrypts_store)


def _find_signer(config: KeySettings, number: int, unit: str) -> Signer | None:
    private = load_identity(config.identity_file, number)
    if config.identities and private is None:
        raise ConfigError(
            f"identities lists who may take part, and {unit} {number} has no identity: make one by "
            f"`hf-diloco keys make FILE`, give it as identity_file or {ENV_IDENTITY}, and list it"
        )
    if private is None:
        return None
    if not config.identities:
        raise ConfigError(
            f"{unit} {number} has an identity (identity_file or {ENV_IDENTITY}), and identities lists nobody: list "
            f"every {unit}'s public key there (`hf-diloco keys show FILE`), or take the identity away"
        )
    return Signer(private, number, Roster(config.identities, unit))


def find_key(config: KeySettings) -> bytes:
    """Like `load_key`; also raises `ConfigError` if there is no key, and `require_key` demands one."""
    key = load_key(config.key_file)
    if config.require_key and not key:
        raise ConfigError(
            f"require_key=true, and there is no key: make one by {MAKE_KEY}, and give it to all as key_file or "
            f"{ENV_KEY}; or leave require_key out"
        )
    return key


def load_key(key_file: Path | None) -> bytes:
    """Returns the run's key: the first line of `key_file`, else HF_DILOCO_KEY, else none (empty).

    Raises `ConfigError` if the file cannot be read, or others on this machine can read it, or the key is too short.
    """
    if key_file is not None:
        origin = f"key_file={key_file}"
        lines = _read_secret(key_file, origin, "Put the run's key there (hf-diloco keys make --shared)").splitlines()
        key = lines[0].strip() if lines else b""
    else:
        origin, key = ENV_KEY, _from_environment(ENV_KEY)
        if not key:
            return key
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{origin}: the run's key has {len(key)} bytes, fewer than {MIN_KEY_BYTES}: make one by {MAKE_KEY}, and "
            "give the same to all"
        )
    return key


def _from_environment(name: str) -> bytes:
    return os.environ.get(name, "").strip().encode(errors="surrogateescape")


def _read_secret(path: Path, origin: str, remedy: str) -> bytes:
    """Reads a file; refuses it if other users of this machine can read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}. {remedy}") from None
    if os.name == "posix" and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"{origin}: other users of this machine can read it: chmod 600 it")
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{origin}: it has more than {MAX_KEY_FILE_BYTES} bytes; is it a key?")
    return data


def load_identity(file: Path | None, number: int) -> Ed25519PrivateKey | None:
    """Loads an island's private key: from a file, in whose path `{island}` or `{node}` stands for the number, else
    from HF_DILOCO_IDENTITY, else None.

    Raises `ConfigError` if the file cannot be read, or others on this machine can read it, or it is not an Ed25519
    key.
    """
    if file is not None:
        path = identity_path(file, number)
        origin = f"identity_file={path}"
        data = _read_secret(path, origin, "Make an identity there (`hf-diloco keys make FILE`)")
    else:
        origin, data = ENV_IDENTITY, _from_environment(ENV_IDENTITY)
        if not data:
            return None
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError):  # not PEM, or protected by a password
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(f"{origin} is no Ed25519 private key in PEM: make one by `hf-diloco keys make FILE`")
    return private


def identity_path(file: Path | str, number: int) -> Path:
    """Returns the path of one island's private key; see `load_identity`."""
    return Path(str(file).replace("{island}", str(number)).replace("{node}", str(number)))


def make_identity(path: Path) -> Ed25519PrivateKey:
    """Generates a private key and writes it to a file that only this user can read: PKCS #8 in PEM. Raises
    `ConfigError` if the file exists, or cannot be written."""
    private = Ed25519PrivateKey.generate()
    _write_secret(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return private


def make_key(path: Path) -> None:
    """Generates a run's key and writes it to a file; raises as `make_identity`."""
    _write_secret(path, f"{secrets.token_hex(32)}\n".encode())


def _write_secret(path: Path, data: bytes) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: keys are not overwritten; give another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a file in a folder that you can write to") from None
