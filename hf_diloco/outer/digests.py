"""One short digest of numbers that are spread over an island's ranks, to be compared among islands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition


def digest_vector(vector: torch.Tensor, partition: Partition, island: IslandGroup) -> str:
    """The digest of a vector that `partition` cuts over the ranks. Collective in the island.

    Lanes are the same on all islands, so equal numbers have equal digests on islands with other shards.
    """
    parts = partition.split(vector)
    return combine_digests([xxhash.xxh3_128_hexdigest(part.numpy().data) for part in parts], partition, island)


def combine_digests(digests: Sequence[str], partition: Partition, island: IslandGroup) -> str:
    """One digest of the digests of this rank's lanes, in their order, and of all other ranks'."""
    mine = {str(lane): digest for lane, digest in zip(partition.lanes, digests, strict=True)}
    lanes = {int(lane): digest for held in island.gather(mine) for lane, digest in held.items()}
    return xxhash.xxh3_128_hexdigest("".join(lanes[lane] for lane in sorted(lanes)).encode())


def model_digest(shards: Shards) -> str:
    """Digest of the trainable parameters' names and sizes."""
    listing = "\n".join(f"{name} {size}" for name, size in shards.sizes.items())
    return xxhash.xxh3_128_hexdigest(listing.encode())
