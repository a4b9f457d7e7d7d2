"""Exchange through an object store: each island publishes its values as objects, and every island averages them all.

There are no connections between islands. A rank owns one contiguous range of the canonical index space and writes it
as one object; a reader fetches from all participants' objects only the blocks that overlap its own range, whatever the
number of ranks that wrote them. So an island can average at any later time, and without the others being there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.sealing.stored import BLOCK_OVERHEAD, BlockSeal
from hf_diloco.store.backends import PART_BYTES
from hf_diloco.store.objects import ObjectStore
from hf_diloco.transport.base import BLOCK_VALUES, Observer, RateLimit, Traffic, weighted_mean
from hf_diloco.transport.objects import MAX_BLOCK_VALUES, BlockReader, LoadedBlock, ObjectInfo, digest_of, find_cover

OBJECT_BLOCK_VALUES = 1 << 20
"""Values in a block of an object, the smallest unit that can be read and checked by itself: 4 MiB of fp32, large
enough to outweigh a request's round trip, and small enough to waste little at the two ends of a range."""

MAX_DIGESTS = 1 << 14
"""Limit of blocks in an island's objects together: its offer, a record of limited size, holds a digest of each.
Blocks of larger models are larger, up to `MAX_BLOCK_VALUES`."""


class BucketExchange:
    """One rank's end of the object store.

    The mean has the same bits on all islands, for any number of ranks of the writers and of the reader. It has the
    bits of `MemoryExchange` and `MeshExchange` for two islands, and for any number of them in fp32. With more than
    two, those send the mean and encode it once more; here it does not travel and stays exact. Even a single
    participant's values are decoded from its object, because islands that catch up later have no others.

    Reading takes `participants + num_transfers` blocks of memory, and `num_transfers` more that just arrived, whatever
    the size of the model. Publishing takes no memory for fp32 and one code of the whole range otherwise, plus one
    ciphertext of it if objects are encrypted; both are freed at once.

    A codec's blocks are counted from the canonical index 0: objects and ranges begin at such a block.

    Args:
        start: canonical index of the first value of this rank's range; a multiple of the codecs' `block_values`.
        length: values in the range; may be 0.
        total: values in the ranges of all of the island's ranks; default: `length`.
        num_transfers: range reads, or digests, at a time.
        rate_limit: for all that is published; default: none.
        seal: encrypts published objects, and opens those that are read; default: no encryption.
    """

    def __init__(
        self,
        store: ObjectStore,
        start: int,
        length: int,
        num_transfers: int = 4,
        rate_limit: RateLimit | None = None,
        seal: BlockSeal | None = None,
        total: int | None = None,
    ) -> None:
        if start < 0 or length < 0 or num_transfers < 1:
            raise ValueError(f"start {start} and length {length} must be >= 0, num_transfers {num_transfers} >= 1")
        self._store = store
        self._num_transfers = num_transfers
        self._seal = seal
        # Without a pace a small object takes one request, and not three.
        self._pace = rate_limit.pace if rate_limit else None
        self.start = start
        self.length = length
        self.total = length if total is None else total

    @property
    def end(self) -> int:
        """Canonical index after the last value of this rank's range."""
        return self.start + self.length

    @property
    def block_values(self) -> int:
        """Values in a block of the objects that this rank writes."""
        size = OBJECT_BLOCK_VALUES
        while self.total > MAX_DIGESTS * size and size < MAX_BLOCK_VALUES:
            size *= 2
        return size

    def publish(self, values: torch.Tensor, path: str, codec: Codec) -> tuple[ObjectInfo, Traffic]:
        """Writes `values` (fp32, host, contiguous, `length`; unchanged) as the object `path`, unless there are
        none."""
        self._check(values, codec)
        num_bytes, block_values = codec.num_bytes(self.length), self.block_values
        code = values.view(torch.uint8) if codec.is_exact else torch.empty(num_bytes, dtype=torch.uint8)
        if self._seal:
            num_bytes += -(-self.length // block_values) * BLOCK_OVERHEAD
        stored = torch.empty(num_bytes, dtype=torch.uint8) if self._seal else code
        with ThreadPoolExecutor(self._num_transfers, "hf-diloco-publish") as pool:
            digests = []
            for number, low in enumerate(range(0, self.length, block_values)):
                block = values[low : low + block_values]
                place = codec.locate(low, low + block.numel())
                part = code[place]
                if not codec.is_exact:
                    codec.encode(block, part)
                if self._seal:
                    first = place.start + number * BLOCK_OVERHEAD
                    sealed = stored[first : first + part.numel() + BLOCK_OVERHEAD].numpy().data
                    digests.append(pool.submit(_seal, self._seal, path, number, part.numpy().data, sealed))
                else:
                    digests.append(pool.submit(digest_of, part.numpy().data))
            if self._seal:
                wait(digests)
            if self.length:  # overlaps with the digests, unless blocks are encrypted first
                data = stored.numpy().data
                # A memory:// store would keep the caller's buffer as the object.
                self._store.put(path, bytes(data) if len(data) <= PART_BYTES else data, self._pace)
            info = ObjectInfo(
                path=path,
                codec=codec.name,
                start=self.start,
                length=self.length,
                num_bytes=num_bytes,
                block_values=block_values,
                digests=[digest.result() for digest in digests],
                is_sealed=self._seal is not None,
            )
        return info, Traffic(bytes_sent=info.num_bytes)

    def average(
        self,
        parts: Sequence[Sequence[ObjectInfo]],
        weights: Sequence[float],
        codec: Codec,
        out: torch.Tensor,
        observe: Observer | None = None,
        own: int | None = None,
        own_values: torch.Tensor | None = None,
    ) -> Traffic:
        """Writes the weighted mean over the participants, in their order, to `out`.

        Checks all announcements first, then each block's digest before the block is used.

        Args:
            parts: each participant's objects, in any cut and order; those that do not overlap this rank's range are
                not read.
            weights: one positive weight per participant.
            out: fp32, host, contiguous, `length` values; undefined after an error.
            observe: see `Observer`. It gets this island's own values: `own_values` if given, else the values of its
                objects, else, for an island that takes no part, zeros.
            own: this island's index among the participants, if it takes part.
            own_values: the exact values that `own` published of this rank's range, which saves reading them; may be
                `out`. They pass through the codec as well, so that all islands get the same mean.

        Raises:
            PayloadError: an object does not fit its announcement, the others, or this rank's range; names it.
            StoreError: the store did not answer, or an object is absent.
        """
        self._check(out, codec)
        if not parts or len(parts) != len(weights) or min(weights) <= 0:
            raise ValueError(f"{len(parts)} participants need as many positive weights, not {list(weights)}")
        if own_values is not None:
            self._check(own_values, codec)
            if own is None:
                raise ValueError("own_values need own, their place among the participants")
        if own is not None and not 0 <= own < len(parts):
            raise ValueError(f"own {own} is none of {len(parts)} participants")
        covers = [find_cover(objects, self.start, self.length, codec) for objects in parts]
        if own is not None and own_values is not None:
            covers[own] = []  # nothing to read
        mixer = _Mixer(self.start, weights, codec, own, own_values)
        with BlockReader(self._store, covers, self.start, self.length, self._num_transfers, self._seal) as reader:
            position = self.start
            while position < self.end:
                held = reader.advance(position)
                stop = min(self.end, position + BLOCK_VALUES, *(loaded.block.high for loaded in held.values()))
                own_part, mean = mixer.mix(held, position, stop)
                if observe:
                    observe(own_part, mean)
                out[position - self.start : stop - self.start].copy_(mean)
                position = stop
        return Traffic(bytes_received=reader.bytes_received)

    def fetch(self, objects: Sequence[ObjectInfo], out: torch.Tensor) -> Traffic:
        """Reads this rank's range of objects, in any cut, in fp32, exactly; see `average`."""
        return self.average([objects], [1.0], CODECS["fp32"], out)

    def _check(self, values: torch.Tensor, codec: Codec) -> None:
        if self.start % codec.block_values:
            raise ValueError(f"no block of {codec.name} begins at value {self.start}")
        if values.shape != (self.length,) or values.dtype != torch.float32 or values.device.type != "cpu":
            raise ValueError(f"{self.length} values of fp32 on the host are needed, not {values.shape} {values.dtype}")
        if not values.is_contiguous():
            raise ValueError("values must be contiguous")


def _seal(seal: BlockSeal, path: str, number: int, block: memoryview, sealed: memoryview) -> str:
    """Encrypts a block; returns its digest."""
    seal.seal_into(path, number, block, sealed)
    return digest_of(sealed)


@dataclass(eq=False, repr=False)
class _Mixer:
    """Averages the participants' blocks, one cache-sized piece at a time."""

    start: int
    weights: Sequence[float]
    codec: Codec
    own: int | None
    own_values: torch.Tensor | None

    def __post_init__(self) -> None:
        self._decoded = [torch.empty(0 if self.codec.is_exact else BLOCK_VALUES) for _ in self.weights]
        self._zeros = torch.zeros(BLOCK_VALUES if self.own is None else 0)

    def mix(self, held: dict[int, LoadedBlock], low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (own values, mean) from `low` to `high`; overwrites these values in `held`."""
        own_part, parts, codec = self._zeros[: high - low], [], self.codec
        for participant, buffer in enumerate(self._decoded):
            part = buffer[: high - low]
            if participant in held:
                code = held[participant].view(low, high, codec)
                if codec.is_exact:
                    part = code.view(torch.float32)
                else:
                    codec.decode(code, part)
                if participant == self.own:
                    own_part = part
            else:
                assert self.own_values is not None
                own_part = self.own_values[low - self.start : high - self.start]
                if codec.is_exact:
                    part = own_part
                else:
                    codec.round_trip(own_part, part)  # as the others decode them
            parts.append(part)
        return own_part, weighted_mean(parts, self.weights, keep=self.own)
