"""Raw pictures of one split with their classes: an array in memory, or rows of a dataset, decoded when read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

UInt8Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
IntArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_GREY_MODES = {"1", "L", "LA"}
_NUM_LOOKED_AT = 16


class Pictures(Protocol):
    """Pictures in a fixed order."""

    @property
    def labels(self) -> IntArray:
        """int64 [examples], from 0."""

    def open(self, index: int) -> Image:
        """One picture, decoded."""

    def select(self, indices: IntArray) -> Pictures:
        """Some of them, in the order of the indices."""


@dataclass(frozen=True)
class ArrayPictures:
    """Grey pictures of one size in memory.

    Attributes:
        array: uint8 [examples, rows, columns].
        labels: int64 [examples].
    """

    array: UInt8Array
    labels: IntArray

    def open(self, index: int) -> Image:
        """One picture of mode L."""
        from PIL import Image

        return Image.fromarray(self.array[index])

    def select(self, indices: IntArray) -> ArrayPictures:
        """Some of them, in the order of the indices."""
        return ArrayPictures(self.array[indices], self.labels[indices])


@dataclass(frozen=True)
class DatasetPictures:
    """Rows of a dataset that are decoded when they are read.

    Attributes:
        dataset: with the one column `image`.
        labels: int64 [examples].
        where: what the user calls it, for errors.
    """

    dataset: Dataset
    labels: IntArray
    where: str

    def open(self, index: int) -> Image:
        """One picture.

        Raises:
            ConfigError: when it cannot be decoded.
        """
        try:
            image: Image | None = self.dataset[int(index)]["image"]
        except Exception as error:  # of the file system or the picture's format
            raise ConfigError(
                f"data: cannot decode picture {index} of {self.where}: {type(error).__name__}: {error}; remove it or "
                "repair it"
            ) from error
        if image is None:
            raise ConfigError(f"data: picture {index} of {self.where} is empty; remove the row")
        return image

    def select(self, indices: IntArray) -> DatasetPictures:
        """Some of them, in the order of the indices."""
        return DatasetPictures(self.dataset.select(indices), self.labels[indices], self.where)


def first_pictures(pictures: Pictures) -> list[Image]:
    """The first few, from which size and number of channels are taken."""
    return [pictures.open(index) for index in range(min(_NUM_LOOKED_AT, len(pictures.labels)))]


def num_channels_of(images: Sequence[Image]) -> int:
    """1 when all are grey, else 3."""
    return 1 if all(image.mode in _GREY_MODES for image in images) else 3


def square_size_of(images: Sequence[Image]) -> int | None:
    """Pixels of a side when all have the same, else None."""
    sides = {side for image in images for side in image.size}
    return sides.pop() if len(sides) == 1 else None
