"""Builds the Trainer's datasets from the settings: this island's training blocks, and the common evaluation blocks.

The islands' shares are disjoint, and contain no text that is held out for evaluation.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_diloco.apps.data.packing import Encoder, PackedDataset, pack_dataset, pack_first
from hf_diloco.apps.data.sources import DataBlock, alternate, open_documents, open_evaluation, reading, texts
from hf_diloco.apps.data.stream import PackedStream
from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import counted

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from hf_diloco.apps.data.sources import Documents

STREAM_EVAL_FRACTION = 0.01  # share of a stream's documents held out for evaluation
MAX_EVAL_FRACTION = 0.5
MAX_SAMPLED_FILES = 64


class Datasets(NamedTuple):
    """The data of one island.

    Attributes:
        train: this island's share; a `PackedStream` when streaming.
        evaluation: the evaluation blocks, equal on all islands.
        eval_hash: hash of the evaluation blocks, which the islands compare.
        train_hash: hash of this island's share, or of the names and sizes of a stream's files; "" if they are
            not on disk.
    """

    train: PackedDataset | PackedStream
    evaluation: PackedDataset
    eval_hash: str
    train_hash: str


def sample_texts(data: DataBlock, max_megabytes: float) -> Iterator[str]:
    """Yields text to train a tokenizer on: up to `max_megabytes` of UTF-8 of the corpus, equal on all islands.

    Of streamed files the first 64 take turns; a finite dataset yields documents in random order.
    """
    with reading(data):
        if data.source == "files" and data.streaming:
            source = alternate([open_documents(data, [file]) for file in data.files[:MAX_SAMPLED_FILES]])
        else:
            documents = open_documents(data)
            source = texts(documents if data.streaming else documents.shuffle(seed=0))
        left = max_megabytes * 1e6
        for text in source:
            left -= len(text.encode("utf-8", "surrogatepass"))
            yield text
            if left <= 0:
                return


def build_datasets(data: DataBlock, tokenizer: PreTrainedTokenizerBase, island: int, num_islands: int) -> Datasets:
    """Opens, splits, shares, tokenises and packs the text; raises `ConfigError` for unreadable or too little data."""
    encoder = Encoder(tokenizer)
    train: PackedDataset | PackedStream
    with reading(data):
        evaluation = open_evaluation(data)
        blocks = _eval_blocks(alternate(evaluation), encoder, data) if evaluation else None
        build = _build_stream if data.streaming else _build_finite
        train, blocks = build(data, encoder, blocks, island, num_islands)
    train_hash = _hash_of_files(data.files) if isinstance(train, PackedStream) else train.hash()
    eval_hash = hashlib.sha256(b"".join(piece.tobytes() for piece in blocks.pieces)).hexdigest()[:16]
    return Datasets(train, blocks, eval_hash, train_hash)


def _hash_of_files(files: Sequence[str]) -> str:
    if not files or any("://" in file for file in files):
        return ""
    sizes = [(Path(file).name, Path(file).stat().st_size) for file in files]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]


def _build_finite(
    data: DataBlock, encoder: Encoder, evaluation: PackedDataset | None, island: int, num_islands: int
) -> tuple[PackedDataset, PackedDataset]:
    documents = open_documents(data)
    last_held_out = -1
    if evaluation is None:
        evaluation, last_held_out = _hold_out(documents, encoder, data)
    if data.shares == "domains":
        documents = open_documents(data, files_of_island(data.files, island, num_islands))
    if last_held_out >= 0:
        hashes = _hashes(documents)
        documents = documents.select(np.flatnonzero(hashes > np.uint64(last_held_out)))
    if data.shares == "iid":
        documents = share_documents(documents, island, num_islands)
    packed = pack_dataset(documents, encoder, data.sequence_length)
    if len(packed) == 0:
        raise ConfigError(
            f"data: island {island}'s share has {packed.num_tokens} tokens, too few for one sequence of "
            f"{data.sequence_length}; use more text, fewer islands or a smaller data.sequence_length"
        )
    return packed, evaluation


def _build_stream(
    data: DataBlock, encoder: Encoder, evaluation: PackedDataset | None, island: int, num_islands: int
) -> tuple[PackedStream, PackedDataset]:
    mine = files_of_island(data.files, island, num_islands) if data.shares == "domains" else data.files
    documents = open_documents(data, mine)
    if evaluation is None:
        each = [[file] for file in data.files] if data.shares == "domains" else [None]
        whole = alternate([open_documents(data, files) for files in each])
        held_out = (text for text in whole if is_held_out(text, STREAM_EVAL_FRACTION))
        evaluation = _eval_blocks(held_out, encoder, data)
        documents = without_held_out(documents, STREAM_EVAL_FRACTION)
    if data.shares == "iid":
        documents = share_documents(documents, island, num_islands)
    return PackedStream(documents, encoder, data.sequence_length), evaluation


def _eval_blocks(source: Iterator[str], encoder: Encoder, data: DataBlock) -> PackedDataset:
    blocks = pack_first(source, encoder, data.sequence_length, data.num_eval_sequences)
    if len(blocks) < data.num_eval_sequences:
        raise ConfigError(
            f"data.num_eval_sequences: the evaluation text fills {len(blocks)} sequences of {data.sequence_length} "
            f"tokens, not {data.num_eval_sequences}; lower it, give more text, or name data.eval_files"
        )
    return blocks


def _hold_out(documents: Dataset, encoder: Encoder, data: DataBlock) -> tuple[PackedDataset, int]:
    """Takes the documents that evaluation needs, by their hashes; returns its blocks, and the last hash taken."""
    hashes = _hashes(documents)
    order = np.argsort(hashes, kind="stable")
    used = 0

    def in_hash_order() -> Iterator[str]:
        nonlocal used
        for used, index in enumerate(order):  # noqa: B007
            yield documents[int(index)]["text"] or ""

    blocks = _eval_blocks((text for text in in_hash_order() if text.strip()), encoder, data)
    if used + 1 > MAX_EVAL_FRACTION * len(order):
        raise ConfigError(
            f"data.num_eval_sequences: {data.num_eval_sequences} sequences of {data.sequence_length} tokens take "
            f"{used + 1} of {len(order)} documents, more than half; lower it, or give data.eval_files"
        )
    return blocks, int(hashes[order[used]])


def _hashes(documents: Dataset) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    rows = itertools.chain.from_iterable(batch["text"] for batch in documents.iter(1000))
    return np.fromiter((text_hash(text or "") for text in rows), dtype=np.uint64, count=len(documents))


def share_documents(documents: Documents, island: int, num_islands: int) -> Documents:
    """Returns one island's share. The shares of all islands are disjoint and together complete.

    Splits a stream by its shards (files), before Accelerate splits the island's share among its ranks: splitting at
    once for all ranks of islands of different size would lose and repeat documents. If a stream has fewer shards than
    there are islands, every island reads all of it and keeps every `num_islands`-th document.
    """
    import datasets

    if num_islands == 1:
        return documents
    if isinstance(documents, datasets.Dataset):
        return documents.shard(num_shards=num_islands, index=island, contiguous=False)
    if documents.num_shards >= num_islands:
        return documents.shard(num_shards=num_islands, index=island)
    files = counted(documents.num_shards, "file")
    warnings.warn(
        f"{files} cannot be divided among {num_islands} islands: every island reads all of them and keeps one "
        f"document in {num_islands}; more files save reading",
        stacklevel=2,
    )
    # No lambda: it is pickled for workers that are not forked.
    return documents.filter(functools.partial(_is_mine, island, num_islands), with_indices=True)


def _is_mine(island: int, num_islands: int, _row: Any, index: int) -> bool:
    return index % num_islands == island


def files_of_island(files: list[str], island: int, num_islands: int) -> list[str]:
    """Returns the domain files of one island: file k belongs to island k % num_islands."""
    return files[island::num_islands]


def text_hash(text: str) -> int:
    """Returns a hash of the text, from 0 to 2**64 - 1: equal texts fall on the same side of a split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def is_held_out(text: str | None, fraction: float) -> bool:
    """Whether a document of a stream is held out for evaluation; true for about `fraction` of all documents."""
    return text is not None and text_hash(text) < fraction * 2**64


def without_held_out(documents: Documents, fraction: float) -> Documents:
    """Returns a stream without its held-out documents."""
    return documents.filter(functools.partial(_is_training, fraction), input_columns="text")


def _is_training(fraction: float, text: str | None) -> bool:
    return not is_held_out(text, fraction)
