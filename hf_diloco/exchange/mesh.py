"""Direct connections between islands: a Gloo group outside the default world, point to point, in chunks.

Two islands send each other their chunks and both average. More than two cut each chunk into one piece an island:
every piece goes to its owner, which averages and sends the result to all, so that an island sends and receives
2 (n-1)/n of its payload, as a ring all-reduce would. Several chunks are in flight at once: one transfer hides the
round trip and the arithmetic of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import Store

from hf_diloco.codecs import Codec
from hf_diloco.errors import DiLoCoError, ExchangeError, IslandLostError
from hf_diloco.exchange import handshake
from hf_diloco.exchange.base import BLOCK_VALUES, Exchange, Observer, Traffic, weighted_mean
from hf_diloco.exchange.connections import Connections, Deadline, Transfers, lost
from hf_diloco.exchange.losses import LossNotes

CHUNK_VALUES = 1 << 20
"""Values a chunk: 4 MiB of fp32. Below 1 MiB round trips count, above 16 MiB caches and the pipeline's ends do."""

CHUNKS_IN_FLIGHT = 8


class MeshExchange(Exchange):
    """The owners of one lane, joined by sockets on `address`.

    Args:
        store: where the owners find each other's ports; reachable from all islands.
        name: the lane's name, unique in the run.
        island: this island's number.
        num_islands: islands in the run.
        address: local address to listen on, as the other islands see it.
        timeout: seconds that connecting, and later each whole exchange, may take.
        key: of the run; with one, the others prove that they hold it before anything is exchanged.
        notes: where islands note whom they lost; default: notes of the lane's own.

    Raises:
        IslandLostError: the others did not connect in time.
        ForgedError: another one does not hold the key.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        island: int,
        num_islands: int,
        address: str,
        timeout: float,
        key: bytes = b"",
        notes: LossNotes | None = None,
    ) -> None:
        self.island = island
        self.num_islands = num_islands
        self._timeout = timeout
        self._peers = [peer for peer in range(num_islands) if peer != island]
        self._tag = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._notes = notes or LossNotes(store, name, island)
        self._links = Connections(store, name, island, num_islands, address, timeout)
        if key and self._peers:
            self._tag = handshake.NUM_TAGS
            self._authenticate(name, key)

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        if not self._peers:
            if observe:
                observe(values, values)
            return Traffic()
        deadline = Deadline(self._timeout)
        pipeline: deque[_Chunk] = deque()
        traffic = Traffic()
        halfway = CHUNKS_IN_FLIGHT // 2
        try:
            for number, start in enumerate(range(0, values.numel(), CHUNK_VALUES)):
                if len(pipeline) == CHUNKS_IN_FLIGHT:
                    traffic += self._finish(pipeline.popleft(), weights, codec, observe, deadline)
                chunk = _Chunk(values[start : start + CHUNK_VALUES], number % CHUNKS_IN_FLIGHT)
                pipeline.append(chunk)
                self._scatter(chunk, codec)
                if len(pipeline) > halfway:
                    self._reduce(pipeline[-1 - halfway], weights, codec, deadline)
            for chunk in pipeline:
                self._reduce(chunk, weights, codec, deadline)
            while pipeline:
                traffic += self._finish(pipeline.popleft(), weights, codec, observe, deadline)
        except ExchangeError as error:
            for chunk in pipeline:
                chunk.transfers.drop()
            raise self._give_up(error, deadline) from None
        return traffic

    def broadcast(self, values: torch.Tensor, source: int) -> Traffic:
        deadline = Deadline(self._timeout)
        transfers = Transfers()
        try:
            for start in range(0, values.numel(), CHUNK_VALUES):
                chunk = values[start : start + CHUNK_VALUES]
                tag = self._next_tag()
                if self.island == source:
                    for peer in self._peers:
                        self._links.send(chunk, peer, tag, transfers)
                else:
                    self._links.receive(chunk, source, tag, transfers)
            return self._links.wait(transfers, deadline)
        except ExchangeError as error:
            transfers.drop()
            raise self._give_up(error, deadline) from None

    def find_broken(self) -> list[int]:
        return self._links.find_broken()

    def close(self) -> None:
        self._links.close()

    def _authenticate(self, name: str, key: bytes) -> None:
        try:
            handshake.authenticate(self._links, name, self.island, self._peers, key, self._timeout)
        except DiLoCoError:
            self.close()
            raise

    # One chunk's way: scatter, reduce, finish.

    def _scatter(self, chunk: _Chunk, codec: Codec) -> None:
        """Encodes the chunk and starts sending each piece to the island that averages it."""
        values = chunk.values
        code = codec.encode(values, self._buffer("code", chunk.slot, values.numel(), codec.wire_dtype))
        tag = self._next_tag()
        if self.num_islands == 2:  # both average the whole chunk: one trip instead of two, the same bytes
            chunk.pieces = [code, code]
        else:
            chunk.pieces = list(code.tensor_split(self.num_islands))
        own_size = chunk.pieces[self.island].numel()
        for peer in self._peers:
            received = self._buffer(f"from{peer}", chunk.slot, own_size, codec.wire_dtype)
            chunk.received[peer] = received
            self._links.send(chunk.pieces[peer], peer, tag, chunk.transfers)
            self._links.receive(received, peer, tag, chunk.transfers)

    def _reduce(self, chunk: _Chunk, weights: Sequence[float], codec: Codec, deadline: Deadline) -> None:
        """With more than two islands: averages the piece that this island owns and starts handing it to all."""
        if self.num_islands == 2 or chunk.is_reduced:
            return
        chunk.is_reduced = True
        chunk.traffic = self._links.wait(chunk.transfers, deadline)
        size = chunk.pieces[self.island].numel()
        encoded = self._buffer("mean", chunk.slot, size, codec.wire_dtype)
        for where in _blocks(size):
            mean = self._mean(chunk, where, weights, codec)
            code = codec.encode(mean, encoded[where])
            if code is mean:
                encoded[where].copy_(mean)
        result = self._buffer("result", chunk.slot, chunk.values.numel(), codec.wire_dtype)
        results = result.tensor_split(self.num_islands)
        results[self.island].copy_(encoded)
        tag = self._next_tag()
        for peer in self._peers:
            self._links.send(encoded, peer, tag, chunk.transfers)
            self._links.receive(results[peer], peer, tag, chunk.transfers)

    def _finish(
        self, chunk: _Chunk, weights: Sequence[float], codec: Codec, observe: Observer | None, deadline: Deadline
    ) -> Traffic:
        """Puts the average in place of the chunk's values, block by block."""
        traffic = chunk.traffic + self._links.wait(chunk.transfers, deadline)
        for where in _blocks(chunk.values.numel()):
            values = chunk.values[where]
            if self.num_islands == 2:
                mean = self._mean(chunk, where, weights, codec)
            else:
                result = self._buffer("result", chunk.slot, chunk.values.numel(), codec.wire_dtype)
                mean = codec.decode(result[where], self._buffer("block", 0, values.numel(), torch.float32))
            if observe:
                observe(values, mean)
            values.copy_(mean)
        return traffic

    def _mean(self, chunk: _Chunk, where: slice, weights: Sequence[float], codec: Codec) -> torch.Tensor:
        """Averages a block of the piece that this island owns; leaves its own values as they are."""
        parts = []
        for island in range(self.num_islands):
            code = chunk.received.get(island, chunk.pieces[self.island])[where]
            parts.append(codec.decode(code, self._buffer(f"block{island}", 0, code.numel(), torch.float32)))
        return weighted_mean(parts, weights, keep=self.island)

    def _give_up(self, error: ExchangeError, deadline: Deadline) -> ExchangeError:
        """Closes, and returns the error that names the island with which it began."""
        if isinstance(error, IslandLostError):
            (peer,) = error.islands
            first = self._notes.find_first(peer, timed_out=deadline.is_over)
            if first != peer:
                error = lost(first, f"as island {peer} found")
        self.close()
        return error

    # Buffers, sockets.

    def _buffer(self, name: str, slot: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that lives as long as the exchange: fresh memory costs eight times what used memory does."""
        key = f"{name}/{slot}/{dtype}"
        known = self._buffers.get(key)
        if known is None or known.numel() < size:
            known = self._buffers[key] = torch.empty(size, dtype=dtype)
        return known[:size]

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag


@dataclass
class _Chunk:
    """What is in flight for one chunk of the values."""

    values: torch.Tensor
    slot: int
    pieces: list[torch.Tensor] = field(default_factory=list)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    is_reduced: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    transfers: Transfers = field(default_factory=Transfers)


def _blocks(size: int) -> list[slice]:
    return [slice(start, min(start + BLOCK_VALUES, size)) for start in range(0, size, BLOCK_VALUES)]
