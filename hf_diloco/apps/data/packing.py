"""Packs documents into token blocks of equal length: tokenised, joined with end-of-text tokens, cut, without padding.

For masked language modelling (BERT, arXiv 1810.04805) a collator hides some of a block's tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset as TorchDataset

from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

Example = dict[str, torch.Tensor]

NUM_HASHED = 256  # blocks in a dataset's hash
NOT_PREDICTED = -100  # a label that the loss leaves out
SHARE_OF_MASKS, SHARE_OF_RANDOM = 0.8, 0.1  # of the hidden tokens; the rest stays as it is


class Encoder:
    """Encodes text as token ids, with the end-of-text token after each document; raises `ConfigError` without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("tokenizer: it has no end-of-text (eos) token, which goes between documents")
        self.tokenizer = tokenizer
        self.end_of_text = int(tokenizer.eos_token_id)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return [[*ids, self.end_of_text] for ids in encoded["input_ids"]]

    def batch(self, rows: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        """Encodes a batch, for `Dataset.map(batched=True)`; drops empty documents."""
        return {"input_ids": self([text for text in rows["text"] if text and text.strip()])}


class PackedDataset(TorchDataset[Example]):
    """Blocks of `sequence_length` tokens from tokenised documents, read in place (memory-mapped or not).

    Drops the tail that does not fill a block. `documents` has the column `input_ids`, in reading order.

    Attributes:
        pieces: the tokens of the dataset's chunks, in reading order.
    """

    def __init__(self, documents: datasets.Dataset, sequence_length: int) -> None:
        column = documents.data.column("input_ids")
        self.pieces = [piece for chunk in column.chunks if len(piece := chunk.flatten().to_numpy())]
        self._ends = np.cumsum([len(piece) for piece in self.pieces]).tolist()
        self.sequence_length = sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including the tail."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = index * self.sequence_length, (index + 1) * self.sequence_length
        parts = []
        number = bisect_right(self._ends, start)
        while start < stop:
            offset = self._ends[number] - len(self.pieces[number])
            parts.append(self.pieces[number][start - offset : stop - offset])
            start, number = self._ends[number], number + 1
        return example(np.concatenate(parts))

    def hash(self) -> str:
        """Returns a hash of the number of tokens and of up to `NUM_HASHED` blocks, spread evenly."""
        hashed = hashlib.sha256(str(self.num_tokens).encode())
        for index in np.linspace(0, len(self) - 1, min(NUM_HASHED, len(self))).astype(int):
            hashed.update(self[int(index)]["input_ids"].numpy().tobytes())
        return hashed.hexdigest()[:16]


def example(tokens: np.ndarray[Any, Any]) -> Example:
    """Returns the model's inputs: int64 `input_ids`, and equal `labels` (the model shifts them)."""
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


def pack_dataset(documents: datasets.Dataset, encoder: Encoder, sequence_length: int) -> PackedDataset:
    """Tokenises (cached by `datasets` where the documents are on disk) and packs a finite dataset."""
    if len(documents) == 0:  # `map` would not change the columns
        return _pack([], sequence_length)
    columns, features = documents.column_names, _features()
    encoded = documents.map(encoder.batch, batched=True, remove_columns=columns, features=features, desc="tokenising")
    return PackedDataset(encoded, sequence_length)


def pack_first(texts: Iterable[str], encoder: Encoder, sequence_length: int, num_blocks: int) -> PackedDataset:
    """Packs the first `num_blocks` blocks of some texts; fewer if the texts end before."""
    needed = sequence_length * num_blocks
    tokens: list[int] = []
    for text in texts:  # one by one: unused texts stay available for training
        tokens.extend(encoder([text])[0])
        if len(tokens) >= needed:
            break
    return _pack([tokens[:needed]], sequence_length)


def _pack(documents: list[list[int]], sequence_length: int) -> PackedDataset:
    from datasets import Dataset

    return PackedDataset(Dataset.from_dict({"input_ids": documents}, _features()), sequence_length)


def _features() -> datasets.Features:
    from datasets import Features, List, Value

    return Features({"input_ids": List(Value("int32"))})


@dataclass(frozen=True)
class Masking:
    """A collator that hides tokens of blocks. A block's mask depends only on its tokens and the seed.

    (Transformers' own collator draws from a random state that advances from batch to batch: a resumed run would have
    other masks than an uninterrupted one, and islands would evaluate different masks.)

    Attributes:
        mask: id of the mask token.
        vocab_size: number of tokens from which random replacements are drawn.
        share: share of a block's tokens to predict.
        seed: the run's seed.
    """

    mask: int
    vocab_size: int
    share: float
    seed: int

    def __call__(self, examples: Sequence[Example]) -> Example:
        """Returns `input_ids` with hidden tokens, and `labels`: hidden tokens, else -100; both (examples, length)."""
        hidden = [self._hide(example["input_ids"]) for example in examples]
        return {name: torch.stack([one[name] for one in hidden]) for name in ("input_ids", "labels")}

    def _hide(self, tokens: torch.Tensor) -> Example:
        seed = xxhash.xxh64_intdigest(tokens.numpy().tobytes(), self.seed) >> 1
        generator = torch.Generator().manual_seed(seed)
        is_chosen = torch.rand(tokens.shape, generator=generator) < self.share
        kind = torch.rand(tokens.shape, generator=generator)
        others = torch.randint(self.vocab_size, tokens.shape, generator=generator)
        shown = torch.where(is_chosen & (kind < SHARE_OF_MASKS), self.mask, tokens)
        is_random = is_chosen & (kind >= SHARE_OF_MASKS) & (kind < SHARE_OF_MASKS + SHARE_OF_RANDOM)
        return {
            "input_ids": torch.where(is_random, others, shown),
            "labels": torch.where(is_chosen, tokens, NOT_PREDICTED),
        }
