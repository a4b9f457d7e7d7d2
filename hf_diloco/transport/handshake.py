"""Who is on the other end of each connection, before anything else goes over it; see `sealing.agreement`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from hf_diloco.sealing import Agreement, Channel, LinkKey, Parties


class End(NamedTuple):
    """Where a connection leads, and which one of those to that peer it is."""

    peer: int
    connection: int


Swap = Callable[[Mapping[End, bytes]], Awaitable[Mapping[End, bytes]]]
"""Sends a message for each connection, and returns what came back for each."""


async def agree(
    key: LinkKey, name: str, own: int, connections: Sequence[End], parties: Parties, swap: Swap
) -> dict[End, Channel]:
    """Returns the session keys of each connection when every peer has proved, on each, that it holds the key.

    Args:
        key: shared by all ends.
        name: of what is connected, unique in the run; proofs for another one are worth nothing here.
        own: this end's number.
        connections: to be made.
        parties: which islands they lead to.
        swap: see `Swap`; called twice.

    Raises:
        ForgedError: a peer does not hold the key.
        OSError, EOFError, ValueError: what `swap` raises when a peer is gone, or makes no sense.
    """
    parts = {end: Agreement(key, name, end.connection, own, end.peer, parties) for end in connections}
    heard = await swap({end: part.public for end, part in parts.items()})
    answers = await swap({end: part.confirm(heard[end]) for end, part in parts.items()})
    return {end: part.finish(answers[end]) for end, part in parts.items()}
