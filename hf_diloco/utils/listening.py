"""Listening sockets that others can reach: they listen only as long as they must, and leave file descriptors for
training.

An unexpected connection costs a file descriptor, and these are limited. Gloo listens from the creation of a device to
its end, accepts any connection, and aborts the process when no descriptor is left, or if a message is longer than
expected. So its socket admits only the machines of the peers, and nobody once all are connected. The rendezvous has to
listen to the end; it stops answering while few descriptors are left, and some are kept in reserve for that moment.

A socket stops answering by a filter that lets no packet through to it (`SO_ATTACH_FILTER`); connections already
accepted are separate sockets and go on. All of this is for Linux; elsewhere sockets go on listening.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import resource
import socket
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from hf_diloco.utils.urls import host_and_port

logger = logging.getLogger(__name__)

RESERVED_FILES = 128
"""File descriptors that a process with an open port reserves, for checkpoints and for its own connections."""

CHECK_SECONDS = 0.25

MAX_FILES = 1 << 16
"""The highest limit of open files to request: some programs loop over all possible descriptors."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF, see Documentation/networking/filter.rst
_NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000  # load operands from here on count from the IP header
_SOURCE_OFFSETS = {4: 12, 16: 8}  # of the source address in that header, by the address's length
_WHOLE_PACKET = 0xFFFF_FFFF
_DROP_ALL = struct.pack("HBBI", _RETURN, 0, 0, 0)  # number of bytes to let through: none
_QUEUE_LENGTH = slice(24, 28)  # tcpi_unacked in TCP_INFO: on a listening socket, connections waiting to be accepted

_MAX_DEVICES = 10

_creating = threading.Lock()


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, at most to `MAX_FILES`; returns the resulting limit, which
    child processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Door:
    """A listening socket that can stop answering. Accepted connections go on.

    The descriptor, on which other code accepts, is duplicated, but not by `socket.dup`, which would make both
    blocking.
    """

    def __init__(self, file: int) -> None:
        self._listener = socket.socket(fileno=os.dup(file))

    @property
    def address(self) -> tuple[str, int]:
        """The address where the socket listens."""
        name = self._listener.getsockname()
        return str(name[0]), int(name[1])

    def shut(self) -> None:
        """Stops answering connection attempts."""
        self._filter(_DROP_ALL)

    def admit(self, hosts: Collection[str]) -> None:
        """Answers only these hosts from now on: numeric addresses, of the family in which it listens."""
        code = b"".join(_pass_if_from(ipaddress.ip_address(host).packed) for host in hosts) + _DROP_ALL
        self._filter(code)

    def has_visitors(self) -> bool:
        """Whether a connection, accepted or not, is open."""
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_LENGTH.stop)
        name = self._listener.getsockname()
        return any(info[_QUEUE_LENGTH]) or any(one.name == name and not one.is_listening for one in _sockets())

    def limit_queue(self, length: int) -> None:
        """Limits the connections that wait to be accepted; further ones are dropped, and their clients retry."""
        with contextlib.suppress(OSError):
            self._listener.listen(length)

    def open(self) -> None:
        """Answers everybody again."""
        with contextlib.suppress(OSError):
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Closes the duplicate."""
        self._listener.close()

    def _filter(self, instructions: bytes) -> None:
        code = ctypes.create_string_buffer(instructions, len(instructions))
        program = struct.pack("HL", len(instructions) // len(_DROP_ALL), ctypes.addressof(code))
        with contextlib.suppress(OSError):
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class GlooListener:
    """A Gloo device on one local address, for a process group's options. Until the end of the `with` block it answers
    some hosts (numeric), then nobody. `door` is None if the device's socket was not found."""

    def __init__(self, address: str, hosts: Collection[str]) -> None:
        from torch.distributed import ProcessGroupGloo  # a store's server needs no torch

        with _creating:  # a socket that listens only afterwards is the device's
            for _ in range(_MAX_DEVICES):
                before = _listening()
                self.device: Any = ProcessGroupGloo.create_device(hostname=address)
                new = [number for name, number in _listening().items() if name not in before]
                self.door = Door(new[0]) if len(new) == 1 else None
                if len(new) > 1:
                    continue  # another thread began to listen as well: unclear which socket is the device's
                if self.door is None:
                    return
                self.door.admit(hosts)
                if not self.door.has_visitors():
                    return
                # someone connected before the filter was set: discard this device, whose address nobody knows yet
                self.door.close()

    def __enter__(self) -> GlooListener:
        return self

    def __exit__(self, *_: object) -> None:
        if self.door is not None:
            self.door.shut()
            self.door.close()


