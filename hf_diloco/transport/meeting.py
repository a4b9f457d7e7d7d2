"""How the ends of a lane connect: on sockets of this package, before Gloo listens.

Gloo accepts anyone who connects to its port as a peer, and aborts the process if a message is longer than expected. So
its port is opened only after all ends have met here; only they learn it, and it accepts only their machines.

    store            mesh/NAME/at/END      where an end listens, and how it authenticates
    high -> low end  who is calling whom in which lane; with a key `sealing.channel` follows, both ways
    both ways        from which address this end will connect, then Gloo's addresses; sealed, with a key

Outsiders can reach this port while ends meet. Each connection is limited in size and time, and so is the number of
unauthenticated ones: beyond it the oldest is closed. A failed one ends nothing: its connection is closed, and the end
that it claimed to be may still come.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Collection
from typing import Any

from hf_diloco.errors import ForgedError, IslandLostError, RendezvousError
from hf_diloco.sealing.channel import Agreement, Channel
from hf_diloco.store.rendezvous import local_address
from hf_diloco.transport.base import Lane
from hf_diloco.transport.handshake import MAX_GREETING_BYTES, End, GlooAddresses, Line, Place, way_of
from hf_diloco.transport.transfers import Deadline

logger = logging.getLogger("hf_diloco")

MAX_STRANGERS = 64
"""Unauthenticated connections at a time; in large lanes, two for each end. As many more may wait in the backlog."""

STRANGER_SECONDS = 10.0
"""Timeout for authenticating."""

FORGED_SECONDS = 5.0
"""How long to wait for an end that has published its address after someone failed to authenticate as this end."""

GONE_SECONDS = 2.0
"""How long an end's published port may refuse connections before the end counts as gone."""

UNREACHABLE_SECONDS = 10.0
"""How long connecting to an end's published address may fail before the user is warned."""

VERSION = 2
"""Version of this protocol."""

_HELLO = struct.Struct(">16s32sII")
_MAGIC = b"hf-diloco link 2"
_RETRY_SECONDS = 0.1
_WATCH_SECONDS = 0.5
_LINGER_SECONDS = 10.0


