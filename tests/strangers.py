"""Who reaches a port and has no key."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

Attack = Callable[[tuple[str, int], int], list[socket.socket]]
"""Makes so many connections to an address, and keeps them."""


def say(what: Callable[[int], bytes]) -> Attack:
    """Opens so many connections, and says something on each."""

    def attack(address: tuple[str, int], number: int) -> list[socket.socket]:
        strangers = []
        for count in range(number):
            stranger = socket.socket()
            stranger.settimeout(0.2)
            with contextlib.suppress(OSError):
                stranger.connect(address)
                stranger.sendall(what(count))
            strangers.append(stranger)
        return strangers

    return attack
