"""Converts pictures to uint8 pixels of the model's size, with the image processor that is saved with the model.

The processor also does the geometry (size, crop, filter) in training, so that predictions on raw pictures with the
saved processor see the same pixels as in training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_diloco.apps.common.hub import loading
from hf_diloco.apps.vision.images import (
    ArrayPictures,
    Normalization,
    Pictures,
    UInt8Array,
    first_pictures,
    num_channels_of,
    square_size_of,
)
from hf_diloco.apps.vision.model import TIMM, checkpoint_config
from hf_diloco.apps.vision.runfile import ImageDataBlock, ImageModelBlock
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedConfig

MIN_RESNET_SIZE = 28  # the stem and two stages of resnet-tiny divide by 16
ENLARGED_SIZE = 32  # smaller pictures are enlarged to this, for a resnet preset
_DEEP_MODES = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}  # more than 8 bits a channel


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes pixels.

    Attributes:
        processor: its mean and std may be None.
        image_size: pixels per side.
        num_channels: 1 or 3.
        stretches: whether the processor only stretches, so that a picture of this size stays unchanged.
    """

    processor: BaseImageProcessor
    image_size: int
    num_channels: int
    stretches: bool

    def pixels(self, image: Image) -> UInt8Array:
        """Returns uint8 [channels, size, size] of one picture.

        Raises:
            ConfigError: the picture has more than 8 bits per channel, or the processor returns another shape or dtype.
        """
        converted = convert(image, self.num_channels)
        if self.stretches and converted.size == (self.image_size, self.image_size):
            array = np.asarray(converted)
            return array[None] if self.num_channels == 1 else array.transpose(2, 0, 1)
        pixels = geometry(self.processor, converted)
        expected = (self.num_channels, self.image_size, self.image_size)
        if pixels.shape != expected or pixels.dtype != np.uint8:
            raise ConfigError(
                f"model.path: its image processor makes {pixels.dtype} {pixels.shape} of a picture of size "
                f"{image.size}, not uint8 {expected}; set data.image_size and data.normalize to leave it out"
            )
        return pixels

    def all_pixels(self, pictures: Pictures) -> torch.Tensor:
        """Returns uint8 [examples, channels, size, size] of all pictures."""
        shape = (len(pictures.labels), self.num_channels, self.image_size, self.image_size)
        if self.stretches and isinstance(pictures, ArrayPictures) and pictures.array.shape[1:] == shape[2:]:
            return torch.from_numpy(pictures.array)[:, None].expand(shape).contiguous()
        pixels = torch.empty(shape, dtype=torch.uint8)
        for index in range(shape[0]):
            # a copy: numpy's view of a PIL image is read-only
            pixels[index] = torch.from_numpy(self.pixels(pictures.open(index)).copy())
        return pixels


def choose_preprocessing(data: ImageDataBlock, model: ImageModelBlock, pictures: Pictures) -> Preprocessing:
    """Chooses size, channels and processor: the checkpoint's, else those of the settings and the pictures.

    Raises:
        ConfigError: the checkpoint cannot be read, or the size is unknown or not the model's.
    """
    images = first_pictures(pictures)
    if model.path is None:
        num_channels = _check_channels((model.config or {}).get("num_channels") or num_channels_of(images))
        return _plain(_choose_size(data, model, images), num_channels)
    config = checkpoint_config(model.path)
    num_channels = _check_channels(_of_checkpoint(config, "num_channels") or 3)
    own_size = _of_checkpoint(config, "image_size")
    own = getattr(config, "image_size", None)
    if data.image_size is not None and isinstance(own, int) and data.image_size != own:
        raise ConfigError(
            f"data.image_size: {data.image_size}, but {model.path} was trained on {own} and has a position for each "
            "of its patches; leave image_size out"
        )
    is_left_out = data.image_size is not None and data.normalize is not None
    processor = None if is_left_out else _processor_of(model.path)
    if processor is None or data.image_size is not None:
        size = data.image_size or own_size or square_size_of(images)
        mean = getattr(processor, "image_mean", None) or _of_checkpoint(config, "mean")
        std = getattr(processor, "image_std", None) or _of_checkpoint(config, "std")
        return _plain(_check_known(size), num_channels, mean, std, getattr(processor, "do_normalize", True))
    shape = geometry(processor, convert(images[0], num_channels)).shape
    return Preprocessing(processor, int(shape[-1]), num_channels, stretches=False)


