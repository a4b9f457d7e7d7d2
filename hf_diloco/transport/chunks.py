"""How a mesh cuts values: chunks, of which several are in flight at a time, and what is in flight for one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_diloco.codecs import Codec
from hf_diloco.transport.base import BLOCK_VALUES, Traffic, averaged_by_all
from hf_diloco.transport.transfers import Transfers

CHUNK_VALUES = 1 << 20
"""Values a chunk: 4 MiB of fp32. Below 1 MiB round trips count, above 16 MiB caches and the pipeline's ends do."""

MAX_CHUNK = 4
"""So many times as many values are in a chunk if they take as many times fewer bytes: each costs calls, too."""

MIN_CHUNKS_IN_FLIGHT, MAX_CHUNKS_IN_FLIGHT = 8, 32
BYTES_IN_FLIGHT = 32 << 20
"""What fills a link of 1 Gbit/s and 0.1 s well. Chunks of few bytes are more in number, up to where each is so small
that its arithmetic takes longer than its way."""


@dataclass
class Chunk:
    """What is in flight for one chunk of the values.

    Attributes:
        size: how many values.
        slot: which of the buffers it has.
        values: themselves; none while it is only expected.
    """

    size: int
    slot: int
    is_averaged_by_all: bool
    values: torch.Tensor = field(default_factory=torch.Tensor)
    tag: int = 0
    result_tag: int = 0
    code: torch.Tensor = field(default_factory=torch.Tensor)
    result: torch.Tensor = field(default_factory=torch.Tensor)
    pieces: list[slice] = field(default_factory=list)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    is_scattered: bool = False
    is_reduced: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    transfers: Transfers = field(default_factory=Transfers)
    results: Transfers = field(default_factory=Transfers)

    def drop(self) -> None:
        """Lets go of all transfers."""
        self.transfers.drop()
        self.results.drop()

    def result_of(self, island: int, codec: Codec) -> torch.Tensor:
        """The code of the average of the piece that `island` averages."""
        piece = self.pieces[island]
        return self.result[codec.locate(piece.start, piece.stop)]

    def code_of(self, island: int, codec: Codec) -> torch.Tensor:
        """The code of the piece that `island` averages."""
        piece = self.pieces[island]
        return self.code[codec.locate(piece.start, piece.stop)]


def chunk_values(size: int, codec: Codec) -> int:
    """Values a chunk, of `size`: at least as many chunks as are in flight at a time, if there are so many values."""
    fewer_bytes = 4 * codec.block_values // codec.block_bytes
    return CHUNK_VALUES * max(1, min(MAX_CHUNK, fewer_bytes, size // (MIN_CHUNKS_IN_FLIGHT * CHUNK_VALUES)))


def first_chunks(size: int, codec: Codec) -> list[int]:
    """Values of each of the chunks that are in flight first, of `size`."""
    most = chunk_values(size, codec)
    sizes = [min(most, size - start) for start in range(0, max(1, size), most)]
    return sizes[: num_chunks_in_flight(most, codec)]


def cut(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All values, a chunk of fp32 at a time (no copies)."""
    return values.split(CHUNK_VALUES) if values.numel() else ()


def num_chunks_in_flight(chunk_values: int, codec: Codec) -> int:
    """Chunks of so many values that are in flight at a time."""
    wanted = BYTES_IN_FLIGHT // codec.num_bytes(chunk_values)
    return max(MIN_CHUNKS_IN_FLIGHT, min(MAX_CHUNKS_IN_FLIGHT, wanted))


def bytes_to_send(size: int, num_islands: int, codec: Codec) -> int:
    """Of an average, give or take how pieces are rounded."""
    num_bytes = (num_islands - 1) * codec.num_bytes(size)
    return num_bytes if averaged_by_all(num_islands, codec) else 2 * num_bytes // num_islands


def blocks(size: int) -> list[slice]:
    """Cuts so many values into what is handled at a time."""
    return [slice(start, min(start + BLOCK_VALUES, size)) for start in range(0, size, BLOCK_VALUES)]


def length(where: slice) -> int:
    """Values in a part of a vector."""
    return int(where.stop - where.start)
