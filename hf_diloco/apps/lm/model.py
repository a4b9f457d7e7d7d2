"""The model: a Llama shape of the DiLoCo paper, any transformers configuration, or a checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hf_diloco.apps.common.model_config import make_config
from hf_diloco.apps.lm.checkpoint import load_weights
from hf_diloco.apps.lm.runfile import ModelBlock
from hf_diloco.errors import ConfigError

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


def build_config(model: ModelBlock, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> PreTrainedConfig:
    """The configuration of a model that is trained from scratch, for this vocabulary and length.

    Raises:
        ConfigError: on an unknown model type or setting, or values that transformers refuses.
    """
    defaults = {"vocab_size": len(tokenizer), **_special_tokens(tokenizer)}
    config = config_from_scratch(model, defaults, sequence_length)
    _check_fits(config, tokenizer, sequence_length)
    return config


def config_from_scratch(model: ModelBlock, defaults: Mapping[str, Any], sequence_length: int) -> PreTrainedConfig:
    """The configuration of a preset, or of `model.config`, without a look at the tokenizer.

    Args:
        model: the block of the run file.
        defaults: settings that it need not give, such as the size of the vocabulary.
        sequence_length: of the data.

    Raises:
        ConfigError: on an unknown model type or setting, or values that transformers refuses.
    """
    if model.preset is not None:
        given = {"model_type": "llama", "tie_word_embeddings": True, **_SHAPES[model.preset]}
        given["max_position_embeddings"] = max(2048, sequence_length)
    else:
        given = dict(model.config or {})
    return make_config(given, defaults)


def build_model(
    model: ModelBlock, tokenizer: PreTrainedTokenizerBase, sequence_length: int, seed: int
) -> PreTrainedModel:
    """A model with fp32 weights: initialised from `seed`, or loaded from `model.path`.

    Raises:
        ConfigError: when it cannot be made or loaded, or does not fit the tokenizer or the sequence length.
    """
    from transformers import set_seed

    if model.path is None:
        config = build_config(model, tokenizer, sequence_length)
        set_seed(seed)
        try:
            return cast("PreTrainedModel", auto_class(model).from_config(config))
        except Exception as error:
            raise ConfigError(
                f"model: no {model.objective} language model can be made of {config.model_type}: {error}"
            ) from error
    return _load_model(model, model.path, tokenizer, sequence_length)


def auto_class(model: ModelBlock) -> Any:
    """The class of transformers that makes models of this objective."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if model.objective == "masked" else AutoModelForCausalLM


def _load_model(
    block: ModelBlock, path: str, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> PreTrainedModel:
    """A pre-trained model whose training goes on, in fp32."""
    model = load_weights(path, auto_class(block))
    _check_fits(model.config, tokenizer, sequence_length)
    return model


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _check_fits(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> None:
    text_config = config.get_text_config()
    if text_config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"tokenizer: it has {len(tokenizer)} tokens but the model's vocab_size is {text_config.vocab_size}; use "
            "the model's own tokenizer (leave the tokenizer block out) or another model"
        )
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise ConfigError(f"data.sequence_length: {sequence_length} is more than the {longest} positions of the model")