def geometry(processor: BaseImageProcessor, image: Image) -> UInt8Array:
    """Returns the pixels of a picture after a processor's geometry, before rescaling and normalisation."""
    pixels: UInt8Array = np.asarray(processor(image, do_rescale=False, do_normalize=False)["pixel_values"][0])
    return pixels


def with_normalization(processor: BaseImageProcessor, normalization: Normalization) -> BaseImageProcessor:
    """Copies a processor with this normalisation of pixels from 0 to 1, and conversion to RGB for three channels."""
    changed, mean, std = copy.deepcopy(processor), list(normalization.mean), list(normalization.std)
    settings: dict[str, Any] = {"image_mean": mean, "image_std": std, "do_normalize": True, "do_rescale": True}
    for key, value in {**settings, "rescale_factor": 1 / 255, "do_convert_rgb": len(mean) == 3}.items():
        setattr(changed, key, value)
    return changed


def _plain(
    size: int,
    num_channels: int,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    do_normalize: bool = True,
) -> Preprocessing:
    # without torchvision `ViTImageProcessor` is this class too, and both are saved under that name
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(
        size={"height": size, "width": size}, do_normalize=do_normalize, do_convert_rgb=num_channels == 3
    )
    for key, value in (("image_mean", mean), ("image_std", std)):  # the constructor reads None as ImageNet's
        setattr(processor, key, value)
    return Preprocessing(processor, size, num_channels, stretches=True)


def _processor_of(path: str) -> BaseImageProcessor | None:
    """Loads the checkpoint's processor; None if it has none, or one of timm, which needs torchvision."""
    from transformers import AutoImageProcessor, BaseImageProcessor

    if path.startswith(TIMM):
        return None
    try:
        BaseImageProcessor.get_image_processor_dict(path)
    except OSError:  # it has no such file
        return None
    with loading("model.path (image processor)", path, "; set data.image_size and data.normalize to leave it out"):
        processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(path, backend="pil")
    return processor


def _of_checkpoint(config: PreTrainedConfig, key: str) -> Any:
    """Returns a setting of the transformers configuration, or of timm's configuration inside it."""
    timm = getattr(config, "pretrained_cfg", None) or {}
    if timm and "input_size" in timm:
        channels, size = timm["input_size"][:2]
        return {"num_channels": channels, "image_size": size, "mean": timm.get("mean"), "std": timm.get("std")}[key]
    return getattr(config, key, None) if key in ("num_channels", "image_size") else None


def _choose_size(data: ImageDataBlock, model: ImageModelBlock, images: list[Image]) -> int:
    given = (model.config or {}).get("image_size")
    if data.image_size is not None:
        if isinstance(given, int) and given != data.image_size:
            raise ConfigError(f"data.image_size: {data.image_size}, but model.config.image_size is {given}")
        return data.image_size
    size = _check_known(given if isinstance(given, int) else square_size_of(images))
    is_resnet = (model.preset or "").startswith("resnet")
    return ENLARGED_SIZE if is_resnet and size < MIN_RESNET_SIZE else size


def _check_channels(number: Any) -> int:
    if number not in (1, 3):
        raise ConfigError(f"model: num_channels is {number!r}; pictures have 1 (grey) or 3 (colours)")
    return int(number)


def _check_known(size: object) -> int:
    if not isinstance(size, int):
        raise ConfigError(
            f"data.image_size: {size}; the model names no one size, and the pictures are not all square of one size; "
            "set it, as in image_size: 64 (pictures are stretched to it)"
        )
    return size


def convert(image: Image, num_channels: int) -> Image:
    """Converts a picture to mode L (1 channel) or RGB (3); raises `ConfigError` for more than 8 bits per channel."""
    if image.mode in _DEEP_MODES:
        raise ConfigError(f"data: a picture of mode {image.mode} has more than 8 bits a channel; convert it to 8 bits")
    return image.convert("L" if num_channels == 1 else "RGB")
