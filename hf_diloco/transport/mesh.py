"""Direct connections between islands: a Gloo group outside the default world, point to point, in chunks.

Two islands send each other their chunks and both average. More than two cut each chunk into one piece per island:
every piece goes to its owner, which averages in fp32, encodes the average and sends it to all, so that an island sends
and receives 2 (n-1)/n of its payload, as in a ring all-reduce. If averages cannot be encoded again (with codecs that
need error feedback, whose payload is small), all send theirs to all. A checksum follows each piece; with a key each is
sealed instead. Several chunks are in flight at once, so that transfers overlap with the round trips and arithmetic of
others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import DamagedTransferError, ExchangeError, IslandLostError
from hf_diloco.transport.base import (
    BLOCK_VALUES,
    Exchange,
    Lane,
    Observer,
    Traffic,
    averaged_by_all,
    bytes_to_send,
    cut_into_pieces,
    weighted_mean,
)
from hf_diloco.transport.connections import MIN_LONE_PART_BYTES, MIN_PART_BYTES, PROBE_TAG, Connections
from hf_diloco.transport.messages import Messages
from hf_diloco.transport.transfers import Deadline, LossNotes, Transfers

Watch = Callable[[], Callable[[], None]]

CHUNK_VALUES = 1 << 20
"""Values in a chunk: 4 MiB of fp32. Below 1 MiB round trips dominate, above 16 MiB cache misses and the pipeline's
ends."""

MAX_CHUNK = 4
"""Largest factor on `CHUNK_VALUES` for codecs that need as many times fewer bytes: each chunk costs calls, too."""

MIN_CHUNKS_IN_FLIGHT, MAX_CHUNKS_IN_FLIGHT = 8, 32
BYTES_IN_FLIGHT = 32 << 20
"""Enough to fill a link of 1 Gbit/s and 0.1 s. Smaller chunks are more in number, up to the point where the arithmetic
of a chunk takes longer than its transfer."""


class MeshExchange(Exchange):
    """The owners of one lane, connected by sockets on `address`. Raises as `Connections`.

    Args:
        notes: where islands note whom they lost; default: notes of this lane.
        watch: begins a wait for the others, and returns a function to call now and then until it is over; default:
            waits are not reported.
    """

    def __init__(self, lane: Lane, notes: LossNotes | None = None, watch: Watch | None = None) -> None:
        self.island = lane.island
        self.num_islands = lane.num_islands
        self._timeout = lane.timeout
        self._peers = lane.peers
        self._tags = itertools.count(PROBE_TAG + 1)
        self._watch = watch
        self._damaged: set[int] = set()
        self._expected: deque[Chunk] = deque()
        self._prepared: deque[Chunk] = deque()
        self._failure: ExchangeError | None = None
        self._moved = Traffic()  # in the current exchange
        self._buffers: dict[str, torch.Tensor] = {}
        self._notes = notes or LossNotes(lane.store, lane.name, lane.island)
        self._rate_limit = lane.rate_limit
        self.links = Connections(lane)
        self._messages = Messages(self.links, self._peers)

    def expect(self, size: int, codec: Codec) -> None:
        try:
            sizes = first_chunks(size, codec) if self._peers else []
            for slot, num_values in enumerate(sizes):
                self._expected.append(self._expect(slot, num_values, codec, is_only=len(sizes) == 1))
        except ExchangeError as error:
            # Left to `average` to raise: until then the caller may learn more from the other islands.
            self._failure = error

    def prepare(self, values: torch.Tensor, codec: Codec) -> None:
        if not self._expected:
            self.expect(values.numel(), codec)
        if self._failure:
            return
        self._prepared, self._expected = self._expected, deque()
        for chunk, part in zip(self._prepared, values.split(chunk_values(values.numel(), codec)), strict=False):
            assert chunk.size == part.numel(), f"{chunk.size} values were expected, not {part.numel()}"
            chunk.values = part
        try:
            if self._rate_limit.pace is None:  # with a rate limit, sending would block
                for chunk in self._prepared:
                    self._scatter(chunk)
        except ExchangeError as error:
            self._failure = error

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        if not self._peers:
            if observe:
                observe(values, values)
            return Traffic()
        self._check_rate(bytes_to_send(values.numel(), self.num_islands, codec))
        deadline = Deadline(self._timeout)
        pipeline: deque[Chunk] = deque()
        self._moved = Traffic()
        size = chunk_values(values.numel(), codec)
        num_slots = num_chunks_in_flight(size, codec)
        first_slot = len(self._expected)  # earlier slots belong to another average, whose data may arrive meanwhile
        try:
            if self._failure:
                raise self._failure
            parts = values.split(size)
            for number, part in enumerate(parts):
                if len(pipeline) == num_slots:
                    self._finish(pipeline.popleft(), weights, observe, deadline)
                known = self._prepared.popleft() if self._prepared else None
                chunk = known or self._expect(first_slot + number % num_slots, part.numel(), codec, len(parts) == 1)
                chunk.values = part
                pipeline.append(chunk)
                self._scatter(chunk)
                if len(pipeline) > num_slots // 2:
                    self._reduce(pipeline[-1 - num_slots // 2], weights, deadline)
            for chunk in pipeline:
                self._reduce(chunk, weights, deadline)
            while pipeline:
                self._finish(pipeline.popleft(), weights, observe, deadline)
        except ExchangeError as error:
            for chunk in pipeline:
                chunk.drop()
            raise self._give_up(error, deadline) from None
        self._check_damage()
        return self._moved

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        if self.island == source:
            self._check_rate(values.nbytes * len(self._peers))
        deadline, transfers = Deadline(self._timeout), Transfers()
        self._moved = Traffic()
        try:
            for chunk in values.split(CHUNK_VALUES) if values.numel() else ():
                tag = next(self._tags)
                if self.island == source:
                    for peer in self._peers:
                        self.links.send(chunk, peer, tag, transfers)
                else:
                    self.links.receive(chunk, source, tag, transfers)
            self._wait(transfers, deadline)
        except ExchangeError as error:
            transfers.drop()
            raise self._give_up(error, deadline) from None
        self._check_damage()
        return self._moved

    def send_message(self, message: bytes, notify: Callable[[], None]) -> bool:
        return self._messages.send(message, notify)

    def messages(self) -> dict[int, bytes]:
        return self._messages.heard()

    def find_broken(self) -> list[int]:
        return self.links.find_broken()

    def close(self) -> None:
        if self._prepared:
            self.links.wake()
        for chunk in (*self._prepared, *self._expected):
            chunk.drop()
        self._prepared.clear()
        self._expected.clear()
        self._messages.close()
        self.links.close()

    def _check_rate(self, num_bytes: int) -> None:
        """Closes, and raises, if the rate limit alone makes the exchange longer than its timeout."""
        try:
            self._rate_limit.check(
                num_bytes, "process sends in an exchange", self._timeout, "choose a payload of fewer bits"
            )
        except ExchangeError:
            self.close()
            raise

    # The stages of a chunk: scatter, reduce, finish.

    def _expect(self, slot: int, size: int, codec: Codec, is_only: bool) -> Chunk:
        """Starts receiving the pieces that the peers will send for a chunk, and its results if it is the only one.

        Called before anything is sent: a sender without a posted receive must ask first, which takes a whole round
        trip.
        """
        by_all = averaged_by_all(self.num_islands, codec)  # one trip instead of two
        pieces = [slice(0, size)] * self.num_islands if by_all else cut_into_pieces(size, self.num_islands, codec)
        chunk = Chunk(size, slot, codec, is_only, by_all, pieces, next(self._tags))
        try:
            self._receive_pieces(chunk)
            if not by_all:
                chunk.result_tag = next(self._tags)
                chunk.result = self._buffer("result", slot, codec.num_bytes(size))
                if is_only:
                    self._receive_results(chunk)
        except ExchangeError:
            chunk.drop()  # the error's traceback would keep the transfers alive, and they the sockets
            raise
        return chunk

    def _receive_pieces(self, chunk: Chunk) -> None:
        own_bytes = chunk.codec.num_bytes(length(chunk.pieces[self.island]))
        for peer in self._peers:
            chunk.received[peer] = self._buffer(f"from{peer}", chunk.slot, own_bytes)
            self.links.receive(chunk.received[peer], peer, chunk.tag, chunk.transfers, min_part=chunk.min_part)

    def _receive_results(self, chunk: Chunk) -> None:
        for peer in self._peers:
            self.links.receive(chunk.result_of(peer), peer, chunk.result_tag, chunk.results, min_part=chunk.min_part)

    def _scatter(self, chunk: Chunk) -> None:
        """Encodes the chunk and starts sending each piece to the island that averages it, unless that has begun."""
        if chunk.is_scattered:
            return
        chunk.is_scattered = True
        chunk.code = self._encode(chunk)
        for peer in self._peers:
            self.links.send(chunk.code_of(peer), peer, chunk.tag, chunk.transfers, min_part=chunk.min_part)

    def _reduce(self, chunk: Chunk, weights: Sequence[float], deadline: Deadline) -> None:
        """If each island owns a piece: averages this island's piece and starts sending it to all."""
        if chunk.is_averaged_by_all or chunk.is_reduced:
            return
        chunk.is_reduced = True
        if not chunk.is_only:  # earlier, results would come while pieces that all wait for are yet to be encoded
            self._receive_results(chunk)
        self._wait(chunk.transfers, deadline)
        own, codec = chunk.result_of(self.island), chunk.codec
        for where in blocks(length(chunk.pieces[self.island])):
            mean = self._mean(chunk, where, weights)
            codec.encode(mean, own[codec.locate(where.start, where.stop)])
        for peer in self._peers:
            self.links.send(own, peer, chunk.result_tag, chunk.results, min_part=chunk.min_part)

    def _finish(self, chunk: Chunk, weights: Sequence[float], observe: Observer | None, deadline: Deadline) -> None:
        """Replaces the chunk's values by the average, block by block."""
        self._wait(chunk.transfers if chunk.is_averaged_by_all else chunk.results, deadline)
        for where in blocks(chunk.size):
            values = chunk.values[where]
            if chunk.is_averaged_by_all:
                mean = self._mean(chunk, where, weights)
            else:
                mean = self._decode(chunk.result, where, "mean", chunk.codec)
            if observe:
                observe(values, mean)
            values.copy_(mean)

    def _wait(self, transfers: Transfers, deadline: Deadline) -> None:
        self._moved += self.links.wait(transfers, deadline, self._watch() if self._watch else None)
        self._damaged |= transfers.damaged

    def _check_damage(self) -> None:
        """Raises `DamagedTransferError` if data arrived damaged: only at the end, because peers wait for the rest."""
        if self._damaged:
            damaged, self._damaged = self._damaged, set()
            raise DamagedTransferError(damaged, self.links.is_sealed)

    def _mean(self, chunk: Chunk, where: slice, weights: Sequence[float]) -> torch.Tensor:
        """Averages a block of the piece that this island owns; does not change its own values."""
        own = chunk.code_of(self.island)
        parts = [
            self._decode(chunk.received.get(island, own), where, f"part{island}", chunk.codec)
            for island in range(self.num_islands)
        ]
        return weighted_mean(parts, weights, keep=self.island)

    def _encode(self, chunk: Chunk) -> torch.Tensor:
        codec = chunk.codec
        if codec.is_exact:
            return chunk.values.view(torch.uint8)
        code = self._buffer("code", chunk.slot, codec.num_bytes(chunk.size))
        codec.encode(chunk.values, code)
        return code

    def _decode(self, code: torch.Tensor, where: slice, buffer: str, codec: Codec) -> torch.Tensor:
        """Decodes the values `where` of `code`; a view, without a copy, if the codec is exact."""
        code = code[codec.locate(where.start, where.stop)]
        if codec.is_exact:
            return code.view(torch.float32)
        values = self._buffer(buffer, 0, 4 * length(where)).view(torch.float32)
        codec.decode(code, values)
        return values

    def _give_up(self, error: ExchangeError, deadline: Deadline) -> ExchangeError:
        """Closes, and returns the error that names the island that was lost first."""
        if isinstance(error, IslandLostError):
            (peer,) = error.islands
            first = self._notes.find_first(peer, timed_out=deadline.is_over)
            if first != peer and first in self._peers:  # a note may hold any number
                error = self.links.lost(first, f"as {self.links.parties.name(peer)} found")
        self.close()
        return error

    # Buffers, sockets.

    def _buffer(self, name: str, slot: int, num_bytes: int) -> torch.Tensor:
        """Returns a buffer that lives as long as the exchange: fresh memory costs eight times as much."""
        key = f"{name}/{slot}"
        known = self._buffers.get(key)
        if known is None or known.numel() < num_bytes:
            known = self._buffers[key] = torch.empty(num_bytes, dtype=torch.uint8)
        return known[:num_bytes]


