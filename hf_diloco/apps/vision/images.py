"""Pictures of a split with their classes, and their pixels: in memory if they fit, else decoded on every read.

Pixels are normalised by mean and standard deviation of each channel, equal on all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from hf_diloco.apps.vision.runfile import NormalizeBlock
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

    from hf_diloco.apps.vision.preprocess import Preprocessing

UInt8Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
IntArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

MAX_BYTES_IN_MEMORY = 2**30  # 1.3 million images of 28x28, 7 thousand of 224x224
NUM_SAMPLED = 4096  # images sampled for mean and standard deviation if they are not in memory
_MIN_STD = 1 / 255  # for a constant channel
_GREY_MODES = {"1", "L", "LA"}
_NUM_LOOKED_AT = 16


class Pictures(Protocol):
    """Pictures in a fixed order."""

    @property
    def labels(self) -> IntArray:
        """int64 [examples], from 0."""

    def open(self, index: int) -> Image:
        """Returns one picture, decoded."""

    def select(self, indices: IntArray) -> Pictures:
        """Returns the pictures at `indices`, in this order."""


@dataclass(frozen=True)
class ArrayPictures:
    """Grey pictures of one size in memory: uint8 [examples, rows, columns]."""

    array: UInt8Array
    labels: IntArray

    def open(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.array[index])

    def select(self, indices: IntArray) -> ArrayPictures:
        return ArrayPictures(self.array[indices], self.labels[indices])


@dataclass(frozen=True)
class DatasetPictures:
    """Rows of a dataset with the single column `image`, decoded on every read.

    Errors name the dataset by `where`, and pictures by their `rows` in the whole dataset, int64 [examples].
    """

    dataset: Dataset
    labels: IntArray
    where: str
    rows: IntArray

    def open(self, index: int) -> Image:
        """Returns one picture; raises `ConfigError` if it cannot be decoded."""
        try:
            image: Image | None = self.dataset[int(index)]["image"]
        except Exception as error:  # of the file system or the picture's format
            raise ConfigError(
                f"data: cannot decode {self._name(index)}: {type(error).__name__}: {error}; remove it or repair it"
            ) from error
        if image is None:
            raise ConfigError(f"data: {self._name(index)} is empty; remove the row")
        return image

    def _name(self, index: int) -> str:
        """Returns a picture's row in the data, and its file if any, for error messages."""
        from datasets import Image

        raw = self.dataset.cast_column("image", Image(decode=False))[int(index)]["image"]
        file = f" ({raw['path']})" if raw and raw["path"] else ""
        return f"picture {self.rows[index]} of {self.where}{file}"

    def select(self, indices: IntArray) -> DatasetPictures:
        return DatasetPictures(self.dataset.select(indices), self.labels[indices], self.where, self.rows[indices])


def first_pictures(pictures: Pictures) -> list[Image]:
    """Returns the first few pictures, to determine size and number of channels."""
    return [pictures.open(index) for index in range(min(_NUM_LOOKED_AT, len(pictures.labels)))]


def num_channels_of(images: Sequence[Image]) -> int:
    """Returns 1 if all images are grey, else 3."""
    return 1 if all(image.mode in _GREY_MODES for image in images) else 3


def square_size_of(images: Sequence[Image]) -> int | None:
    """Returns the pixels per side if all images are square and of equal size, else None."""
    sides = {side for image in images for side in image.size}
    return sides.pop() if len(sides) == 1 else None


@dataclass(frozen=True)
class StoredImages:
    """Images in one tensor in memory: uint8 [examples, channels, size, size]."""

    stored: torch.Tensor

    def __len__(self) -> int:
        return len(self.stored)

    def pixels(self, indices: IntArray) -> torch.Tensor:
        """Returns uint8 [indices, channels, size, size]."""
        return self.stored.index_select(0, torch.from_numpy(indices))

    def select(self, indices: IntArray) -> StoredImages:
        """Returns a copy of the images at `indices`, so that the others can be freed."""
        return StoredImages(self.pixels(indices))


