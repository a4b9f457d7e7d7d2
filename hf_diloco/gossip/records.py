"""Small records that nodes share with each other: JSON objects of limited size, checked before use."""

from __future__ import annotations

import json
from typing import Any

from hf_diloco.errors import PayloadError

Record = dict[str, Any]
"""A JSON object: values that JSON can hold, by name."""

MAX_RECORD_BYTES = 64 << 10


def pack_record(topic: str, record: Record) -> bytes:
    """Encodes a record as JSON; `topic` is its subject, for messages.

    Raises:
        PayloadError: the record cannot be written as JSON, or is too long.
    """
    try:
        packed = json.dumps(record).encode()
    except (TypeError, ValueError) as error:
        raise PayloadError(
            f"the record {topic!r} cannot be published: {error}; give values that JSON can hold"
        ) from None
    if len(packed) > MAX_RECORD_BYTES:
        raise PayloadError(
            f"the record {topic!r} has {len(packed):,} bytes, but at most {MAX_RECORD_BYTES:,} are allowed: put less "
            "into it"
        )
    return packed


def unpack_record(topic: str, node: int, packed: bytes) -> Record:
    """Decodes another node's record.

    Raises:
        PayloadError: the bytes are not a record of `pack_record`.
    """
    problem = f"it has {len(packed):,} bytes, more than {MAX_RECORD_BYTES:,}"
    if len(packed) <= MAX_RECORD_BYTES:
        try:
            record = json.loads(packed)
            if isinstance(record, dict):
                return record
            problem = f"it is a {type(record).__name__}"
        except (ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8
            problem = f"it is no JSON: {error}"
    raise PayloadError(
        f"node {node} published an invalid record {topic!r} ({problem}): it runs another version, or something else "
        "writes to the rendezvous. Give all nodes the same version, and the rendezvous a port of its own"
    )


def whole_number(record: Record, name: str, node: int) -> int:
    """Returns the integer under `name` in a node's record.

    Raises:
        PayloadError: there is none.
    """
    value = record.get(name)
    if isinstance(value, int):
        return value
    raise PayloadError(
        f"node {node} published a record without a whole number {name!r} ({record}): give all nodes the same version, "
        "and the rendezvous a port of its own"
    )
