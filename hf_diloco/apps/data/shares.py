"""Which documents belong to which island: disjoint shares, and evaluation text that no island trains on."""

from __future__ import annotations

import functools
import hashlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_diloco.apps.data.sources import Documents

_HASH_RANGE = 2**64


def share_documents(documents: Documents, island: int, num_islands: int) -> Documents:
    """One island's share. The shares of all islands are disjoint and together complete.

    A stream is cut by its shards (files) here, *before* accelerate cuts the island's share for its ranks: cutting for
    all ranks of islands of different size at once loses and repeats documents. A stream of fewer shards than islands
    is read whole by every island, which keeps every `num_islands`-th document.

    Args:
        documents: a dataset or a stream, the same on all islands.
        island: from 0 to `num_islands` - 1.
        num_islands: number of shares.
    """
    import datasets

    if num_islands == 1:
        return documents
    if isinstance(documents, datasets.Dataset):
        return documents.shard(num_shards=num_islands, index=island, contiguous=False)
    if documents.num_shards >= num_islands:
        return documents.shard(num_shards=num_islands, index=island)
    warnings.warn(
        f"{documents.num_shards} files cannot be divided among {num_islands} islands: every island reads all of them "
        f"and keeps one document in {num_islands}; more files save reading",
        stacklevel=2,
    )
    return documents.filter(functools.partial(_is_mine, island, num_islands), with_indices=True)


def files_of_island(files: list[str], island: int, num_islands: int) -> list[str]:
    """The domain files of one island: file k belongs to island k % num_islands."""
    return files[island::num_islands]


def text_hash(text: str) -> int:
    """A number from 0 to 2**64 - 1 that only depends on the text: equal texts fall on the same side of a split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def is_held_out(text: str | None, fraction: float) -> bool:
    """Whether a document of a stream is kept for evaluation; true for about `fraction` of all documents."""
    return text is not None and text_hash(text) < fraction * _HASH_RANGE


def without_held_out(documents: Documents, fraction: float) -> Documents:
    """A stream without its evaluation documents."""
    return documents.filter(functools.partial(_is_training, fraction), input_columns="text")


def _is_mine(island: int, num_islands: int, _row: Any, index: int) -> bool:
    return index % num_islands == island


def _is_training(fraction: float, text: str | None) -> bool:
    return not is_held_out(text, fraction)
