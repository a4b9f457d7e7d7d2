"""Models: the sizes that presets promise, equal initialisation, and clear errors for what cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_diloco.apps.lm.model import build_config, build_model
from hf_diloco.apps.lm.runfile import ModelBlock, SampleBlock
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe
from hf_diloco.apps.lm.train import try_sample
from hf_diloco.errors import ConfigError

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_byte_level_bpe(["a few words of text"], 300)


# paper's layers, width, heads, size of a head; parameters (millions) with 32,000 tokens
SHAPES = {
    "llama-60m": (3, 896, 16, 64, 60),
    "llama-150m": (12, 896, 16, 64, 150),
    "llama-400m": (12, 1536, 12, 128, 400),
    "llama-1b": (16, 2048, 32, 64, 1000),
}


@pytest.mark.parametrize("preset", SHAPES)
def test_presets_have_the_shape_and_size_of_their_name(preset: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    config = build_config(ModelBlock(preset=preset), tokenizer, sequence_length=1024)
    layers, width, heads, head, millions = SHAPES[preset]
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    assert shape == (layers, width, heads, head)
    config.vocab_size = 32_000
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert num_parameters == pytest.approx(millions * 1e6, rel=0.05)


def test_vocabulary_and_length_come_from_tokenizer_and_data(tokenizer: PreTrainedTokenizerBase) -> None:
    config = build_config(ModelBlock(preset="llama-tiny"), tokenizer, sequence_length=5000)
    assert (config.vocab_size, config.max_position_embeddings) == (len(tokenizer), 5000)
    assert config.eos_token_id == tokenizer.eos_token_id


def test_initial_weights_depend_on_the_seed_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)  # whatever was drawn before
        model = build_model(ModelBlock(config=SMALL), tokenizer, 16, seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_training_goes_on_from_a_folder_in_fp32(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = build_model(ModelBlock(config=SMALL), tokenizer, 16, seed=1).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = build_model(ModelBlock(path=str(tmp_path)), tokenizer, 16, seed=2)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.float())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "transformers has no 'lama' (did you mean llama?)"),
    ({**SMALL, "hiden_size": 3}, "unknown setting hiden_size=3 of llama (did you mean hidden_size?)"),
    ({**SMALL, "hidden_size": 33}, "refuses this llama"),
    ({**SMALL, "num_hidden_layers": "two"}, "refuses this llama"),
    ({"model_type": "gpt2", "n_positions": 8}, "data.sequence_length: 16 is more than the 8 positions"),
    ({**SMALL, "vocab_size": 10}, "tokens but the model's vocab_size is 10"),
    ({"model_type": "t5", "d_model": 8}, "no causal language model can be made of t5"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(message) for _, message in WRONG])
def test_wrong(config: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelBlock(config=config), tokenizer, 16, seed=1)
    assert message in str(caught.value)


def test_no_such_checkpoint(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: cannot load"):
        build_model(ModelBlock(path=str(tmp_path)), tokenizer, 16, seed=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(ConfigError, match="is the folder of a run: name its model"):
        build_model(ModelBlock(path=str(tmp_path)), tokenizer, 16, seed=1)


@pytest.mark.parametrize(("prompt", "written"), [("a few", True), ("words " * 20, False)])
def test_a_sample_ends_with_the_models_positions(
    prompt: str, written: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    build_model(ModelBlock(config=config), tokenizer, 16, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sample = try_sample(tmp_path, SampleBlock(prompt=prompt, num_tokens=40), seed=1)
    if written:
        assert sample is not None
        assert sample.startswith(prompt)
    else:  # the run has its model all the same
        assert sample is None
        assert "the model writes no sample: ValueError: `max_new_tokens`" in caplog.text
