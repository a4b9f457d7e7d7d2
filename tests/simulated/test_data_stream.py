"""A packed stream goes on, from any block and in another process's memory, exactly as if it had never stopped."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_diloco.apps.data.build import share_documents, without_held_out
from hf_diloco.apps.data.packing import Encoder
from hf_diloco.apps.data.sources import open_files
from hf_diloco.apps.data.stream import (
    FILE_NAME,
    DataPositionCallback,
    PackedStream,
    Position,
    read_position,
    write_position,
)
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe
from hf_diloco.errors import CheckpointError, ConfigError

TOKENIZER = train_byte_level_bpe(["words and more words, of the language"], 300)
NUM_FILES = 3
DOCUMENTS_PER_FILE = 150  # several reads a file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("stream")
    for number in range(NUM_FILES):
        texts = [f"{number}: " + f"word {index} " * (index % 7) for index in range(DOCUMENTS_PER_FILE)]
        lines = [json.dumps({"text": text, "url": "", "timestamp": ""}) for text in [*texts, "", "  "]]
        (folder / f"part-{number}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return sorted(str(path) for path in folder.iterdir())


def documents(files: list[str], kind: str) -> IterableDataset:
    """Streams as islands get them: whole, divided by files, divided by documents, with a held-out part."""
    stream = open_files(files, streaming=True)
    if kind == "by documents":
        stream = share_documents(open_files(files[:1], streaming=True), 1, 2)
    if kind == "by files":
        stream = share_documents(stream, 0, 2)
    return without_held_out(stream, 0.2) if kind == "held out" else stream


def make(files: list[str], kind: str = "whole", length: int = 50) -> PackedStream:
    return PackedStream(documents(files, kind), Encoder(TOKENIZER), length)


def take(stream: PackedStream, number: int) -> list[torch.Tensor]:
    return [example["input_ids"] for example in itertools.islice(stream, number)]


def test_blocks_are_the_joined_documents_over_and_over(files: list[str]) -> None:
    """The first pass is in the files' order; later ones bring every document once, the files in another order."""
    passes: list[list[int]] = []
    for epoch in range(2):
        stream = documents(files, "whole")
        stream.set_epoch(epoch)
        ids = Encoder(TOKENIZER)([row["text"] for row in stream if row["text"].strip()])
        passes.append([token for document in ids for token in document])
    assert sorted(passes[0]) == sorted(passes[1])
    tokens = [*passes[0], *passes[1]]
    blocks = take(make(files), len(tokens) // 50)
    assert torch.cat(blocks).tolist() == tokens[: len(blocks) * 50]


@pytest.mark.filterwarnings("ignore:1 files cannot be divided")
@pytest.mark.parametrize("kind", ["whole", "by files", "by documents", "held out"])
@pytest.mark.parametrize("length", [7, pytest.param(1000, marks=pytest.mark.slow)])
def test_goes_on_exactly(files: list[str], kind: str, length: int) -> None:
    per_pass = 16_000 // length  # more than one pass for the smaller streams
    uninterrupted = make(files, kind, length)
    blocks = take(uninterrupted, per_pass + 20)
    for number in (0, 1, per_pass // 3, per_pass // 2, per_pass):
        stream = make(files, kind, length)
        iterator = iter(stream)
        for _ in range(number + 5):  # a data loader reads ahead of training
            next(iterator)
        position = Position(**json.loads(json.dumps(stream.position(number)._asdict())))
        assert position.num_blocks == number
        resumed = make(files, kind, length)
        resumed.seek(position)
        assert torch.equal(torch.stack(take(resumed, 15)), torch.stack(blocks[number : number + 15]))


@pytest.mark.parametrize("kind", ["by documents", "by files", "held out"])
def test_a_process_that_is_not_forked_reads_the_same(files: list[str], kind: str) -> None:
    """As `dataloader_multiprocessing_context: spawn` starts it, and Python 3.14 by itself: all is pickled for it."""
    stream = make(files, kind)
    elsewhere = pickle.loads(pickle.dumps(stream))
    assert all(map(torch.equal, take(stream, 20), take(elsewhere, 20)))


def test_goes_on_in_a_later_pass(files: list[str]) -> None:
    uninterrupted = make(files[:1], length=100)
    blocks = take(uninterrupted, 250)
    stream = make(files[:1], length=100)
    take(stream, 203)
    position = stream.position(200)
    assert position.epoch > 1
    stream = make(files[:1], length=100)
    stream.seek(position)
    assert torch.equal(torch.stack(take(stream, 50)), torch.stack(blocks[200:]))


def test_resuming_does_not_tokenise_what_came_before(files: list[str]) -> None:
    stream = make(files)
    take(stream, 200)
    position = stream.position(195)
    tokenised: list[str] = []

    class Recorder(Encoder):
        def __call__(self, texts: list[str]) -> list[list[int]]:
            tokenised.extend(texts)
            return super().__call__(texts)

    resumed = PackedStream(documents(files, "whole"), Recorder(TOKENIZER), 50)
    resumed.seek(position)
    take(resumed, 1)
    beginning = [row["text"] for row in documents(files, "whole").take(5)]
    assert len(tokenised) >= 5
    assert tokenised[:5] != beginning


def test_positions_that_were_passed_are_forgotten(files: list[str]) -> None:
    stream = make(files)
    take(stream, 10)
    stream.position(5)
    with pytest.raises(CheckpointError, match="block 4"):
        stream.position(4)
    with pytest.raises(CheckpointError, match="block 11"):
        make(files).position(11)


def test_an_empty_share_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(ConfigError, match="holds no text"):
        take(make([str(tmp_path / "empty.jsonl")]), 1)


def test_position_file(tmp_path: Path) -> None:
    assert read_position(tmp_path) is None
    position = Position(7, 1, {"shard_idx": 2}, 5)
    write_position(tmp_path, position)
    assert read_position(tmp_path) == position
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    (tmp_path / FILE_NAME).write_text('{"num_blocks": 7')
    with pytest.raises(CheckpointError, match="is damaged"):
        read_position(tmp_path)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_trainer_sees_the_same_losses(files: list[str], tmp_path: Path, accumulation: int) -> None:
    """With dropout, whose random numbers must fit too; the Trainer's own skipping is the reference."""

    def train(checkpoint: Path | None, seek: bool) -> list[float]:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            save_steps=5,
            logging_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulation,
            use_cpu=True,
            disable_tqdm=True,
            ignore_data_skip=seek,
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=50, n_embd=32, n_layer=1, n_head=2))
        stream = make(files)
        trainer = Trainer(model, args, train_dataset=stream)
        if seek:
            assert checkpoint is not None
            position = read_position(checkpoint)
            assert position is not None
            stream.seek(position)
        restore = (lambda: trainer._load_rng_state(str(checkpoint))) if seek else None
        trainer.add_callback(DataPositionCallback(stream, restore))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    uninterrupted = train(None, seek=False)
    position = read_position(tmp_path / "checkpoint-5")
    assert position is not None
    assert position.num_blocks == 5 * 4 * accumulation
    assert len(uninterrupted) == 8
    assert train(tmp_path / "checkpoint-5", seek=True) == uninterrupted
    assert train(tmp_path / "checkpoint-5", seek=False) == uninterrupted
    position = read_position(tmp_path / "checkpoint-8")
    assert position is not None
    assert position.num_blocks == 8 * 4 * accumulation, "what the Trainer skipped is not counted"
