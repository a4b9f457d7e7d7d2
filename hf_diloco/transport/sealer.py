"""Seals the traffic on the connections of a lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_diloco.sealing.channel import OVERHEAD, Channel
from hf_diloco.transport.handshake import End

if TYPE_CHECKING:
    from hf_diloco.transport.connections import Transfers

_MIN_KEPT_BYTES = 1 << 12


class Sealer:
    """Seals what one end sends, and opens what it receives. Any number of threads may use it.

    A message is sealed from the caller's tensor into a reusable buffer, from which it is sent, and opened from a
    reusable buffer into the caller's tensor: one pass over memory each, as for the checksum without a key. A message
    that is only authenticated is sent in place, followed by its signature.
    """

    def __init__(self, channels: Mapping[End, Channel]) -> None:
        self.channels = channels
        self._staging = _Staging()

    def seal(self, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        """Returns the tensors to send, in this order."""
        channel, place = self.channels[end], (tag, transfers.number("send", end.peer, tag))
        if not channel.encrypts:
            return [part, torch.frombuffer(bytearray(channel.sign(place, _bytes(part))), dtype=torch.uint8)]
        sealed, give_back = self._staging.take(part.nbytes + OVERHEAD)
        transfers.when_done(give_back)
        channel.seal_into(place, _bytes(part), _bytes(sealed))
        return [sealed]

    def expect(self, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        """Returns the tensors to receive, in this order. `part` is complete once the transfers were waited for and
        checked."""
        channel, place = self.channels[end], (tag, transfers.number("recv", end.peer, tag))
        if not channel.encrypts:
            signature = torch.empty(OVERHEAD, dtype=torch.uint8)
            check = partial(_verify, channel, place, part, signature)
            transfers.expect(part, check, end.peer)
            return [part, signature]
        sealed, give_back = self._staging.take(part.nbytes + OVERHEAD)
        transfers.expect(part, partial(channel.open_into, place, _bytes(sealed), _bytes(part)), end.peer)
        transfers.when_done(give_back)
        return [sealed]


class _Staging:
    """Host memory that is reused for any message that fits: fresh memory costs eight times as much.

    Buffers have a power of two of bytes, because the last chunk of every fragment has a length of its own. Pages that
    were never written take no memory.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Returns a buffer and the function that returns it to the pool, to be called when no transfer uses it any
        more."""
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size] if num_bytes >= _MIN_KEPT_BYTES else []
        try:
            taken = free.pop()
        except IndexError:
            taken = torch.empty(size, dtype=torch.uint8)
        return taken[:num_bytes], partial(free.append, taken)


def _verify(channel: Channel, place: tuple[int, int], part: torch.Tensor, signature: torch.Tensor) -> bool:
    return channel.verify(place, _bytes(part), bytes(signature.numpy()))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a 1-D host tensor (no copy)."""
    return tensor.detach().view(torch.uint8).numpy().data
