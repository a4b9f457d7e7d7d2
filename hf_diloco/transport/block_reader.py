"""Blocks of objects, downloaded ahead by a few threads, checked, and handed over in the order of their values."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import PayloadError
from hf_diloco.sealing.blocks import BlockSeal
from hf_diloco.store.objects import CutShortError, ObjectStore
from hf_diloco.transport.object_info import Block, ObjectInfo, iter_blocks


@dataclass(frozen=True)
class LoadedBlock:
    """A block whose digest was right; `buffer` begins with the bytes that are needed."""

    block: Block
    buffer: torch.Tensor

    def view(self, low: int, high: int, codec: Codec) -> torch.Tensor:
        """The code of the values from `low` to `high`."""
        return self.buffer[codec.locate(low - self.block.low, high - self.block.low)]


class BlockReader:
    """Reads several participants' blocks ahead, in the order of their values, on a few threads.

    In that order, `participants` blocks hold any one value, and those are all that the caller waits for: as many
    buffers and one a thread are enough to keep all threads busy, and the caller from waiting for what cannot begin.

    Args:
        store: where the objects lie.
        covers: for each participant what `find_cover` returned for the same range; empty if nothing is read of it.
        start: canonical index of the first value needed.
        length: values needed.
        num_threads: range reads at a time.
        seal: opens what is encrypted; None without a key.

    Attributes:
        bytes_received: what the blocks handed over so far took, whole.
        buffer_bytes: of one buffer: room for any block that is needed.
    """

    def __init__(
        self,
        store: ObjectStore,
        covers: Sequence[Sequence[ObjectInfo]],
        start: int,
        length: int,
        num_threads: int,
        seal: BlockSeal | None = None,
    ) -> None:
        self._store = store
        self._seal = seal
        streams = [iter_blocks(cover, start, length, participant) for participant, cover in enumerate(covers)]
        self._coming: Iterator[Block] = heapq.merge(*streams, key=lambda block: block.low)
        self.buffer_bytes = max(
            (
                CODECS[info.codec].num_bytes(min(info.block_values, info.length, length))
                for cover in covers
                for info in cover
            ),
            default=0,
        )
        self._num_free = len(covers) + num_threads  # buffers that may still be made
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[Block, Future[LoadedBlock]]] = deque()
        self._held: dict[int, LoadedBlock] = {}
        self._pool = ThreadPoolExecutor(num_threads, "hf-diloco-read")
        self.bytes_received = 0

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # and waits, so that no thread outlives the call

    def advance(self, position: int) -> dict[int, LoadedBlock]:
        """Lets go of the blocks that end at `position` and waits for those that begin there.

        Returns:
            For each participant the block that holds the value `position`. The caller may overwrite it.

        Raises:
            PayloadError: a block's digest is wrong, or it was cut short; names the object.
            StoreError: the store did not answer, or the object is absent.
        """
        for participant, loaded in list(self._held.items()):
            if loaded.block.high == position:
                self._free.append(self._held.pop(participant).buffer)
        self._read_ahead()
        while self._under_way and self._under_way[0][0].low == position:
            block, future = self._under_way.popleft()
            self._held[block.participant] = future.result()
            first, last = block.locate()
            self.bytes_received += last - first
        return self._held

    def _read_ahead(self) -> None:
        while self._free or self._num_free:
            block = next(self._coming, None)
            if block is None:
                return
            if self._free:
                buffer = self._free.pop()
            else:
                self._num_free -= 1
                buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8)
            self._under_way.append((block, self._pool.submit(self._load, block, buffer)))

    def _load(self, block: Block, buffer: torch.Tensor) -> LoadedBlock:
        """Reads the whole block, checks it, and copies what is needed: what a store returns may be its own memory."""
        first, last = block.locate()
        path = block.info.path
        try:
            data = np.frombuffer(self._store.get_ranges(path, [first], [last])[0], np.uint8)
        except CutShortError as error:
            raise PayloadError(str(error), path) from None
        if digest_of(data.data) != block.info.digests[block.number]:
            raise PayloadError(
                f"the object {path!r} is not what its island announced: the digest of bytes {first} to "
                f"{last} differs, so it was damaged or overwritten; leave its island out of the round",
                path,
            )
        if block.info.is_sealed:
            data = np.frombuffer(self._decrypt(block, data.data), np.uint8)
        skipped, size = block.num_skipped_bytes, block.num_needed_bytes
        buffer.numpy()[:size] = data[skipped : skipped + size]
        return LoadedBlock(block, buffer)

    def _decrypt(self, block: Block, data: memoryview) -> bytes:
        path = block.info.path
        plain = self._seal.open(path, block.number, data) if self._seal else None
        if plain is None:
            raise PayloadError(
                f"the object {path!r} is encrypted, and not by this run for this place, or this island has no "
                "encrypt_store: give all islands one key and the same encrypt_store",
                path,
            )
        return plain


def digest_of(data: memoryview) -> str:
    """The digest by which a block's bytes are known: SHA-256, in hexadecimal."""
    # Of hashlib's that nobody can forge, the fastest on processors with SHA instructions: twice BLAKE2b and SHA-512.
    return hashlib.sha256(data).hexdigest()
