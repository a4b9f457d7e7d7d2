"""An identity's public key in the text form of a run file. Parses text only; reads no files.

ed25519:dGhlIDMyIGJ5dGVzIG9mIGEgcHVibGljIGtleSAtLS0            takes part
ed25519:dGhlIDMyIGJ5dGVzIG9mIGEgcHVibGljIGtleSAtLS0 until 120  took part, up to round 120
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

_TEXT = re.compile(r"ed25519:([A-Za-z0-9_-]{43})(?: until (\d{1,12}))?")


@dataclass(frozen=True)
class ListedKey:
    """An entry of a run's list of identities: an Ed25519 public key, 32 bytes. If it has a `last_round`, records of
    later rounds are refused, and so are connections."""

    public: bytes
    last_round: int | None = None


def show_public(public: bytes) -> str:
    """Returns the text of a public key: 32 bytes as URL-safe base64, after the algorithm's name."""
    return f"ed25519:{base64.urlsafe_b64encode(public).decode().rstrip('=')}"


def parse_public(text: str) -> ListedKey:
    """Parses the text of a public key; raises `ValueError` if it is not one."""
    match = _TEXT.fullmatch(text.strip())
    public = base64.urlsafe_b64decode(f"{match[1]}=") if match else b""
    if match is None or show_public(public) != f"ed25519:{match[1]}":
        raise ValueError(
            f"{text!r} is no public key: paste what `hf-diloco keys show FILE` prints (ed25519: and 43 characters); "
            "behind it may stand `until ROUND`"
        )
    return ListedKey(public, None if match[2] is None else int(match[2]))
