"""Objects of values in a store: their announcements, and their blocks, which a few threads download ahead and check,
and which are returned in the order of their values.

Announcements come from other islands: nothing is allocated or downloaded because of one that is inconsistent.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.errors import PayloadError
from hf_diloco.sealing.stored import BLOCK_OVERHEAD, BlockSeal
from hf_diloco.store.failures import TruncatedError
from hf_diloco.store.long_poll import Path
from hf_diloco.store.objects import ObjectStore

MAX_VALUES = 1 << 48
MAX_BLOCK_VALUES = 1 << 24
"""Maximum number of values in a block: 64 MiB of fp32, of which a reader holds a few."""
MAX_BLOCKS = 1 << 20

_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ObjectInfo(BaseModel):
    """One object: the code of a contiguous range of the canonical index space, in blocks that are checked separately.

    Block k holds the values from `start + k * block_values` on; the last one may be shorter. An object of no values
    has no blocks and need not exist.

    Attributes:
        format: version of the wire format (docs/codecs.md).
        codec: name of the number format.
        start: canonical index of the first value; a block of the codec begins there.
        length: values.
        num_bytes: size of the object.
        digests: SHA-256 of each block's bytes as stored, in hexadecimal.
        is_sealed: each block is encrypted, and so a little longer; see `sealing.stored`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    path: Path
    codec: str = Field(max_length=32)
    start: int = Field(ge=0, le=MAX_VALUES)
    length: int = Field(ge=0, le=MAX_VALUES)
    num_bytes: int = Field(ge=0, le=4 * MAX_VALUES)
    block_values: int = Field(ge=1, le=MAX_BLOCK_VALUES)
    digests: list[_Digest] = Field(max_length=MAX_BLOCKS)
    is_sealed: bool = False

    @field_validator("codec")
    @classmethod
    def _check_codec(cls, name: str) -> str:
        if name not in CODECS:
            raise ValueError(f"{name!r} is none of {', '.join(CODECS)}")
        return name

    @model_validator(mode="after")
    def _check_sizes(self) -> ObjectInfo:
        block_values = CODECS[self.codec].block_values
        if self.start % block_values or self.block_values % block_values:
            raise ValueError(
                f"start {self.start} and block_values {self.block_values} must be multiples of {self.codec}'s blocks "
                f"of {block_values} values"
            )
        num_blocks = -(-self.length // self.block_values)
        num_bytes = self.offset(num_blocks)
        if self.num_bytes != num_bytes:
            raise ValueError(f"{self.length} values of {self.codec} take {num_bytes} bytes, not {self.num_bytes}")
        if len(self.digests) != num_blocks:
            raise ValueError(
                f"{self.length} values in blocks of {self.block_values} have {num_blocks} digests, "
                f"not {len(self.digests)}"
            )
        return self

    @property
    def end(self) -> int:
        """Canonical index after the last value."""
        return self.start + self.length

    def offset(self, number: int) -> int:
        """Returns the byte at which a block begins; for the number after the last, the size of the object."""
        num_values = min(number * self.block_values, self.length)
        return CODECS[self.codec].num_bytes(num_values) + self.is_sealed * number * BLOCK_OVERHEAD


def read_info(record: object) -> ObjectInfo:
    """Validates the parsed JSON of an `ObjectInfo` that another island wrote; raises `PayloadError` if it is wrong."""
    try:
        return ObjectInfo.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(key) for key in first["loc"])[:80]
        path = record.get("path") if isinstance(record, dict) else record
        raise PayloadError(
            f"the announcement of the object {repr(path)[:200]} is invalid "
            f"({f'{where!r}: ' if where else ''}{first['msg'][:200]}): leave its island out of the round, and see "
            "that it runs the same version of hf_diloco",
            path if isinstance(path, str) else "",
        ) from None


def find_cover(objects: Sequence[ObjectInfo], start: int, length: int, codec: Codec) -> list[ObjectInfo]:
    """Returns one participant's objects that hold part of `length` values from `start` on, in canonical order.

    Raises `PayloadError` if the objects overlap, leave a gap or do not cover the range, or one has another codec.
    """
    filled = sorted((info for info in objects if info.length), key=lambda info: info.start)
    for info in filled:
        if info.codec != codec.name:
            raise PayloadError(
                f"the object {info.path!r} is in {info.codec}, not {codec.name}: give all islands the same payload",
                info.path,
            )
    for before, after in pairwise(filled):
        if before.end != after.start:
            problem = "overlap" if after.start < before.end else "leave a gap"
            raise PayloadError(
                f"the objects {before.path!r} and {after.path!r} {problem}: the one ends at value {before.end}, the "
                f"other begins at {after.start}; leave their island out of the round",
                before.path,
            )
    cover = [info for info in filled if info.start < start + length and start < info.end]
    if length and not (cover and cover[0].start <= start and start + length <= cover[-1].end):
        held = (
            f"{filled[0].path!r} to {filled[-1].path!r}, {filled[0].start} to {filled[-1].end}" if filled else "none"
        )
        raise PayloadError(
            f"a participant's objects do not hold the values {start} to {start + length} (they are: {held}): leave "
            "it out of the round, and see that all islands train the same model",
            next((info.path for info in filled or objects), ""),
        )
    return cover