class Meeting:
    """The meeting of two or more ends, at one of them. Gloo connects within the `with` block.

    `channels` has the channel of each connection (empty without a key); through the store `addresses` Gloo tells its
    addresses to the other ends only. Raises as `Connections`.
    """

    def __init__(self, lane: Lane, deadline: Deadline) -> None:
        self._lane = lane
        self._own, self._peers, self._parties = lane.island, lane.peers, lane.parties
        self._deadline = deadline
        self._strangers: dict[asyncio.Task[Any], None] = {}  # by time of arrival
        self._talks: set[asyncio.Task[Any]] = set()
        self._lines: dict[int, Line] = {}
        self._hosts: dict[int, set[str]] = {}
        self._refused: dict[int, ForgedError] = {}
        self._closed_since: dict[int, float] = {}  # since when an end's port refuses connections
        self._unreached_since: dict[int, float] = {}  # since when an end is unreachable; infinite once warned
        self.channels: dict[End, Channel] = {}
        self.addresses = GlooAddresses(self._tell, deadline)
        listener = _listen(lane.address)
        self._place = Place(*listener.getsockname()[:2])
        is_up, self._all_connected = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        threading.Thread(target=self._serve, args=(listener, is_up), name="hf-diloco-meeting", daemon=True).start()
        is_up.wait()
        if self._failure:
            raise self._failure
        try:
            self._meet()
        except BaseException:
            self._end(at_once=True)
            raise

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(at_once=kind is not None)
        if kind is None:  # Gloo fails to connect to an end that finishes first and closes
            self._all_connected.wait()

    @property
    def hosts(self) -> set[str]:
        """The numeric addresses from which peers will connect."""
        return set().union(*self._hosts.values())

    # In the caller's thread

    def _meet(self) -> None:
        shown = {"version": VERSION, "way": way_of(self._lane.key), **self._place._asdict()}
        self._lane.store.set(_path(self._lane.name, self._own), json.dumps(shown))
        met = asyncio.run_coroutine_threadsafe(self._gather(self._find()), self._loop)
        try:
            met.result(self._deadline.remaining().total_seconds())
        except TimeoutError:
            raise self._lost([peer for peer in self._peers if peer not in self._hosts], "did not connect") from None

    def _find(self) -> dict[int, Place]:
        """Waits until all peers have published where they listen; returns their addresses."""
        lane, begun = self._lane, time.monotonic()
        keys = {peer: _path(lane.name, peer) for peer in self._peers}

        def should_give_up() -> bool:
            return lane.should_give_up(time.monotonic() - begun)

        shown = lane.store.wait(list(keys.values()), self._deadline.remaining().total_seconds(), should_give_up)
        if missing := [peer for peer, key in keys.items() if key not in shown]:
            if should_give_up():
                raise IslandLostError(f"not all have published their addresses ({lane.name})")
            raise self._lost(missing, "did not publish where to connect")
        return {peer: self._read(peer, shown[key]) for peer, key in keys.items()}

    def _read(self, peer: int, shown: bytes) -> Place:
        try:
            record = json.loads(shown)
            version, way = record["version"], record["way"]
            place = Place(str(ipaddress.ip_address(record["host"])), int(record["port"]))
            if not 0 < place.port < 1 << 16:
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise self._other_version(peer, f"it published an invalid address: {shown[:80]!r}") from None
        if version != VERSION:
            raise self._other_version(peer, f"protocol {version}, where this one has {VERSION}")
        if way != (own := way_of(self._lane.key)):
            raise RendezvousError(
                f"{self._parties.name(peer)} connects {way}, and this one {own}: give all the same key "
                "(key_file or HF_DILOCO_KEY) and the same `encrypt`"
            )
        return place

    def _tell(self, key: str, value: bytes) -> None:
        message = json.dumps([key, value.hex()]).encode()
        for line in self._lines.values():
            self._loop.call_soon_threadsafe(line.send, message)

    def _end(self, at_once: bool) -> None:
        self._loop.call_soon_threadsafe(self._ended.put_nowait, at_once)

    # In the meeting's own thread

    def _serve(self, listener: socket.socket, is_up: threading.Event) -> None:
        """Runs the event loop; releases the threads that wait for it even if it cannot start (no file descriptors)."""
        serving = self._run(listener, is_up)
        try:
            asyncio.run(serving)
        except Exception as error:
            self._failure = error
        finally:
            serving.close()
            listener.close()
            is_up.set()
            self._all_connected.set()

    async def _run(self, listener: socket.socket, is_up: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._met: asyncio.Future[None] = self._loop.create_future()
        self._places: asyncio.Future[dict[int, Place]] = self._loop.create_future()
        self._ended: asyncio.Queue[bool] = asyncio.Queue()
        self._callers: list[asyncio.Task[None]] = []
        server = await asyncio.start_server(
            self._receive, sock=listener, limit=MAX_GREETING_BYTES, backlog=MAX_STRANGERS
        )
        self._met.add_done_callback(lambda _: server.close())  # accept nobody else
        is_up.set()
        at_once = await self._ended.get()
        server.close()
        if not at_once and self._talks:
            for line in self._lines.values():
                line.end()
            await asyncio.wait(self._talks, timeout=_LINGER_SECONDS)  # closing at once could cut off sent messages
        self._all_connected.set()

    async def _gather(self, places: dict[int, Place]) -> None:
        self._places.set_result(places)
        for peer, error in self._refused.items():
            self._limit_wait(peer, error)
        ways = ((peer, self._call if peer < self._own else self._watch) for peer in self._peers)
        self._callers = [self._loop.create_task(way(peer)) for peer, way in ways]
        for caller in self._callers:
            caller.add_done_callback(self._end_if_failed)
        await self._met

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles an incoming connection."""
        try:
            line = Line(reader, writer)
        except ConnectionResetError:
            return
        task, peer = asyncio.current_task(), None
        assert task is not None
        self._strangers[task] = None
        if len(self._strangers) > max(MAX_STRANGERS, 2 * len(self._peers)):
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # at once: several may arrive before the task ends
            oldest.cancel()
        try:
            async with asyncio.timeout(STRANGER_SECONDS):
                peer = self._identify(await line.receive())
                channels = await self._prove(peer, line)
            self._strangers.pop(task, None)
            await self._talk(peer, line, channels)
        except ForgedError as error:
            assert peer is not None
            self._refuse(peer, error, line.host)
        except (OSError, TimeoutError, EOFError, ValueError, asyncio.CancelledError):
            pass
        finally:
            self._strangers.pop(task, None)
            line.close()

    async def _call(self, peer: int) -> None:
        """Connects to an end, and retries until it has authenticated."""
        place = (await self._places)[peer]
        while not self._met.done():
            line = None
            self._unreached_since.setdefault(peer, self._loop.time())
            try:
                async with asyncio.timeout(STRANGER_SECONDS):
                    line = Line(*await asyncio.open_connection(*place, limit=MAX_GREETING_BYTES))
                    self._note_reached(peer)
                    line.send(_HELLO.pack(_MAGIC, _digest(self._lane.name), self._own, peer))
                    channels = await self._prove(peer, line)
                await self._talk(peer, line, channels)
            except ForgedError as error:
                self._refuse(peer, error, place.host)
            except ConnectionRefusedError:
                self._note_closed(peer)
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                self._note_unreached(peer, place, error)
            finally:
                if line:
                    line.close()
            if not self._met.done():
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self, peer: int) -> None:
        """Checks whether an end that is to call this one still listens; if not, it has given up, and will not call."""
        place = (await self._places)[peer]
        while not self._met.done():
            await asyncio.sleep(_WATCH_SECONDS)
            if peer in self._lines:
                continue
            self._unreached_since.setdefault(peer, self._loop.time())
            try:
                async with asyncio.timeout(STRANGER_SECONDS):
                    Line(*await asyncio.open_connection(*place)).close()
                self._note_reached(peer)
            except ConnectionRefusedError:
                self._note_closed(peer)
            except (OSError, TimeoutError) as error:
                self._note_unreached(peer, place, error)

    def _note_reached(self, peer: int) -> None:
        self._closed_since.pop(peer, None)
        self._unreached_since.pop(peer, None)

    def _note_unreached(self, peer: int, place: Place, error: Exception) -> None:
        """Warns, once, long before the deadline, that an end has published an address that cannot be reached."""
        if self._loop.time() - self._unreached_since.get(peer, math.inf) > UNREACHABLE_SECONDS:
            self._unreached_since[peer] = math.inf
            logger.warning(
                "%s cannot be reached where it listens (%s, port %d: %s): retrying. Check that firewalls let the "
                "machines reach each other on all ports, and bind_address there",
                *(self._parties.name(peer), *place, error or type(error).__name__),
            )

    def _note_closed(self, peer: int) -> None:
        since = self._closed_since.setdefault(peer, self._loop.time())
        if self._loop.time() - since > GONE_SECONDS and peer not in self._lines:
            self._fail(self._lost([peer], "went away before they connected"))

    def _identify(self, hello: bytes) -> int:
        """Returns the number of the calling end; raises `ValueError` if the call is not for this end."""
        if len(hello) != _HELLO.size:
            raise ValueError("no greeting")
        magic, lane, peer, called = _HELLO.unpack(hello)
        if (magic, lane, called) != (_MAGIC, _digest(self._lane.name), self._own):
            raise ValueError("a greeting for somebody else")
        if peer not in self._peers or peer < self._own:
            raise ValueError("an end that does not call this one")
        return int(peer)

    async def _prove(self, peer: int, line: Line) -> dict[End, Channel]:
        lane = self._lane
        if lane.key is None:
            return {}
        numbers = range(lane.num_connections)
        parts = [Agreement(lane.key, lane.name, number, self._own, peer, lane.parties) for number in numbers]
        line.send_parts([part.public for part in parts])
        heard = await line.receive_parts(len(parts))
        line.send_parts([part.confirm(public) for part, public in zip(parts, heard, strict=True)])
        answers = await line.receive_parts(len(parts))
        return {End(peer, number): parts[number].finish(answer) for number, answer in enumerate(answers)}

    async def _talk(self, peer: int, line: Line, channels: dict[End, Channel]) -> None:
        """Receives messages of an authenticated end until it closes the connection."""
        if self._met.done():
            return
        task = asyncio.current_task()
        assert task is not None
        if earlier := self._lines.pop(peer, None):  # a connection that the peer has abandoned
            earlier.close()
        self._lines[peer] = line
        line.trust(channels.get(End(peer, 0)))
        self._talks.add(task)
        try:
            place = (await self._places)[peer]
            line.send(local_address(*place).encode())
            source = str(ipaddress.ip_address((await line.receive()).decode()))
            self.channels |= channels
            self._hosts[peer] = {line.host, source}
            if len(self._hosts) == len(self._peers) and not self._met.done():
                self._met.set_result(None)
            while True:
                self.addresses.hear(peer, await line.receive())
        finally:
            self._talks.discard(task)
            if self._lines.get(peer) is line and not self._met.done():
                self._hosts.pop(peer, None)
                del self._lines[peer]
            elif self._lines.get(peer) is line and self.addresses.num_heard[peer] < self._lane.num_connections:
                self.addresses.fail(self._lost([peer], "broke off while they connected"))

    def _refuse(self, peer: int, error: ForgedError, host: str) -> None:
        if peer not in self._refused:
            name = self._parties.name(peer)
            if error.island is None:
                error = ForgedError(f"of what came in the name of {name}, {error}", self._parties.island(peer))
            logger.warning("refused %s, which claims to be %s of %s: %s", host, name, self._lane.name, error)
            self._refused[peer] = error
            if self._places.done():
                self._limit_wait(peer, error)

    def _limit_wait(self, peer: int, error: ForgedError) -> None:
        self._loop.call_later(FORGED_SECONDS, lambda: None if peer in self._hosts else self._fail(error))

    def _end_if_failed(self, caller: asyncio.Task[None]) -> None:
        """Without this an unexpected error would end the calls to one end, and all would wait until the deadline."""
        if not (self._met.done() or caller.cancelled()) and (error := caller.exception()):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._met.done():
            self._met.set_exception(error)

    # Errors

    def _lost(self, peers: Collection[int], what: str) -> IslandLostError:
        return IslandLostError(f"{self._parties.names(peers) if peers else 'the others'} {what}", peers)

    def _other_version(self, peer: int, what: str) -> RendezvousError:
        return RendezvousError(
            f"{self._parties.name(peer)} has another version of hf_diloco ({what}): install the same version on all, "
            "and start them again"
        )


def _listen(address: str) -> socket.socket:
    family, *_, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(found[:2], family=family, backlog=1024)


def _path(name: str, end: int) -> str:
    return f"mesh/{name}/at/{end}"


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
