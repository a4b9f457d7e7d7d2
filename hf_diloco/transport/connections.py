"""The sockets of one lane: Gloo groups outside the default world, and waiting on them that ends when a peer is lost.

Gloo wakes transfers that are queued on a connection that breaks, but not the one in progress: its `wait` lasts until
its timeout, however long ago the peer's machine closed (`Pair::signalException` in Gloo's tcp transport skips the
operation being read or written). So a separate thread waits, and the caller checks now and then whether the connection
of a slow transfer is still intact.

A TCP connection sends no more in a round trip than its buffers hold, and slows down when it loses a packet. On long
links, several connections between two islands, each a group of its own, carry more than one.

Ends find each other in a `Meeting`; with a key they prove there that they hold it, and all traffic on their
connections is sealed (`Sealer`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue

import torch
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo

from hf_diloco.errors import ExchangeError, IslandLostError, StoreError
from hf_diloco.sealing.channel import OVERHEAD, Channel
from hf_diloco.transport.base import Lane, Traffic
from hf_diloco.transport.handshake import End
from hf_diloco.transport.meeting import Meeting
from hf_diloco.transport.transfers import Deadline, Failure, Transfers, Waiter, Work, reason
from hf_diloco.utils.listening import GlooListener, closed_in_forks
from hf_diloco.utils.threads import call_within, outlive_gloo

PROBE_SECONDS = 0.5
"""How long a transfer may take before its connection is probed; a broken connection is detected after twice that."""

MIN_PART_BYTES, MAX_PART_BYTES = 1 << 18, 1 << 20
"""A message is cut into at least one part per connection, unless the parts would be so small that the calls for them
cost more than they gain, and into parts small enough that a rate limit does not let them through in bursts."""

MIN_LONE_PART_BYTES = 1 << 14
"""The smallest part of a message that travels alone: what TCP sends at once after a pause."""

GLOO_MORE_SECONDS = 60.0
"""How much later Gloo gives up connecting than this package does. If both ends gave up at about the same time, Gloo's
own thread would see the other end refuse after it gave up, and abort the process."""

PROBE_TAG = 0
"""Transfers are tagged from 1."""

_MIN_KEPT_BYTES = 1 << 12


class Connections:
    """The owners of one lane, fully connected.

    Raises:
        IslandLostError: the others did not connect in time; or this end cannot listen: its own island is named.
        ForgedError: a peer that answered does not hold the key; its island is named.
        RendezvousError: a peer has another version, or authenticates differently.

    Attributes:
        groups: one per connection; empty once this end is closed.
    """

    def __init__(self, lane: Lane) -> None:
        self.num_connections = lane.num_connections
        self.parties = lane.parties
        self._pace = lane.rate_limit.pace
        self._peers = lane.peers
        self.groups: list[ProcessGroupGloo] = []
        self._sealer: Sealer | None = None
        if self._peers:
            deadline = Deadline(lane.timeout)
            try:
                with Meeting(lane, deadline) as meeting, closed_in_forks():
                    self.groups = _connect_all(meeting, lane, deadline)
            except (IslandLostError, StoreError, RuntimeError, TimeoutError) as error:
                raise _not_connected(error, lane, deadline) from None
            except OSError as error:  # a local error of this end; `__cause__` keeps it
                raise IslandLostError(
                    f"{lane.parties.name(lane.island)} cannot listen on {lane.address} for the others "
                    f"({reason(error)}): check bind_address, whether the interface with this address is up, and how "
                    "many files the process may open",
                    [lane.island],
                ) from error.with_traceback(None)
            self._sealer = Sealer(meeting.channels) if lane.key else None
        self._waiter = Waiter("hf-diloco-transfers")
        self._results: SimpleQueue[Failure | None] = SimpleQueue()

    @property
    def is_sealed(self) -> bool:
        """Whether traffic is sealed with a key."""
        return self._sealer is not None

    def channel(self, peer: int, tag: int) -> Channel | None:
        """Returns the channel that seals and opens small messages of a peer; None without a key."""
        return self._sealer.channels[End(peer, tag % self.num_connections)] if self._sealer else None

    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        transfers: Transfers,
        with_checksum: bool = True,
        min_part: int = MIN_PART_BYTES,
    ) -> None:
        """Starts sending, as soon as the rate limit allows it; the tensor must not change until the transfer has been
        waited for.

        With a key the tensor is sealed for its place in the sequence sent with this tag: use a tag with one
        `Transfers` only at each end, and never again. Without a key a checksum follows it if `with_checksum`. That and
        `min_part`, see `spread`, are the same at both ends.
        """
        sealer = self._sealer
        for connection, part in self.spread(tensor, tag, min_part):
            num_bytes = part.nbytes
            for wire in sealer.seal(part, End(peer, connection), tag, transfers) if sealer else (part,):
                transfers.add(self._send(wire, peer, tag, connection), sent=num_bytes)
                num_bytes = 0
        if with_checksum and not sealer and tensor.numel():  # computed while the first part is in flight
            transfers.add(self.send_whole(torch.tensor([_checksum(tensor)]), peer, tag))

    def receive(
        self,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        transfers: Transfers,
        with_checksum: bool = True,
        min_part: int = MIN_PART_BYTES,
    ) -> None:
        """Starts receiving; see `send`. The tensor is complete once the transfer has been waited for. With a key or a
        checksum it then holds what was sent, or zeros, and `peer` is in `Transfers.damaged`."""
        sealer = self._sealer
        for connection, part in self.spread(tensor, tag, min_part):
            num_bytes = part.nbytes
            for wire in sealer.expect(part, End(peer, connection), tag, transfers) if sealer else (part,):
                transfers.add(self._start("recv", wire, peer, tag, connection), received=num_bytes)
                num_bytes = 0
        if with_checksum and not sealer and tensor.numel():
            checksum = torch.empty(1, dtype=torch.int64)
            transfers.add(self.receive_whole(checksum, peer, tag))
            transfers.expect(tensor, lambda: _checksum(tensor) == int(checksum), peer)

    def send_whole(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts sending something small, over one connection and unsealed: the caller seals it."""
        return self._send(tensor, peer, tag, tag % self.num_connections)

    def receive_whole(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts receiving a `send_whole`; the tensor may be longer."""
        return self._start("recv", tensor, peer, tag, tag % self.num_connections)

    def wait(self, transfers: Transfers, deadline: Deadline, meanwhile: Callable[[], None] | None = None) -> Traffic:
        """Blocks until all transfers are done; returns their traffic. After the deadline their connections cannot be
        used.

        Calls `meanwhile` every `PROBE_SECONDS`; after an exception from it only `close` may be called. Raises
        `IslandLostError` if a peer's connection broke, or it did not send or receive in time.
        """
        works, transfers.works = transfers.works, []
        if works:
            self._wait(works, deadline, meanwhile)
            transfers.check()
        return transfers.take_traffic()

    def find_broken(self) -> list[int]:
        """Returns the peers whose connection has broken; none once this end is closed. Does not block."""
        numbers = range(len(self.groups))
        return [peer for peer in self._peers if any(self._is_broken(peer, number) for number in numbers)]

    def close(self) -> None:
        """Closes the sockets at once, which wakes the peers; may be called more than once."""
        if not self.groups:
            return
        if self._waiter.is_busy:
            self.wake()
        self._waiter.end()
        self.groups.clear()  # dropping the last reference closes Gloo's sockets; abort() does not

    def spread(
        self, tensor: torch.Tensor, tag: int, min_part: int = MIN_PART_BYTES
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields parts of `tensor`, each with the number of its connection; the same at both ends.

        One part per connection; fewer if they would have less than about `min_part` bytes, more if they would have
        over `MAX_PART_BYTES`. Every chunk is spread over all connections: chunks are waited for in order, and one that
        came over a single slow connection would hold up the others.
        """
        if tensor.numel():
            fewest, most = (-(-tensor.nbytes // size) for size in (MAX_PART_BYTES, min_part))
            for number, part in enumerate(tensor.tensor_split(max(fewest, min(self.num_connections, most)))):
                yield (tag + number) % self.num_connections, part

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, connection: int) -> Work:
        if self._pace:
            self._pace(tensor.nbytes)
        return self._start("send", tensor, peer, tag, connection)

    def _start(self, operation: str, tensor: torch.Tensor, peer: int, tag: int, connection: int) -> Work:
        if not self.groups:
            raise ExchangeError("the connection to the others is closed; start the run again from its checkpoint")
        try:
            handle = getattr(self.groups[connection], operation)([tensor], peer, tag)
        except RuntimeError as error:
            raise self.lost(peer, reason(error)) from None
        return Work(handle, peer, connection)

    def lost(self, peer: int, reason: str) -> IslandLostError:
        """Returns the error for a peer that is gone or late."""
        return IslandLostError(
            f"{self.parties.name(peer)} was lost during the exchange ({reason}). If its machine is healthy, the link "
            "may be too slow for exchange_timeout; else start all islands again: the run resumes from the newest "
            "round that all hold",
            [peer],
        )

    def _wait(self, works: list[Work], deadline: Deadline, meanwhile: Callable[[], None] | None) -> None:
        self._waiter.start(works, deadline, self._results.put)
        suspect: int | None = None
        while True:
            try:
                failure = self._results.get(timeout=PROBE_SECONDS)
                break
            except Empty:
                position = self._waiter.position
                if position == suspect:
                    raise self.lost(works[position].peer, "its connection broke") from None
                # Probe only this transfer's connection: an idle connection of the peer closes before those that still
                # deliver data which the peer sent before it left.
                is_held_up = position < len(works) and self._is_broken(*works[position][1:])
                suspect = position if is_held_up else None
                if meanwhile:
                    meanwhile()
        if failure:
            works.clear()  # the error's traceback would keep the works alive, and they the sockets
            raise self.lost(*failure)

    def _is_broken(self, peer: int, connection: int) -> bool:
        """Whether a connection is broken: Gloo then refuses a receive; else the probing receive stays pending."""
        try:
            self._probe(peer, connection)
        except IslandLostError:
            return True
        return False

    def _probe(self, peer: int, connection: int) -> Work:
        return self._start("recv", torch.empty(1, dtype=torch.uint8), peer, PROBE_TAG, connection)

    def wake(self) -> None:
        """Closes the sockets while a transfer is being waited for: Gloo closes a connection if a receive times out."""
        for connection in range(self.num_connections):
            for peer in self._peers:
                try:
                    self._probe(peer, connection).handle.wait(timedelta(milliseconds=1))
                except (RuntimeError, IslandLostError):
                    continue


class Sealer:
    """Seals what one end sends, and opens what it receives. Any number of threads may use it.

    A message is sealed from the caller's tensor into a reusable buffer, from which it is sent, and opened from a
    reusable buffer into the caller's tensor: one pass over memory each, as for the checksum without a key. A message
    that is only authenticated is sent in place, followed by its signature.
    """

    def __init__(self, channels: Mapping[End, Channel]) -> None:
        self.channels = channels
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def seal(self, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        """Returns the tensors to send, in this order."""
        channel, place = self.channels[end], (tag, transfers.number("send", end.peer, tag))
        if not channel.encrypts:
            return [part, torch.frombuffer(bytearray(channel.sign(place, _bytes(part))), dtype=torch.uint8)]
        sealed, give_back = self._take(part.nbytes + OVERHEAD)
        transfers.endings.append(give_back)
        channel.seal_into(place, _bytes(part), _bytes(sealed))
        return [sealed]

    def expect(self, part: torch.Tensor, end: End, tag: int, transfers: Transfers) -> list[torch.Tensor]:
        """Returns the tensors to receive, in this order. `part` is complete once the transfers are done and
        checked."""
        channel, place = self.channels[end], (tag, transfers.number("recv", end.peer, tag))
        if not channel.encrypts:
            signature = torch.empty(OVERHEAD, dtype=torch.uint8)
            transfers.expect(part, lambda: channel.verify(place, _bytes(part), bytes(signature.numpy())), end.peer)
            return [part, signature]
        sealed, give_back = self._take(part.nbytes + OVERHEAD)
        transfers.expect(part, partial(channel.open_into, place, _bytes(sealed), _bytes(part)), end.peer)
        transfers.endings.append(give_back)
        return [sealed]

    def _take(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Returns a buffer, and the function that frees it for reuse: fresh memory costs eight times as much.

        Buffers have a power of two of bytes, because the last chunk of every fragment has a length of its own. Pages
        that were never written take no memory.
        """
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size] if num_bytes >= _MIN_KEPT_BYTES else []
        try:
            taken = free.pop()
        except IndexError:
            taken = torch.empty(size, dtype=torch.uint8)
        return taken[:num_bytes], partial(free.append, taken)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a 1-D host tensor (no copy)."""
    return tensor.detach().view(torch.uint8).numpy().data


def _checksum(tensor: torch.Tensor) -> int:
    """xxh3_64 of the bytes of a 1-D host tensor, as a signed number."""
    digest = xxhash.xxh3_64_intdigest(tensor.numpy().data)
    return digest - (digest >> 63 << 64)


def _connect_all(meeting: Meeting, lane: Lane, deadline: Deadline) -> list[ProcessGroupGloo]:
    """Opens all connections in parallel, because each takes many round trips."""

    def connect(number: int) -> ProcessGroupGloo:
        outlive_gloo()
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._timeout = deadline.remaining() + timedelta(seconds=GLOO_MORE_SECONDS)
        options._threads = 1  # they only serve collectives
        with GlooListener(lane.address, meeting.hosts) as listener:
            options._devices = [listener.device]
            return ProcessGroupGloo(
                PrefixStore(f"{number}", meeting.addresses), lane.island, lane.num_islands, options
            )

    def connect_in_time(number: int) -> ProcessGroupGloo:
        return call_within(deadline.remaining().total_seconds(), lambda: connect(number))

    if lane.num_connections == 1:
        return [connect_in_time(0)]
    with ThreadPoolExecutor(lane.num_connections) as threads:
        return list(threads.map(connect_in_time, range(lane.num_connections)))


def _not_connected(error: Exception, lane: Lane, deadline: Deadline) -> IslandLostError:
    late = f" within {lane.timeout:g} s" if deadline.is_over else ""
    first = "" if late else "see why the others ended, "
    return IslandLostError(
        f"the {lane.parties.unit}s could not connect to each other{late} (this one listens on {lane.address}): {first}"
        "check that firewalls let their machines reach each other on all ports, and bind_address. "
        f"{reason(error)}",
        error.islands if isinstance(error, IslandLostError) else (),
    )
