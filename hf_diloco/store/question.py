"""What saves islands from asking again and again: one request to a server of ours that writes, waits and reads.

    POST /changes/NAME     {"create": {PATH: DATA}, "replace": {PATH: [TAG, DATA]}, "put": {PATH: DATA},
                            "prefixes": [PATH], "paths": [PATH], "known": {PATH: TAG}, "seconds": 0.5,
                            "awaited": {"path": PATH, "linger": 0.25}}
                           {"created": {PATH: DATA}, "objects": {PATH: [TAG, DATA]}}

The server creates objects unless they exist, replaces others if they still are what the island has read, returns what
lies there then, and puts further ones in place of what is there. It looks at some paths, and at all objects below some
prefixes. If they are those that the island knows, it waits until one is written or deleted, at most so many seconds.
So who waits for others hears of what they write half a round trip later, and its own record goes with the question.
Where an object is `awaited` that somebody near the server is likely to write at once, other news are told only when it
is there, or after `linger` seconds: one answer then brings both.

DATA is in base64 (RFC 4648, of URLs), TAG a digest (xxh3_64) of it. Left out (null) are data that the island knows,
and what is too large or cannot be read.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hf_diloco.utils.urls import is_object_path

MAX_WAIT_SECONDS = 30.0
MAX_DATA_BYTES = 4 << 20
"""Of one object: as a record may have."""


def check_path(path: str) -> str:
    """Returns it; raises `ValueError` if it is no path of an object."""
    if not is_object_path(path):
        raise ValueError("no path of an object")
    return path


Path = Annotated[str, AfterValidator(check_path)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Awaited(_Message):
    """An object that is likely to be there soon, and how many seconds to wait for it when there is other news."""

    path: Path
    linger: float = Field(gt=0, le=MAX_WAIT_SECONDS)


class Question(_Message):
    """What an island asks. Where it knows nothing (`known` is None) all that is there is news.

    What is put is flushed to the disk if `is_lasting`.
    """

    create: dict[Path, bytes] = Field(default_factory=dict, max_length=16)
    replace: dict[Path, tuple[str, bytes]] = Field(default_factory=dict, max_length=16)
    put: dict[Path, bytes] = Field(default_factory=dict, max_length=16)
    is_lasting: bool = True
    prefixes: list[Path] = Field(default_factory=list, max_length=16)
    paths: list[Path] = Field(default_factory=list, max_length=4096)
    known: dict[str, str] | None = Field(default=None, max_length=100_000)
    seconds: float = Field(default=0.0, ge=0, le=MAX_WAIT_SECONDS)
    awaited: Awaited | None = None

    @model_validator(mode="after")
    def _shows_what_is_awaited(self) -> Self:
        if self.awaited and not any(self.awaited.path.startswith(f"{prefix}/") for prefix in self.prefixes):
            raise ValueError("what is awaited lies below none of the prefixes")
        return self


class Answer(_Message):
    """What it is told; what lies where something was to be created or replaced is under `created`."""

    created: dict[Path, bytes | None]
    objects: dict[Path, tuple[str, bytes | None]]
