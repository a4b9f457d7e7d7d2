"""The model: a known shape, any transformers configuration, or a checkpoint with a new head for these classes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from hf_diloco.apps.common.hub import loading
from hf_diloco.apps.common.model_config import make_config, make_model
from hf_diloco.apps.vision.runfile import ImageModelBlock
from hf_diloco.errors import ConfigError
from hf_diloco.utils.extras import need
from hf_diloco.utils.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_diloco.apps.vision.build import ImageData

# resnet-18 and resnet-50 are those of He et al. (arXiv 1512.03385); resnet-tiny has their stem and a basic block in
# each of two stages. vit-tiny is for small images: it is smaller than the ViT-Ti of 5.7M parameters.
_SHAPES: dict[str, dict[str, Any]] = {
    "resnet-tiny": {
        "model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1],
        "layer_type": "basic",
    },
    "resnet-18": {
        "model_type": "resnet", "embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2],
        "layer_type": "basic",
    },
    "resnet-50": {
        "model_type": "resnet", "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck",
    },
    "vit-tiny": {
        "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip

TIMM = "timm/"
_WHAT_FITS = "; give the hub id or the folder of an image classification model"
_MAX_PATCHES = 32  # per side, for vit-tiny


def build_model(block: ImageModelBlock, data: ImageData, seed: int) -> PreTrainedModel:
    """Creates a model with fp32 weights on the CPU: initialised from `seed`, or loaded, with a new head from `seed`.

    Args:
        data: determines channels, size and classes.
        seed: equal on all nodes. Seeds the generators of Python, numpy and torch.

    Raises:
        ConfigError: the model cannot be created or loaded, or does not fit the data; or `frozen` matches no parameter
            or all of them.
    """
    from transformers import AutoModelForImageClassification, set_seed

    set_seed(seed)
    if block.path is not None:
        model = _load(block.path, data)
    else:
        model = make_model(build_config(block, data), AutoModelForImageClassification, "image classification")
    _freeze(model, block.frozen)
    _try(model, data)
    return model


def _try(model: PreTrainedModel, data: ImageData) -> None:
    """Raises `ConfigError` if a model cannot process the images, for example if they are smaller than its patches."""
    import torch

    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, data.num_channels, data.image_size, data.image_size))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model: {type(model).__name__} cannot take images of {data.image_size} pixels a side: {one_line(error)}; "
            "set data.image_size, or another model"
        ) from error
    model.train(was_training)


def build_config(block: ImageModelBlock, data: ImageData) -> PreTrainedConfig:
    """Creates the configuration of a model to train from scratch, for these images and classes; see `make_config`."""
    given = dict(_SHAPES[block.preset] if block.preset is not None else block.config or {})
    if block.preset == "vit-tiny":
        given["patch_size"] = patch_size(data.image_size)
    defaults = {"num_channels": data.num_channels, "image_size": data.image_size}
    return make_config(given, defaults, **_classes(data))


def checkpoint_config(path: str) -> PreTrainedConfig:
    """Loads the configuration from a Hub id or folder; raises `ConfigError` if that fails, or a package is missing."""
    from transformers import AutoConfig

    if path.startswith(TIMM):
        need(f"model.path: {path}", "timm", "torchvision")
    with loading("model.path", path, _WHAT_FITS):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    return config


def patch_size(image_size: int) -> int:
    """Returns the side of vit-tiny's patches in pixels: the largest that gives at least 7 patches per side.

    For images smaller than 14 pixels, at least 4. Raises `ConfigError` if that gives more than 32 patches per side.
    """
    least = 7 if image_size >= 14 else 4
    fitting = [size for size in range(1, image_size + 1) if image_size % size == 0 and image_size // size >= least]
    if not fitting or image_size // fitting[-1] > _MAX_PATCHES:
        raise ConfigError(
            f"data.image_size: {image_size} does not divide into {least} to {_MAX_PATCHES} patches a side for "
            "vit-tiny; set it to a multiple of 8"
        )
    return fitting[-1]


def _load(path: str, data: ImageData) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForImageClassification

    checkpoint_config(path)  # for its errors
    classes = _classes(data)
    with loading("model.path", path, _WHAT_FITS):
        model, info = AutoModelForImageClassification.from_pretrained(
            path, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True, **classes
        )
    for name, was, wanted in info["mismatched_keys"]:
        if wanted[0] != len(data.labels):  # not the head's
            raise ConfigError(
                f"model.path: {name} of {path} has the shape {tuple(was)}, but {tuple(wanted)} is needed; the "
                "checkpoint does not fit its own configuration"
            )
    return cast("PreTrainedModel", model)


def _classes(data: ImageData) -> dict[str, Any]:
    return {
        "num_labels": len(data.labels),
        "id2label": dict(enumerate(data.labels)),
        "label2id": {name: number for number, name in enumerate(data.labels)},
    }


def _freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if re.search(pattern, name)]
        if not matching:
            raise ConfigError(
                f"model.frozen: {pattern!r} matches no parameter; their names are like "
                f"{', '.join(list(parameters)[:3])}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.frozen: {patterns} match all parameters; leave some to train")
