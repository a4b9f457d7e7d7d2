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
import ctypes
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


class Inbox:
    """Receives what waits on a socket, many messages a call; only their first bytes are kept."""

    NUM_MESSAGES, NUM_BYTES = 256, 32

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._memory = ctypes.create_string_buffer(self.NUM_MESSAGES * self.NUM_BYTES)
        start = ctypes.addressof(self._memory)
        starts = range(start, start + self.NUM_MESSAGES * self.NUM_BYTES, self.NUM_BYTES)
        self._places = (_Place * self.NUM_MESSAGES)(*(_Place(each, self.NUM_BYTES) for each in starts))
        self._messages = (_Message * self.NUM_MESSAGES)()
        for message, place in zip(self._messages, self._places, strict=True):
            message.header.places, message.header.num_places = ctypes.pointer(place), 1

    def take(self) -> list[bytes]:
        """The first bytes of each message that waits, in their order."""
        count = self._receive(self._link.fileno(), self._messages, self.NUM_MESSAGES, socket.MSG_DONTWAIT, None)
        kept = self._memory.raw
        return [kept[low : low + self.NUM_BYTES] for low in range(0, max(count, 0) * self.NUM_BYTES, self.NUM_BYTES)]


class _Place(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr"""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("places", ctypes.POINTER(_Place)),
        ("num_places", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """struct mmsghdr"""

    _fields_ = (("header", _Header), ("size", ctypes.c_uint))


def delay(seconds: float) -> None:
    """Never returns."""
    link = open_queue()
    inbox = Inbox(link)
    held: collections.deque[tuple[float, bytes]] = (
        collections.deque()
    )  # when packets may go, and the last one's number
    print("ready", flush=True)
    while True:
        pause = max(0.0, held[0][0] - time.monotonic() - TICK) if held else None
        select.select([link], [], [], pause)
        time.sleep(TICK)
        # They came half a tick ago, on average, and what is due is let go half a tick late.
        due = time.monotonic() + seconds - TICK
        for message in reversed(inbox.take()):
            if (message[5], message[4]) == (_SUBSYSTEM, _PACKET):  # the first attribute begins with the number
                held.append((due, message[24:28]))
                break
        _let_go(link, held)


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
