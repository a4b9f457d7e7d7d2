"""Removes secrets from everything that people read: run.json, reports, logs, messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_NOT_OF_A_TOKENIZER = "".join(
    f"(?<!{word}_)" for word in ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "start", "end", "image", "per")
)
_NAME = (
    r"(?:[A-Za-z0-9]+[._-])*(?:" + _NOT_OF_A_TOKENIZER + r"token|secret|password|passwd|pwd|credentials?|authorization"
    r"|signature|sig|(?:api|access|secret|account|private|signing|diloco)[_-]?(?:access[_-]?)?key|diloco_identity)"
)
"""Names of settings, variables and query parameters that hold a secret; not pad_token, key_file or max_tokens."""

_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s'\",;&)}\]]+)"
_IS_SECRET = re.compile(_NAME, re.IGNORECASE)
_HIDE = (
    (re.compile(r"-----BEGIN ([A-Z ]{0,20})PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)[^/?#\s'\"@]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),  # user:password@
    (re.compile(rf"((?<![A-Za-z0-9_.-]){_NAME}=){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(([\"']){_NAME}\2: ?){_VALUE}", re.IGNORECASE), rf"\1'{HIDDEN}'"),  # of a printed dict
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), f"hf_{HIDDEN}"),
)


def redact(value: Any, name: str = "") -> Any:
    """Returns a copy of settings with `***` in place of secrets; text under the name of a secret is always hidden."""
    if isinstance(value, Mapping):
        return {key: redact(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact(part, name) for part in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _IS_SECRET.fullmatch(name) else redact_text(value)


def redact_text(text: str) -> str:
    """Hides passwords in addresses, signatures in queries, NAME=VALUE of secrets, and tokens of a known form."""
    for pattern, shown in _HIDE:
        text = pattern.sub(shown, text)
    return text