@dataclass(frozen=True)
class DecodedImages:
    """Pictures that are decoded and resized on every read."""

    pictures: Pictures
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.pictures.labels)

    def pixels(self, indices: IntArray) -> torch.Tensor:
        """Returns uint8 [indices, channels, size, size]."""
        arrays = [self.preprocessing.pixels(self.pictures.open(int(index))) for index in indices]
        return torch.from_numpy(np.stack(arrays))

    def select(self, indices: IntArray) -> Images:
        """Returns the images at `indices`, in memory if they fit now."""
        return hold(self.pictures.select(indices), self.preprocessing)


Images: TypeAlias = StoredImages | DecodedImages
"""Pixels of examples in a fixed order."""


def hold(pictures: Pictures, preprocessing: Preprocessing) -> Images:
    """Returns the pixels of pictures, in memory if they take at most `MAX_BYTES_IN_MEMORY`."""
    shape = (len(pictures.labels), preprocessing.num_channels, preprocessing.image_size, preprocessing.image_size)
    if math.prod(shape) > MAX_BYTES_IN_MEMORY:
        return DecodedImages(pictures, preprocessing)
    return StoredImages(preprocessing.all_pixels(pictures))


def sample_pixels(images: Images, number: int) -> torch.Tensor:
    """Returns all pixels if they are in memory, else those of `number` images, spread evenly."""
    if isinstance(images, StoredImages):
        return images.stored
    return images.pixels(np.linspace(0, len(images) - 1, min(number, len(images))).astype(np.int64))


@dataclass(frozen=True)
class Normalization:
    """Pixels from 0 to 1 minus `mean` of each channel, divided by its standard deviation, `std`, above 0."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Converts uint8 [examples, channels, rows, columns] to normalised fp32 of the same shape."""
        std = torch.tensor(self.std, dtype=torch.float64).view(-1, 1, 1)
        mean = torch.tensor(self.mean, dtype=torch.float64).view(-1, 1, 1)
        scaled = pixels.float().mul_((1 / (255 * std)).float())
        return scaled.sub_((mean / std).float())


def choose_normalization(given: NormalizeBlock | None, preprocessing: Preprocessing, train: Images) -> Normalization:
    """Returns the normalisation of the settings, else the checkpoint's, else that of the whole training set.

    It is equal on all nodes.

    Raises:
        ConfigError: the settings have another number of channels than the images.
    """
    num_channels = preprocessing.num_channels
    if given is not None:
        return Normalization(_per_channel(given.mean, num_channels), _per_channel(given.std, num_channels))
    processor = preprocessing.processor
    if not getattr(processor, "do_normalize", True):
        return Normalization((0.0,) * num_channels, (1.0,) * num_channels)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if mean is not None and std is not None:
        return Normalization(_per_channel(mean, num_channels), _per_channel(std, num_channels))
    return measure(train)


def measure(images: Images) -> Normalization:
    """Measures mean and standard deviation of each channel over all pixels of all images.

    If the images are not in memory, over 4,096 of them, spread evenly. Sums integers, so that all nodes get the same
    bits.
    """
    pixels = sample_pixels(images, NUM_SAMPLED)
    values = np.arange(256, dtype=np.int64)
    mean, std = [], []
    for channel in range(pixels.shape[1]):
        counts = np.bincount(pixels[:, channel].reshape(-1).numpy(), minlength=256)
        total, sum_, sum_of_squares = int(counts.sum()), int(counts @ values), int(counts @ values**2)
        mean.append(sum_ / total / 255)
        variance = (total * sum_of_squares - sum_**2) / total**2  # exact integers: no cancellation
        std.append(max(variance**0.5 / 255, _MIN_STD))
    return Normalization(tuple(mean), tuple(std))


def _per_channel(values: list[float] | tuple[float, ...] | float, num_channels: int) -> tuple[float, ...]:
    listed = [float(value) for value in values] if isinstance(values, list | tuple) else [float(values)]
    if len(listed) == 1:
        listed *= num_channels
    if len(listed) != num_channels:
        raise ConfigError(f"data.normalize: {len(listed)} channels, but the images have {num_channels}")
    return tuple(listed)
