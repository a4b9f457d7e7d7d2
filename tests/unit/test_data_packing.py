"""Packing: all tokens in order, cut to one length, nothing but the tail lost."""

from __future__ import annotations

import pickle

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerBase

from hf_diloco.apps.data.packing import Encoder, PackedDataset, pack_dataset, pack_first
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe
from hf_diloco.errors import ConfigError

TOKENIZER = train_byte_level_bpe(["words and more words, of the language"], 300)
TEXTS = st.lists(st.text(max_size=60), max_size=30)


def joined(texts: list[str]) -> list[int]:
    """The reference: one document after the other, each with the end-of-text token."""
    tokens: list[int] = []
    for text in texts:
        if text.strip():
            tokens += TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]
    return tokens


def pack(texts: list[str], length: int) -> PackedDataset:
    from datasets import Features, Value

    return pack_dataset(
        Dataset.from_dict({"text": texts}, Features({"text": Value("string")})), Encoder(TOKENIZER), length
    )


@given(texts=TEXTS, length=st.integers(2, 40))
@settings(max_examples=40)
def test_blocks_are_the_joined_documents(texts: list[str], length: int) -> None:
    tokens = joined(texts)
    packed = pack(texts, length)
    assert packed.num_tokens == len(tokens)
    assert len(packed) == len(tokens) // length
    blocks = [packed[index]["input_ids"] for index in range(len(packed))]
    assert [int(token) for block in blocks for token in block] == tokens[: len(packed) * length]
    assert {block.shape for block in blocks} <= {(length,)}


def test_many_chunks() -> None:
    """More documents than `datasets` writes in one chunk."""
    texts = [f"document {number}" for number in range(2500)]
    packed = pack(texts, 64)
    assert len(packed.pieces) > 1
    tokens = joined(texts)
    for index in (0, 1, len(packed) // 2, len(packed) - 1):
        assert packed[index]["input_ids"].tolist() == tokens[index * 64 : (index + 1) * 64]
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_labels_equal_the_input_but_share_no_memory() -> None:
    block = pack(["some words"] * 9, 8)[0]
    assert block["input_ids"].dtype == torch.int64
    assert torch.equal(block["input_ids"], block["labels"])
    block["labels"][0] = -100
    assert block["input_ids"][0] != -100


def test_survives_being_sent_to_a_worker() -> None:
    packed = pack(["some words"] * 9, 8)
    assert torch.equal(pickle.loads(pickle.dumps(packed))[1]["input_ids"], packed[1]["input_ids"])


@given(texts=TEXTS, length=st.integers(2, 20), num_blocks=st.integers(1, 10))
@settings(max_examples=40)
def test_first_blocks(texts: list[str], length: int, num_blocks: int) -> None:
    blocks = pack_first((text for text in texts if text.strip()), Encoder(TOKENIZER), length, num_blocks)
    tokens = joined(texts)
    assert len(blocks) == min(num_blocks, len(tokens) // length)
    found = [blocks[number]["input_ids"] for number in range(len(blocks))]
    assert torch.cat([torch.tensor([]), *found]).tolist() == tokens[: len(blocks) * length]


def test_no_end_of_text_token() -> None:
    tokenizer: PreTrainedTokenizerBase = train_byte_level_bpe(["words"], 300)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text"):
        Encoder(tokenizer)
