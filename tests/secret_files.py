"""Keys as a user makes them, and every form in which what a run leaves must not hold them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hf_diloco.store.credentials import load_identity, load_key, make_identity, make_key
from hf_diloco.utils.public_keys import show_public


def make_secrets(folder: Path, num_islands: int) -> dict[str, Any]:
    """Settings of islands with a key and an identity each, whose files lie in a folder."""
    folder.mkdir(exist_ok=True)
    make_key(folder / "run.key")
    made = [make_identity(folder / f"island-{island}.pem") for island in range(num_islands)]
    return {
        "key_file": folder / "run.key",
        "identity_file": folder / "island-{island}.pem",
        "identities": {island: [text_of(private)] for island, private in enumerate(made)},
    }


def text_of(private: Ed25519PrivateKey) -> str:
    """The public key as a run file lists it."""
    return show_public(private.public_key().public_bytes_raw())


def forms_of(settings: dict[str, Any], island: int) -> list[bytes]:
    """The run's key and an island's private one in bytes, hexadecimal and base64."""
    shared, private = load_key(settings["key_file"]), load_identity(settings["identity_file"], island)
    assert private is not None
    forms = [shared, base64.b64encode(shared)]
    for raw in (bytes.fromhex(shared.decode()), private.private_bytes_raw()):
        forms += [raw, raw.hex().encode()]
        forms += [encode(raw).rstrip(b"=") for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    return forms
