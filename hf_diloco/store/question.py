"""What saves islands from asking again and again: one request to a server of ours that writes, waits and reads.

    POST /changes/NAME     {"create": {PATH: DATA}, "prefixes": [PATH], "known": {PATH: TAG}, "seconds": 0.5,
                            "awaited": PATH, "linger": 0.25}
                           {"created": {PATH: DATA}, "objects": {PATH: [TAG, DATA]}}

The server creates objects unless they exist, and returns what lies there then. It looks at all objects below some
prefixes. If they are those that the island knows, it waits until one is written or deleted, at most so many seconds.
So who waits for others hears of what they write half a round trip later, and its own record goes with the question.
Where one object is `awaited` that others are likely to write at once, other news are told `linger` seconds later: one
answer then brings both.

DATA is in base64 (RFC 4648, of URLs), TAG a digest (xxh3_64) of it. Left out (null) are data that the island knows,
and what is too large or cannot be read.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hf_diloco.utils.urls import OBJECT_PATH

MAX_WAIT_SECONDS = 30.0
MAX_DATA_BYTES = 4 << 20
"""Of one object: as a record may have."""


def check_path(path: str) -> str:
    """Returns it; raises `ValueError` if it is no path of an object."""
    if not OBJECT_PATH.fullmatch(path):
        raise ValueError("no path of an object")
    return path


Path = Annotated[str, AfterValidator(check_path)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Question(_Message):
    """What an island asks. Where it knows nothing (`known` is None) there is nothing to wait for."""

    create: dict[Path, bytes] = Field(default_factory=dict, max_length=16)
    prefixes: list[Path] = Field(default_factory=list, max_length=16)
    known: dict[str, str] | None = Field(default=None, max_length=100_000)
    seconds: float = Field(default=0.0, ge=0, le=MAX_WAIT_SECONDS)
    awaited: Path | None = None
    linger: float = Field(default=0.0, ge=0, le=MAX_WAIT_SECONDS)


class Answer(_Message):
    """What it is told."""

    created: dict[Path, bytes | None]
    objects: dict[Path, tuple[str, bytes | None]]
