"""Masked language modelling: what is hidden, and the run files that ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_diloco.apps.data.packing import Masking, example
from hf_diloco.apps.lm.model import build_model
from hf_diloco.apps.lm.runfile import ModelBlock, RunFile, load_run_file
from hf_diloco.apps.lm.tokenizer import END_OF_TEXT, MASK, build_tokenizer, train_byte_level_bpe
from hf_diloco.errors import ConfigError
from hf_diloco.inner.island import IslandGroup
from tests.processes import ROOT

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_share_of_tokens_is_hidden_as_bert_does() -> None:
    blocks = [example(torch.randint(10, 500, (400,)).numpy()) for _ in range(100)]
    batch = Masking(3, 500, 0.15, seed=1)(blocks)
    tokens = torch.stack([one["input_ids"] for one in blocks])
    is_chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][is_chosen], tokens[is_chosen])
    assert torch.equal(batch["input_ids"][~is_chosen], tokens[~is_chosen])
    shown = batch["input_ids"][is_chosen]
    assert float(is_chosen.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float((shown == 3).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((shown == tokens[is_chosen]).float().mean()) == pytest.approx(0.1, abs=0.03)


def test_a_block_has_one_mask_whatever_was_drawn_before() -> None:
    blocks = [example(torch.randint(10, 500, (64,)).numpy()) for _ in range(3)]
    masking = Masking(3, 500, 0.15, seed=1)
    whole = masking(blocks)
    torch.rand(7)
    assert torch.equal(masking(blocks[2:])["input_ids"][0], whole["input_ids"][2])
    assert not torch.equal(Masking(3, 500, 0.15, seed=2)(blocks)["labels"], whole["labels"])


def test_the_model_learns_from_what_is_hidden() -> None:
    tokenizer = train_byte_level_bpe(["hidden words of a text"] * 20, 300, (END_OF_TEXT, MASK))
    assert tokenizer.mask_token == MASK
    model = build_model(ModelBlock(objective="masked", config=BERT), tokenizer, 16, seed=0)
    assert type(model).__name__ == "BertForMaskedLM"
    assert tokenizer.mask_token_id is not None
    batch = Masking(tokenizer.mask_token_id, len(tokenizer), 0.5, 0)([example(torch.arange(16).numpy())])
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(["some text"] * 20, 300)
    tokenizer.save_pretrained(tmp_path)
    run = RunFile(
        name="x",
        training={"max_steps": 1},
        model=ModelBlock(objective="masked", config=BERT),
        tokenizer={"path": str(tmp_path)},
    )
    with pytest.raises(ConfigError, match="names no mask token, which objective masked"):
        build_tokenizer(run, IslandGroup())


def test_a_causal_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective masked: preset llama-tiny is causal; give a config"):
        load_run_file(ROOT / "configs" / "quickstart.yaml", ["model.objective=masked"])


def test_the_recipe_is_the_papers_but_for_its_warm_up() -> None:
    run = load_run_file(ROOT / "configs" / "recipes" / "onebit_lamb.yaml")
    assert run.optimizer is not None
    assert run.optimizer.freeze_step is not None
    assert run.optimizer.freeze_step / run.max_steps == 0.3
    assert run.model.mask_share == 0.15
    assert run.training["weight_decay"] == 0.01
    assert not run.diloco.enabled