@dataclass(frozen=True)
class Block:
    """Block `number` of a participant's object, of which a reader needs the values from `low` to `high`
    (canonical)."""

    participant: int
    info: ObjectInfo
    number: int
    low: int
    high: int

    def locate(self) -> tuple[int, int]:
        """Returns the block's byte range in its object: first byte, and the one after the last."""
        return self.info.offset(self.number), self.info.offset(self.number + 1)

    @property
    def num_skipped_bytes(self) -> int:
        """Bytes of the block before the first value needed."""
        return CODECS[self.info.codec].num_bytes(self.low - self.info.start - self.number * self.info.block_values)

    @property
    def num_needed_bytes(self) -> int:
        """Bytes of the values needed."""
        return CODECS[self.info.codec].num_bytes(self.high - self.low)


def iter_blocks(cover: Sequence[ObjectInfo], start: int, length: int, participant: int) -> Iterator[Block]:
    """Yields the blocks of a `find_cover` that hold `length` values from `start` on, each once, in canonical order."""
    for info in cover:
        low, high = max(start, info.start), min(start + length, info.end)
        while low < high:
            number = (low - info.start) // info.block_values
            end = min(high, info.start + (number + 1) * info.block_values)
            yield Block(participant, info, number, low, end)
            low = end


@dataclass(frozen=True)
class LoadedBlock:
    """A block whose digest matched; `buffer` begins with the bytes that are needed."""

    block: Block
    buffer: torch.Tensor

    def view(self, low: int, high: int, codec: Codec) -> torch.Tensor:
        """Returns the code of the values from `low` to `high`."""
        return self.buffer[codec.locate(low - self.block.low, high - self.block.low)]


class BlockReader:
    """Reads several participants' blocks ahead, in the order of their values, on a few threads.

    The caller waits only for the blocks that hold the next value, one per participant. One buffer for each participant
    and one per thread keep all threads busy, and ensure that these blocks have buffers, each of `buffer_bytes`.

    `covers` has for each participant the result of `find_cover` for the same range, empty to read nothing from it;
    `seal` opens encrypted blocks. `bytes_received` is the total size of the blocks returned so far.
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
        sizes = (
            CODECS[info.codec].num_bytes(min(info.block_values, info.length, length))
            for info in chain.from_iterable(covers)
        )
        self.buffer_bytes = max(sizes, default=0)
        self._num_free = len(covers) + num_threads  # buffers that may still be allocated
        self._free: list[torch.Tensor] = []
        self._under_way: deque[tuple[Block, Future[LoadedBlock]]] = deque()
        self._held: dict[int, LoadedBlock] = {}
        self._pool = ThreadPoolExecutor(num_threads, "hf-diloco-read")
        self.bytes_received = 0

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # also waits, so that no thread outlives the call

    def advance(self, position: int) -> dict[int, LoadedBlock]:
        """Frees the blocks that end at `position` and waits for those that begin there.

        Returns for each participant the block that holds the value `position`, which the caller may overwrite. Raises
        `PayloadError` if a block's digest is wrong, or it was cut short; names the object.
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
        """Reads a whole block, checks it, and copies the bytes needed, because a store may return its own memory."""
        first, last = block.locate()
        path = block.info.path
        try:
            data = np.frombuffer(self._store.get_range(path, first, last), np.uint8)
        except TruncatedError as error:
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
                f"the object {path!r} cannot be decrypted: it was not encrypted by this run for this place, or this "
                "island has no encrypt_store. Give all islands one key and the same encrypt_store",
                path,
            )
        return plain


def digest_of(data: memoryview) -> str:
    """Returns the digest of a block's bytes: SHA-256, in hexadecimal."""
    # hashlib's fastest cryptographic digest on processors with SHA instructions: twice as fast as BLAKE2b and SHA-512.
    return hashlib.sha256(data).hexdigest()
