"""Creates models to train from scratch, and their configurations, from a run file's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_diloco.errors import ConfigError
from hf_diloco.utils.settings import refusing
from hf_diloco.utils.text import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def make_config(given: Mapping[str, Any], defaults: Mapping[str, Any], **fixed: Any) -> PreTrainedConfig:
    """Creates a transformers configuration from `model_type` and settings.

    Ignores `defaults` that the type does not know or that are given; `fixed` settings override given ones. Raises
    `ConfigError` if the model type or a given setting is unknown, or transformers refuses a value.
    """
    from transformers import AutoConfig

    settings = dict(given)
    model_type = settings.pop("model_type")
    known = _known_settings(model_type)
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"model.config: unknown setting {key}={value!r} of {model_type}{nearest(key, known)}")
    ours = {key: value for key, value in defaults.items() if key in known}
    with refusing(f"model.config: transformers refuses this {model_type}"):
        return AutoConfig.for_model(model_type, **{**ours, **settings, **fixed})


def make_model(config: PreTrainedConfig, auto_class: Any, kind: str) -> PreTrainedModel:
    """Creates a model from a configuration; raises `ConfigError` if `auto_class` cannot."""
    with refusing(f"model: no {kind} model can be made of {config.model_type}"):
        model: PreTrainedModel = auto_class.from_config(config)
    return model


def _known_settings(model_type: str) -> set[str]:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        near = nearest(model_type, CONFIG_MAPPING_NAMES)
        raise ConfigError(f"model.config.model_type: transformers has no {model_type!r}{near}")
    config = AutoConfig.for_model(model_type)
    return {*config.to_dict(), *config.attribute_map}
