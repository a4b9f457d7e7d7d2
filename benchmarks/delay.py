"""Holds every packet that arrives in this process' network for a while: the way between two islands.

    python -m benchmarks.delay 25000                # microseconds; runs until it is killed; prints "ready" at first

The kernel's own delay (netem) is not in every kernel. Here a firewall rule hands the packets to a queue:

    iptables -t mangle -A PREROUTING -i DEVICE -j NFQUEUE --queue-num 0

and this program lets them go in the order in which they came, up to a millisecond late. Only their numbers leave the
kernel, so the work is per packet, and those are up to 64 KiB long where the devices leave the cutting to the hardware,
as these do.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time

QUEUE = 0
TICK = 0.001
"""Seconds for which packets are gathered: waking up for each would take the processors from those who send them."""

# linux/netfilter/nfnetlink.h and nfnetlink_queue.h
_NETLINK_NETFILTER = 12
_SUBSYSTEM = 3
_PACKET, _VERDICT, _CONFIG, _VERDICT_BATCH = 0, 1, 2, 3
_ACCEPT = 1
_REQUEST, _ACKNOWLEDGE = 1, 4
_SO_RCVBUFFORCE = 33
_SOL_NETLINK, _NO_ENOBUFS = 270, 5


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def _message(kind: int, *attributes: bytes, flags: int = 0) -> bytes:
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, QUEUE) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), _SUBSYSTEM << 8 | kind, _REQUEST | flags, 0, 0) + body


def open_queue() -> socket.socket:
    """A socket that hears of each packet in the queue, and tells the kernel which may go."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    link.bind((0, 0))
    try:
        link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    except PermissionError:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    link.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
    bind = _attribute(1, struct.pack("!BBH", 1, 0, socket.AF_INET))
    numbers_only = _attribute(2, struct.pack("!IB", 0, 1))
    length = _attribute(3, struct.pack("!I", 1_000_000))
    whole_segments = _attribute(5, struct.pack("!I", 4)) + _attribute(4, struct.pack("!I", 4))
    for attributes in (bind, numbers_only + length + whole_segments):
        link.send(_message(_CONFIG, attributes, flags=_ACKNOWLEDGE))
        (error,) = struct.unpack_from("=i", link.recv(8192), 16)
        if error:
            raise OSError(-error, f"{errno.errorcode[-error]}: the kernel gives no packet queue")
    link.setblocking(False)
    return link


def delay(seconds: float) -> None:
    """Never returns."""
    link = open_queue()
    held: collections.deque[tuple[float, bytes]] = collections.deque()  # when each may go, and its number
    print("ready", flush=True)
    while True:
        pause = max(0.0, held[0][0] - time.monotonic() - TICK) if held else None
        select.select([link], [], [], pause)
        time.sleep(TICK)
        _hear(link, held, seconds)
        _let_go(link, held)


def _hear(link: socket.socket, held: collections.deque[tuple[float, bytes]], seconds: float) -> None:
    # They came half a tick ago, on average, and what is due is let go half a tick late.
    due = time.monotonic() + seconds - TICK
    with contextlib.suppress(BlockingIOError):
        for _ in range(256):
            message = link.recv(4096)
            if (message[5], message[4]) == (_SUBSYSTEM, _PACKET):  # the first attribute begins with the number
                held.append((due, message[24:28]))


def _let_go(link: socket.socket, held: collections.deque[tuple[float, bytes]]) -> None:
    last = None
    now = time.monotonic()
    while held and held[0][0] <= now:
        _, last = held.popleft()
    if last is not None:  # and all before it
        link.send(_message(_VERDICT_BATCH, _attribute(2, struct.pack("!I", _ACCEPT) + last)))


def main() -> None:
    """Runs the program."""
    with contextlib.suppress(PermissionError):  # else packets wait for a processor as well
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    delay(int(sys.argv[1]) / 1e6)


if __name__ == "__main__":
    main()