@contextlib.contextmanager
def closed_in_forks() -> Iterator[None]:
    """Sockets that are opened inside the block are closed in processes that this one forks later.

    Otherwise a DataLoader's workers, which survive the kill of this process for some seconds, or for as long as they
    are busy, would keep its connections open: the other ends could not notice the kill. (What is forked meanwhile has
    some of them all the same.)
    """
    before = _connections()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # no descriptor is left to look: a kill is then noticed later
            _own_sockets.update(_connections() - before)


def _close_own_sockets() -> None:
    if not _own_sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for inode, file in _socket_files():
        if inode in _own_sockets:
            os.dup2(nothing, file, inheritable=False)  # the number stays taken: a copied object may close it
    os.close(nothing)


def _connections() -> set[int]:
    """Returns the inodes of this process's sockets of IP: a pipe of another thread's is none of them."""
    found = set()
    with _creating:  # where a duplicate of a device's socket would be taken for it
        for inode, file in _socket_files():
            with contextlib.suppress(OSError), _socket_at(file) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    found.add(inode)
    return found


_own_sockets: set[int] = set()
"""Inodes of the sockets that forked processes close; unlike descriptors they do not soon belong to something else."""

os.register_at_fork(after_in_child=_close_own_sockets)


def keep_door(door: Door, owner: object) -> Callable[[], object]:
    """Stops a port from answering while the process has few file descriptors left, as long as `owner` lives; returns a
    function that ends this earlier.

    A reserve of descriptors is held from the start, and released when the port stops answering: connections that
    arrive faster than the checks may take all other descriptors, but not these. Connections waiting to be accepted at
    that moment may not take them either: the queue is short.
    """
    ended = threading.Event()
    size = min(RESERVED_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
    door.limit_queue(size // 4 - 1)

    def end() -> None:
        ended.set()
        door.close()  # at once, otherwise the port would stay taken

    finish = weakref.finalize(owner, end)
    args = (door, host_and_port(*door.address), ended, size)
    threading.Thread(target=_keep, args=args, name="hf-diloco-door", daemon=True).start()
    return finish


def _keep(door: Door, address: str, ended: threading.Event, size: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserve: list[int] = []
    is_shut = False
    _fill(reserve, size)
    while not ended.wait(CHECK_SECONDS):
        num_free = limit - min(limit, _num_files())
        if not is_shut and num_free < size:
            door.shut()
            _empty(reserve)
            is_shut = True
            logger.warning(
                "%s takes no more connections: %d of the %d files that this process may open are taken. See who "
                "connects to this port, let a firewall keep strangers out, or raise the limit (ulimit -n)",
                address,
                limit - num_free,
                limit,
            )
        elif is_shut and num_free > 3 * size:
            _fill(reserve, size)
            door.open()
            is_shut = False
    _empty(reserve)


def _fill(reserve: list[int], size: int) -> None:
    with contextlib.suppress(OSError):
        while len(reserve) < size:
            reserve.append(os.open(os.devnull, os.O_RDONLY))


def _empty(reserve: list[int]) -> None:
    while reserve:
        os.close(reserve.pop())


def _num_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return 0
    except OSError:  # not even this folder can be opened: no descriptors are left
        return sys.maxsize


class _Socket(NamedTuple):
    file: int
    name: Any
    is_listening: bool


def _socket_files() -> list[tuple[int, int]]:
    """Returns inode and descriptor of this process's sockets."""
    found = []
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.append((status.st_ino, int(name)))
    return found


@contextlib.contextmanager
def _socket_at(file: int) -> Iterator[socket.socket]:
    """Opens a duplicate of a socket by its descriptor. Raises `OSError` if that is closed meanwhile, or has become
    something else's: other threads open and close files."""
    copy = os.dup(file)
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with one:
        yield one


def _sockets() -> list[_Socket]:
    """Lists this process's sockets."""
    found = []
    for _, file in _socket_files():
        with contextlib.suppress(OSError), _socket_at(file) as one:
            is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
            found.append(_Socket(file, one.getsockname(), is_listening))
    return found


def _listening() -> dict[Any, int]:
    """Returns the descriptors of this process's listening sockets, by address."""
    return {one.name: one.file for one in _sockets() if one.is_listening}


def _pass_if_from(source: bytes) -> bytes:
    """Returns instructions that pass a packet from this address, and otherwise continue after them."""
    code, offset = b"", _SOURCE_OFFSETS[len(source)]
    num_words = len(source) // 4
    for number, (word,) in enumerate(struct.iter_unpack(">I", source)):
        code += _instruction(_LOAD_WORD, _NETWORK_HEADER + offset + 4 * number)
        code += _instruction(_JUMP_IF_EQUAL, word, if_not=2 * (num_words - number) - 1)
    return code + _instruction(_RETURN, _WHOLE_PACKET)


def _instruction(code: int, operand: int, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, if_not, operand)
