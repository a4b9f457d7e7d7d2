"""Messages over one socket, each of limited length; used while ends meet, and by nobody else.

message   length (4 bytes, big-endian), then as many bytes; once there are keys these are sealed for their number
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hf_diloco.errors import ForgedError
from hf_diloco.sealing import Channel

MAX_GREETING_BYTES = 1 << 14
"""Of a message from who has proved nothing."""

MAX_BYTES = 1 << 20
"""Of a message from an end of the run."""

PLACE = 1 << 29
"""Tells what is sealed here from the transfers that go over the same connection later; those have lower tags."""

_LENGTH_BYTES = 4


class Line:
    """One end of a connection.

    Args:
        reader: what comes.
        writer: what goes.

    Attributes:
        host: numeric address of the other end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._channel: Channel | None = None
        self._max_bytes = MAX_GREETING_BYTES
        self._num_sent = self._num_received = 0
        self.host = str(writer.get_extra_info("peername")[0])

    def trust(self, channel: Channel | None) -> None:
        """The other end has proved who it is: longer messages may come, and all are sealed if there is a channel."""
        self._channel = channel
        self._max_bytes = MAX_BYTES

    def send(self, message: bytes) -> None:
        """Sends a message, behind what was sent before."""
        if self._channel:
            message = self._channel.seal((PLACE, self._num_sent), message)
            self._num_sent += 1
        self._writer.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ForgedError: it is not what the other end has sealed.
            ValueError: it is too long.
            OSError, EOFError: the other end is gone.
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
                "a message was altered on its way, or sent before: see who sits between the two machines"
            )
        return opened

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Sends several in one message."""
        self.send(b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts))

    async def receive_parts(self, number: int) -> list[bytes]:
        """So many that were sent in one message; raises as `receive`."""
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
        """Nothing more is sent; what was is delivered."""
        self._writer.write_eof()

    def close(self) -> None:
        """Closes the socket; may be called more than once."""
        self._writer.close()
