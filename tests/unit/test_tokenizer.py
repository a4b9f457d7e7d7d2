"""Tokenizers: training is deterministic and the same on every island; all ways of loading; what cannot be used."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.apps.lm.tokenizer import (
    END_OF_TEXT,
    build_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_byte_level_bpe,
)
from hf_diloco.errors import ConfigError
from hf_diloco.inner.island import IslandGroup
from tests.processes import ROOT

TEXTS = [part for part in inspect.getsource(argparse).split("\n\n") if part.strip()]  # text that is always there

PROGRAM = "import sys; from tests.unit.test_tokenizer import describe; print(describe(*sys.argv[1:]))"


def describe(path: str, island: str) -> str:
    """The tokenizers that an island trains."""
    lines = []
    for option in ("data.streaming=true", "data.streaming=false", "data.shares=domains"):
        tokenizer = build_tokenizer(load_run_file(Path(path), [option, f"diloco.island={island}"]), IslandGroup())
        lines.append(f"{option} {tokenizer_hash(tokenizer)} {len(tokenizer)}\n")
    return "".join(lines)


def write_run(folder: Path) -> Path:
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[number::3]]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))
    path = folder / "run.yaml"
    path.write_text(
        "training: {max_steps: 1}\n"
        "tokenizer: {train: {vocab_size: 400}}\n"
        "data: {source: files, files: ['part-*.jsonl']}\n"
        "diloco: {num_islands: 3}\n"
    )
    return path


@pytest.mark.real_start  # hash seeds differ
def test_a_fresh_process_of_another_island_trains_the_same(tmp_path: Path) -> None:
    path = str(write_run(tmp_path))
    here = describe(path, "0")
    command = [sys.executable, "-c", PROGRAM, path, "1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == here + "\n"
    assert [line.split()[2] for line in here.splitlines()] == ["400"] * 3


def test_trained_tokenizer_keeps_any_text() -> None:
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=400)
    text = "The naïve sum \u2014 漢字 \t\n of 'it'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert len(tokenizer) == 400


def test_the_amount_of_text_is_bounded(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    whole = build_tokenizer(load_run_file(path), IslandGroup())
    part = build_tokenizer(load_run_file(path, ["tokenizer.train.max_megabytes=0.001"]), IslandGroup())
    assert tokenizer_hash(whole) != tokenizer_hash(part)


def test_saved_tokenizer_loads_from_folder_and_file(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=320)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer(TEXTS[0])["input_ids"]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert loaded(TEXTS[0])["input_ids"] == ids
        assert loaded.eos_token_id == tokenizer.eos_token_id


def test_vocabulary_and_merges_alone(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=320)
    tokenizer.backend_tokenizer.model.save(str(tmp_path))
    assert load_tokenizer(str(tmp_path))(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]


def test_published_tokenizers(shared_data: Path) -> None:
    gpt2 = load_tokenizer(str(shared_data / "tokenizers" / "gpt2" / "tokenizer.json"))
    assert (len(gpt2), gpt2.eos_token) == (50257, END_OF_TEXT)
    assert len(load_tokenizer(str(shared_data / "tokenizers" / "bpe5k"))) == 5000


def test_hash_sees_merges_and_special_tokens() -> None:
    hashes = {tokenizer_hash(train_byte_level_bpe(TEXTS, size)) for size in (320, 321, 321)}
    assert len(hashes) == 2
    tokenizer = train_byte_level_bpe(TEXTS, 320)
    before = tokenizer_hash(tokenizer)
    tokenizer.eos_token = "e"
    assert tokenizer_hash(tokenizer) != before


def test_unusable_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("training: {max_steps: 1}\ntokenizer: {path: tokenizer.json}\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.path: cannot load"):
        build_tokenizer(load_run_file(tmp_path / "run.yaml"), IslandGroup())

    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"names no end-of-text"):
        build_tokenizer(load_run_file(tmp_path / "run.yaml"), IslandGroup())
