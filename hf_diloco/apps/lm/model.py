"""The model: a Llama shape of the DiLoCo paper, any transformers configuration, or a checkpoint to continue from.

A checkpoint is on the Hub, in a Hugging Face folder, or a file in llama.cpp's GGUF format.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_diloco.apps.common.hub import loading
from hf_diloco.apps.common.model_config import make_config, make_model
from hf_diloco.apps.lm.runfile import ModelBlock, RunFile, TrainTokenizer
from hf_diloco.errors import ConfigError
from hf_diloco.trainer.refusals import refuse_unknown_layers
from hf_diloco.utils.extras import need

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Layers, width, heads and head size of 60M to 400M are the paper's (arXiv 2311.08105). Its feed-forward layers are not
# gated; the widths of the gated ones here give, with tied embeddings and 32,000 tokens, the size in the name. 1B has
# the shape of Llama 3.2 1B.
_SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 352},
    "llama-60m": {
        "num_hidden_layers": 3, "hidden_size": 896, "num_attention_heads": 16, "head_dim": 64,
        "intermediate_size": 2432,
    },
    "llama-150m": {
        "num_hidden_layers": 12, "hidden_size": 896, "num_attention_heads": 16, "head_dim": 64,
        "intermediate_size": 2432,
    },
    "llama-400m": {
        "num_hidden_layers": 12, "hidden_size": 1536, "num_attention_heads": 12, "head_dim": 128,
        "intermediate_size": 4096,
    },
    "llama-1b": {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192,
    },
}  # fmt: skip


def build_config(
    model: ModelBlock, tokenizer: PreTrainedTokenizerBase | None, sequence_length: int, vocab_size: int = 0
) -> PreTrainedConfig:
    """Creates the configuration of a model to train from scratch, for this vocabulary and sequence length.

    If `tokenizer` is None because it is not trained yet, uses `vocab_size`. Raises `ConfigError` as `make_config`
    does, or if vocabulary or length do not fit.
    """
    defaults: dict[str, Any] = {"vocab_size": vocab_size}
    if tokenizer is not None:
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "bos", "pad")}
        defaults = {"vocab_size": len(tokenizer), **special}
    if model.preset is not None:
        given = {"model_type": "llama", "tie_word_embeddings": True, **_SHAPES[model.preset]}
        given["max_position_embeddings"] = max(2048, sequence_length)
    else:
        given = dict(model.config or {})
    config = make_config(given, defaults)
    _check_fits(config, tokenizer, sequence_length)
    return config


def build_model(
    model: ModelBlock, tokenizer: PreTrainedTokenizerBase, sequence_length: int, seed: int
) -> PreTrainedModel:
    """Creates a model with fp32 weights: initialised from `seed`, or loaded from `model.path`.

    Raises `ConfigError` if the model cannot be created or loaded, or does not fit the tokenizer or the sequence
    length.
    """
    from transformers import set_seed

    if model.path is not None:
        loaded = load_weights(model.path, auto_class(model))
        _check_fits(loaded.config, tokenizer, sequence_length)
        return loaded
    config = build_config(model, tokenizer, sequence_length)
    set_seed(seed)
    return make_model(config, auto_class(model), f"{model.objective} language")


def sketch_model(run: RunFile, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    """Creates the model on the device `meta`, without weights, to find mistakes before preparing data takes hours.

    If `tokenizer` is None because it is not trained yet, uses its settings. Raises `ConfigError` as `build_model`
    does, or if FSDP is told to wrap layers that the model does not have.
    """
    import torch

    model, length = run.model, run.data.sequence_length
    if model.path is None:
        config = build_config(model, tokenizer, length, (run.tokenizer.train or TrainTokenizer()).vocab_size)
    else:
        config = load_config(model.path)
        _check_fits(config, tokenizer, length)
    with torch.device("meta"):
        made = make_model(config, auto_class(model), f"{model.objective} language")
    if run.fsdp is not None:
        refuse_unknown_layers(run.fsdp.transformer_layer_cls_to_wrap, made)
    return made


def auto_class(model: ModelBlock) -> Any:
    """Returns the transformers class that creates models of this objective."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if model.objective == "masked" else AutoModelForCausalLM


def _check_fits(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, sequence_length: int) -> None:
    text_config = config.get_text_config()
    if tokenizer is not None and text_config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"tokenizer: it has {len(tokenizer)} tokens but the model's vocab_size is {text_config.vocab_size}; use "
            "the model's own tokenizer (leave the tokenizer block out) or another model"
        )
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise ConfigError(f"data.sequence_length: {sequence_length} is more than the {longest} positions of the model")


class Source(NamedTuple):
    """Arguments for `from_pretrained`: a Hub id or a folder, and `gguf_file` with the name of a file in it, if any."""

    name: str
    options: dict[str, str]


def find_source(path: str, setting: str = "model.path") -> Source:
    """Finds where a model or tokenizer is loaded from, by a setting that names its path.

    `path` is a Hub id, a folder, a GGUF file, or a folder with one GGUF file and no config.json. Raises `ConfigError`
    if the folder has several GGUF files, or the file or the package `gguf` is missing.
    """
    file = _gguf_file(Path(path), setting)
    if file is None:
        return Source(path, {})
    need(f"{setting}: {path}", "gguf")
    if not file.is_file():
        raise ConfigError(f"{setting}: there is no file {path!r}; give a GGUF file that exists")
    return Source(str(file.parent), {"gguf_file": file.name})


def load_config(path: str) -> PreTrainedConfig:
    """Loads the configuration of a pre-trained model, without its weights; raises `ConfigError` if that fails."""
    from transformers import AutoConfig

    source = find_source(path)
    with loading("model.path", path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.name, **source.options)
    return config


def load_weights(path: str, auto_class: Any) -> PreTrainedModel:
    """Loads a pre-trained model in fp32; removes marks of quantisation, so that it trains and is saved as a plain one.

    Raises `ConfigError` if it cannot be loaded.
    """
    import torch

    source = find_source(path)
    with loading("model.path", path):
        model: PreTrainedModel = auto_class.from_pretrained(source.name, dtype=torch.float32, **source.options)
    if source.options:  # weights are fp32 now, but Trainer and `save_pretrained` would think they are quantised
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(name, None)
        vars(model.config).pop("quantization_config", None)
    return model


def _gguf_file(path: Path, setting: str) -> Path | None:
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{setting}: {str(path)!r} holds {len(files)} GGUF files ({names}); give the path of one")
    return files[0] if files else None
