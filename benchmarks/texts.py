"""Text for small models: files, or what comes with Python, in sequences of tokens of a tokenizer of its own."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_diloco.apps.data.build import build_datasets
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.runfile import TrainTokenizer
from hf_diloco.apps.lm.tokenizer import END_OF_TEXT, MASK, train_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the text is, and what becomes of it."""
    parser.add_argument("--data", help="training documents: C4's *.json.gz files, a glob; goes with --eval-data")
    parser.add_argument("--eval-data", help="held-out documents, a glob")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--tokenizer-megabytes", type=float, default=2.0, help="of text, to train the tokenizer on")
    parser.add_argument("--eval-sequences", type=int, default=512)


class Corpus:
    """The same sequences for evaluation, and a share of the others for each of several islands or ranks.

    Args:
        args: of `add_arguments`.
        is_masked: the tokenizer has a token that hides others.

    Attributes:
        evaluation: (sequences, length).
        hash: of the evaluation text.
    """

    def __init__(self, args: argparse.Namespace, is_masked: bool = False) -> None:
        source: dict[str, Any] = {"source": "embedded"}
        if args.data:
            source = {"source": "files", "files": [args.data], "eval_files": [args.eval_data]}
        self._data = DataBlock(**source, sequence_length=args.sequence_length, num_eval_sequences=args.eval_sequences)
        settings = TrainTokenizer(vocab_size=args.vocab_size, max_megabytes=args.tokenizer_megabytes)
        self.tokenizer = train_tokenizer(self._data, settings, [END_OF_TEXT, MASK] if is_masked else [END_OF_TEXT])
        self._shares: dict[tuple[int, int], torch.Tensor] = {}
        datasets = build_datasets(self._data, self.tokenizer, 0, 1)
        self.evaluation = stacked(datasets.evaluation)
        self.hash = datasets.eval_hash

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""
        return len(self.tokenizer)

    def share(self, number: int, count: int) -> torch.Tensor:
        """The sequences of one of `count`, (sequences, length)."""
        if (number, count) not in self._shares:
            self._shares[number, count] = stacked(build_datasets(self._data, self.tokenizer, number, count).train)
        return self._shares[number, count]


def stacked(blocks: Any) -> torch.Tensor:
    """All sequences of a data set, (sequences, length)."""
    return torch.stack([blocks[place]["input_ids"] for place in range(len(blocks))])


def draw_batches(num_sequences: int, steps: int, batch: int, seed: int) -> torch.Tensor:
    """Numbers of sequences, (steps, batch): every epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps * batch // num_sequences)
    order = torch.cat([torch.randperm(num_sequences, generator=generator) for _ in range(epochs)])
    return order[: steps * batch].view(steps, batch)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where they do not go together."""
    if bool(args.data) != bool(args.eval_data):
        parser.error("--data and --eval-data go together")
