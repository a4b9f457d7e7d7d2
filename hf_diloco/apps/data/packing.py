"""Documents to token blocks of one length: tokenised, joined with an end-of-text token after each, cut, no padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


Example = dict[str, torch.Tensor]


class Encoder:
    """Text to token numbers, with the end-of-text token after each document.

    Raises:
        ConfigError: when the tokenizer has no end-of-text token.
    """

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
        """For `Dataset.map(batched=True)`; empty documents fall out."""
        return {"input_ids": self([text for text in rows["text"] if text and text.strip()])}


class PackedDataset(TorchDataset[Example]):
    """Blocks of `sequence_length` tokens over tokenised documents, which are read in place (memory-mapped or not).

    Args:
        documents: a dataset with the column `input_ids`, in reading order, as `Dataset.map` leaves it.
        sequence_length: tokens in a block. The tail that does not fill one is left out.

    Attributes:
        pieces: the tokens, in reading order, as they lie in the dataset's chunks.
    """

    def __init__(self, documents: datasets.Dataset, sequence_length: int) -> None:
        column = documents.data.column("input_ids")
        self.pieces = [piece for chunk in column.chunks if len(piece := chunk.flatten().to_numpy())]
        self._ends = np.cumsum([len(piece) for piece in self.pieces]).tolist()
        self.sequence_length = sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, with the tail."""
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


class TokenBlocks(TorchDataset[Example]):
    """Blocks held in memory: an int32 array of shape (blocks, sequence_length)."""

    def __init__(self, blocks: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Example:
        return example(self.blocks[index])


def example(tokens: np.ndarray[Any, Any]) -> Example:
    """What the model takes: int64 `input_ids` and, equal to them, `labels` (the model shifts them)."""
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


def pack_dataset(documents: datasets.Dataset, encoder: Encoder, sequence_length: int) -> PackedDataset:
    """Tokenises (cached by `datasets` where the documents are on disk) and packs a finite dataset."""
    from datasets import Dataset, Features, List, Value

    features = Features({"input_ids": List(Value("int32"))})
    if len(documents) == 0:  # which `map` would leave as they are
        return PackedDataset(Dataset.from_dict({"input_ids": []}, features), sequence_length)
    encoded = documents.map(
        encoder.batch,
        batched=True,
        remove_columns=documents.column_names,
        features=features,
        desc="tokenising",
    )
    return PackedDataset(encoded, sequence_length)


def pack_first(texts: Iterable[str], encoder: Encoder, sequence_length: int, num_blocks: int) -> TokenBlocks:
    """The first blocks of some texts; fewer when the texts end."""
    needed = sequence_length * num_blocks
    tokens: list[int] = []
    for text in texts:  # one by one: what is not needed stays untouched, and can be trained on
        tokens.extend(encoder([text])[0])
        if len(tokens) >= needed:
            break
    usable = min(needed, len(tokens) // sequence_length * sequence_length)
    return TokenBlocks(np.asarray(tokens[:usable], dtype=np.int32).reshape(-1, sequence_length))
