"""An identity's public key as people write it into a run file; looks at nothing but the text.

ed25519:dGhlIDMyIGJ5dGVzIG9mIGEgcHVibGljIGtleSAtLS0            takes part
ed25519:dGhlIDMyIGJ5dGVzIG9mIGEgcHVibGljIGtleSAtLS0 until 120  did, up to round 120
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

_TEXT = re.compile(r"ed25519:([A-Za-z0-9_-]{43})(?: until (\d{1,12}))?")


@dataclass(frozen=True)
class ListedKey:
    """An entry of a run's list of identities.

    Attributes:
        public: the Ed25519 public key, 32 bytes.
        last_round: records of later rounds are refused, and so is whoever connects with it; None: it takes part.
    """

    public: bytes
    last_round: int | None = None


def show_public(public: bytes) -> str:
    """The text of a public key: 32 bytes as URL-safe base64, behind the algorithm's name."""
    return f"ed25519:{base64.urlsafe_b64encode(public).decode().rstrip('=')}"


def parse_public(text: str) -> ListedKey:
    """The key that a text names; raises `ValueError` if it names none."""
    match = _TEXT.fullmatch(text.strip())
    public = base64.urlsafe_b64decode(f"{match[1]}=") if match else b""
    if match is None or show_public(public) != f"ed25519:{match[1]}":
        raise ValueError(
            f"{text!r} is no public key: paste what `hf-diloco keys show FILE` prints (ed25519: and 43 characters); "
            "behind it may stand `until ROUND`"
        )
    return ListedKey(public, None if match[2] is None else int(match[2]))