@dataclass
class Chunk:
    """The transfers of one chunk of the values.

    Attributes:
        slot: index of its buffers.
        is_only: the exchange has no other chunk, so that round trips cost more time than calls.
        is_averaged_by_all: every island averages the whole chunk, instead of a piece.
        pieces: the piece that each island averages.
        values: the chunk's values; empty while the chunk is only expected.
    """

    size: int
    slot: int
    codec: Codec
    is_only: bool
    is_averaged_by_all: bool
    pieces: list[slice]
    tag: int
    values: torch.Tensor = field(default_factory=torch.Tensor)
    result_tag: int = 0
    code: torch.Tensor = field(default_factory=torch.Tensor)
    result: torch.Tensor = field(default_factory=torch.Tensor)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    is_scattered: bool = False
    is_reduced: bool = False
    transfers: Transfers = field(default_factory=Transfers)
    results: Transfers = field(default_factory=Transfers)

    @property
    def min_part(self) -> int:
        """Bytes; see `Connections.spread`."""
        return MIN_LONE_PART_BYTES if self.is_only else MIN_PART_BYTES

    def drop(self) -> None:
        """Drops all transfers."""
        self.transfers.drop()
        self.results.drop()

    def result_of(self, island: int) -> torch.Tensor:
        """Returns the code of the averaged piece that `island` owns."""
        piece = self.pieces[island]
        return self.result[self.codec.locate(piece.start, piece.stop)]

    def code_of(self, island: int) -> torch.Tensor:
        """Returns the code of the piece that `island` averages."""
        piece = self.pieces[island]
        return self.code[self.codec.locate(piece.start, piece.stop)]


