"""What the two ends of a connection exchange before any values: their identity, and where Gloo listens.

message   length (4 bytes, big-endian), then as many bytes; once there are keys these are sealed for their number

`sealing.channel` defines the proofs, `meeting` the order of the messages.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store

from hf_diloco.errors import DiLoCoError, ForgedError, IslandLostError
from hf_diloco.sealing.channel import Channel
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.transport.transfers import Deadline

MAX_GREETING_BYTES = 1 << 14
"""Limit of a message from an unauthenticated sender."""

MAX_BYTES = 1 << 20
"""Limit of a message from an authenticated end of the run."""

PLACE = 1 << 29
"""Distinguishes messages sealed here from later transfers over the same connection, which have lower tags."""

_LENGTH_BYTES = 4


class End(NamedTuple):
    """One connection to a peer: the peer, and the number of the connection."""

    peer: int
    connection: int


class Place(NamedTuple):
    """The address where an end listens."""

    host: str
    port: int


def way_of(key: LinkKey | None) -> str:
    """Describes how an end authenticates, in words that follow "it connects"."""
    if key is None:
        return "without a key"
    return "with a key, encrypted" if key.encrypt else "with a key and encrypt: false"


class Line:
    """One end of a connection; `host` is the numeric address of the other end.

    Raises `ConnectionResetError` if the other end has reset the connection already.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._channel: Channel | None = None
        self._max_bytes = MAX_GREETING_BYTES
        self._num_sent = self._num_received = 0
        peer = writer.get_extra_info("peername")
        if peer is None:
            writer.close()
            raise ConnectionResetError("the connection was reset at once")
        self.host = str(peer[0])

    def trust(self, channel: Channel | None) -> None:
        """Accepts longer messages, because the other end has authenticated; seals them if there is a channel."""
        self._channel = channel
        self._max_bytes = MAX_BYTES

    def send(self, message: bytes) -> None:
        """Queues a message."""
        if self._channel:
            message = self._channel.seal((PLACE, self._num_sent), message)
            self._num_sent += 1
        self._writer.write(_framed(message))

    async def receive(self) -> bytes:
        """Returns the next message.

        Raises `ForgedError` if the other end did not seal it, `ValueError` if it is too long, `OSError` or `EOFError`
        if the other end is gone.
        """
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        if length > self._max_bytes:
            raise ValueError(f"a message of {length:,} bytes, where at most {self._max_bytes:,} may come")
        message = await self._reader.readexactly(length)
        if self._channel is None:
            return message
        opened = self._channel.open((PLACE, self._num_received), message)
        self._num_received += 1
        if opened is None:
            raise ForgedError(
                "a message was altered in transit, or sent before: see who sits between the two machines"
            )
        return opened

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Sends several byte strings in one message."""
        self.send(b"".join(map(_framed, parts)))

    async def receive_parts(self, number: int) -> list[bytes]:
        """Receives a message of `send_parts` with this number of parts; raises as `receive`."""
        rest, parts = await self.receive(), []
        while rest:
            length = int.from_bytes(rest[:_LENGTH_BYTES], "big")
            part, rest = rest[_LENGTH_BYTES : _LENGTH_BYTES + length], rest[_LENGTH_BYTES + length :]
            if len(part) != length:
                break
            parts.append(part)
        if rest or len(parts) != number:
            raise ValueError(f"not {number} parts")
        return parts

    def end(self) -> None:
        """Ends sending; queued messages are still delivered, unless the other end is gone."""
        with suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        """Closes the socket; may be called more than once."""
        self._writer.close()


class GlooAddresses(Store):
    """The part of a store's interface through which Gloo shares its addresses. Any number of threads may use it.

    `tell` sends a value to all other ends; `num_heard` is the number of values received, by end.
    """

    def __init__(self, tell: Callable[[str, bytes], None], deadline: Deadline) -> None:
        super().__init__()
        self._tell = tell
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self.num_heard: Counter[int] = Counter()
        self._failure: DiLoCoError | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys have values; raises `IslandLostError` if they do not come."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or wanted <= self._values.keys(), self._deadline.remaining().total_seconds()
            )
        if not wanted <= self._values.keys():
            raise self._failure or IslandLostError("the others did not all say where Gloo listens")

    def check(self, keys: Sequence[str]) -> bool:
        return set(keys) <= self._values.keys()

    def hear(self, peer: int, message: bytes) -> None:
        """Stores a value from another end; raises `ValueError` if the message is malformed."""
        try:
            key, value = json.loads(message)
            with self._changed:
                self._values.setdefault(str(key), bytes.fromhex(value))
                self.num_heard[peer] += 1
                self._changed.notify_all()
        except (TypeError, RecursionError):
            raise ValueError(f"no address: {message[:80]!r}") from None

    def fail(self, error: DiLoCoError) -> None:
        """Ends all waiting with this error: no more values will come."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message
