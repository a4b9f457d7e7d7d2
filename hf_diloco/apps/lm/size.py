"""How large a run's model is, without making it: no weights are allocated or loaded."""

from __future__ import annotations

from typing import NamedTuple

from hf_diloco.apps.lm.checkpoint import load_config
from hf_diloco.apps.lm.model import auto_class, config_from_scratch
from hf_diloco.apps.lm.runfile import RunFile, TrainTokenizer
from hf_diloco.apps.lm.tokenizer import load_tokenizer
from hf_diloco.errors import ConfigError

_DEFAULT_LAYERS = 24


class ModelSize(NamedTuple):
    """Attributes:

    num_parameters: of the model; tied ones count once.
    largest_layer: parameters of the largest module, without those of modules in it.
    num_layers: transformer blocks.
    """

    num_parameters: int
    largest_layer: int
    num_layers: int


def measure_model(run: RunFile) -> ModelSize:
    """The size of the model that a run would train. A tokenizer that is to be trained counts as it is asked for.

    Raises:
        ConfigError: the model's configuration or its tokenizer cannot be had.
    """
    import torch

    if run.model.path is None:
        config = config_from_scratch(run.model, {"vocab_size": _vocab_size(run)}, run.data.sequence_length)
    else:
        config = load_config(run.model.path)
    with torch.device("meta"):
        try:
            model = auto_class(run.model).from_config(config)
        except Exception as error:
            raise ConfigError(f"model: cannot be made of {config.model_type}: {error}") from error
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or _DEFAULT_LAYERS
    return ModelSize(sum(one.numel() for one in model.parameters()), max(own), layers)


def _vocab_size(run: RunFile) -> int:
    if run.tokenizer.path is not None:
        return len(load_tokenizer(run.tokenizer.path))
    return (run.tokenizer.train or TrainTokenizer()).vocab_size