def chunk_values(size: int, codec: Codec) -> int:
    """Returns the values per chunk when `size` values are cut: at least as many chunks as are in flight at a time, if
    there are enough values."""
    fewer_bytes = 4 * codec.block_values // codec.block_bytes
    return CHUNK_VALUES * max(1, min(MAX_CHUNK, fewer_bytes, size // (MIN_CHUNKS_IN_FLIGHT * CHUNK_VALUES)))


def first_chunks(size: int, codec: Codec) -> list[int]:
    """Returns the sizes of the chunks that are in flight first when `size` values are cut."""
    most = chunk_values(size, codec)
    sizes = [min(most, size - start) for start in range(0, max(1, size), most)]
    return sizes[: num_chunks_in_flight(most, codec)]


def num_chunks_in_flight(chunk_values: int, codec: Codec) -> int:
    """Returns how many chunks of this size are in flight at a time."""
    wanted = BYTES_IN_FLIGHT // codec.num_bytes(chunk_values)
    return max(MIN_CHUNKS_IN_FLIGHT, min(MAX_CHUNKS_IN_FLIGHT, wanted))


def blocks(size: int) -> list[slice]:
    """Returns the slices of the blocks that arithmetic handles at a time."""
    return [slice(start, min(start + BLOCK_VALUES, size)) for start in range(0, size, BLOCK_VALUES)]


def length(where: slice) -> int:
    """Returns the number of values in a slice."""
    return int(where.stop - where.start)
