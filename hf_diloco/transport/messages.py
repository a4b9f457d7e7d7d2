"""Small messages among the owners of a lane, over its open connections: half a round trip each.

In each step every owner sends one message to all others, and receives theirs. A message is a frame of at most
`MAX_FRAME_BYTES`:

    checksum of the rest (xxh3_64, 8 bytes) | length of the message (4 bytes) | the message
    length of what follows (4 bytes) | the message, sealed                    with a key

The receives of the next step are posted together with the sends of this one: otherwise a sender must first ask whether
a receive is posted, which takes a whole round trip. Lost and damaged messages are dropped: callers that need them get
them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import xxhash

from hf_diloco.errors import ExchangeError
from hf_diloco.sealing.channel import OVERHEAD, Channel
from hf_diloco.transport.connections import Connections
from hf_diloco.transport.transfers import Deadline, Failure, Waiter, Work

MAX_FRAME_BYTES = 1 << 16
FIRST_TAG = 1 << 30
"""Tag of the first message; transfers of values count their tags up from 1 and never reach it."""
_CHECKSUM_BYTES, _LENGTH_BYTES = 8, 4
_HEADER_BYTES = _CHECKSUM_BYTES + _LENGTH_BYTES
_FOREVER = 365 * 86400.0  # a Gloo timeout would close the connection; callers have their own deadlines


class Messages:
    """One end's messages to and from all peers. One thread at a time may use it."""

    def __init__(self, links: Connections, peers: Sequence[int]) -> None:
        self._links = links
        self._peers = peers
        self._tag = FIRST_TAG
        self._expected: dict[int, tuple[torch.Tensor, list[Work]]] = {}  # by peer: the buffer, and its transfers
        self._heard: dict[int, bytes] = {}
        self._listener: Waiter | None = None

    def send(self, message: bytes, notify: Callable[[], None]) -> bool:
        """Sends `message` to all peers; `heard` then returns the messages of their calls with the same number.

        See `Exchange.send_message`. Returns False if the connections are closed.
        """
        if not self._links.groups:
            return False
        self._listener = self._listener or Waiter("hf-diloco-messages")
        if not self._expected:
            self._expect()
        tag, expected, self._heard = self._tag, self._expected, {}
        for peer, (_, works) in expected.items():
            with suppress(ExchangeError):  # receiving from this peer fails, too
                frame = _pack(message, tag, self._links.channel(peer, tag))
                works.append(self._links.send_whole(frame, peer, tag))
        self._tag += 1
        self._expect()
        for peer, (received, works) in expected.items():
            take = partial(_take, received, tag, self._links.channel(peer, tag), peer, self._heard, notify)
            self._listener.start(works, Deadline(_FOREVER), take)
        return True

    def heard(self) -> dict[int, bytes]:
        """Returns the messages that have arrived, by peer."""
        return dict(self._heard)

    def close(self) -> None:
        """Drops all buffers; the caller closes the connections next."""
        self._expected.clear()
        if self._listener:
            if self._listener.is_busy:
                self._links.wake()
            self._listener.end()
            self._listener = None

    def _expect(self) -> None:
        """Posts receives for all peers' next messages."""
        self._expected = {}
        for peer in self._peers:
            frame, works = torch.zeros(MAX_FRAME_BYTES, dtype=torch.uint8), list[Work]()
            self._expected[peer] = frame, works
            with suppress(ExchangeError):
                works.append(self._links.receive_whole(frame, peer, self._tag))


def _take(
    frame: torch.Tensor,
    tag: int,
    channel: Channel | None,
    peer: int,
    heard: dict[int, bytes],
    notify: Callable[[], None],
    failure: Failure | None,
) -> None:
    """Stores a peer's message, if it arrived undamaged."""
    if failure is None and (message := _unpack(bytes(frame.numpy()), tag, channel)) is not None:
        heard[peer] = message
    notify()


def _pack(message: bytes, tag: int, channel: Channel | None) -> torch.Tensor:
    if len(message) > MAX_FRAME_BYTES - (_LENGTH_BYTES + OVERHEAD if channel else _HEADER_BYTES):
        message = b""
    if channel:
        sealed = channel.seal((tag, 0), message)
        return _tensor(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)
    body = len(message).to_bytes(_LENGTH_BYTES, "big") + message
    return _tensor(xxhash.xxh3_64_digest(body) + body)


def _unpack(frame: bytes, tag: int, channel: Channel | None) -> bytes | None:
    """Returns the message; None if it is damaged."""
    if channel:
        length = int.from_bytes(frame[:_LENGTH_BYTES], "big")
        return channel.open((tag, 0), frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
    length = int.from_bytes(frame[_CHECKSUM_BYTES:_HEADER_BYTES], "big")
    body = frame[_CHECKSUM_BYTES : _HEADER_BYTES + length]
    is_whole = len(frame) >= _HEADER_BYTES + length and frame[:_CHECKSUM_BYTES] == xxhash.xxh3_64_digest(body)
    return body[_LENGTH_BYTES:] if is_whole else None


def _tensor(frame: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)
