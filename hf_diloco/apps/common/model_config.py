"""Models that are trained from scratch, and their configurations, out of a run file's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_diloco.errors import ConfigError
from hf_diloco.utils.settings import refusing
from hf_diloco.utils.text import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def make_config(given: Mapping[str, Any], defaults: Mapping[str, Any], **fixed: Any) -> PreTrainedConfig:
    """The transformers configuration of these settings.

    Args:
        given: `model_type` and settings, all of which it must know.
        defaults: further settings, where it knows them and they are not given.
        fixed: settings of every configuration, in place of those that are given.

    Raises:
        ConfigError: on an unknown model type or setting, or values that transformers refuses.
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
    """A new model of a configuration; raises `ConfigError` if no such model can be made of it."""
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
