"""Pixels of a share: in memory where they fit, decoded when they are read where they do not."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from hf_diloco.apps.vision.pictures import IntArray, Pictures
from hf_diloco.apps.vision.preprocess import Preprocessing

MAX_BYTES_IN_MEMORY = 2**30  # 1.3 million images of 28x28, 7 thousand of 224x224


class Images(Protocol):
    """Pixels of examples in a fixed order."""

    def __len__(self) -> int: ...

    def pixels(self, indices: IntArray) -> torch.Tensor:
        """uint8 [indices, channels, size, size]."""

    def select(self, indices: IntArray) -> Images:
        """Some of them, in the order of the indices."""


class StoredImages:
    """One tensor in memory.

    Args:
        stored: uint8 [examples, channels, size, size].
    """

    def __init__(self, stored: torch.Tensor) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def pixels(self, indices: IntArray) -> torch.Tensor:
        """uint8 [indices, channels, size, size]."""
        return self.stored.index_select(0, torch.from_numpy(indices))

    def select(self, indices: IntArray) -> StoredImages:
        """A copy of some of them, so that the rest can be freed."""
        return StoredImages(self.pixels(indices))


class DecodedImages:
    """Pictures that are decoded and resized whenever they are read.

    Args:
        pictures: where they come from.
        preprocessing: what makes pixels of them.
    """

    def __init__(self, pictures: Pictures, preprocessing: Preprocessing) -> None:
        self._pictures = pictures
        self._preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self._pictures.labels)

    def pixels(self, indices: IntArray) -> torch.Tensor:
        """uint8 [indices, channels, size, size]."""
        arrays = [self._preprocessing.pixels(self._pictures.open(int(index))) for index in indices]
        return torch.from_numpy(np.stack(arrays))

    def select(self, indices: IntArray) -> Images:
        """Some of them, in memory if they fit now."""
        return hold(self._pictures.select(indices), self._preprocessing)


def hold(pictures: Pictures, preprocessing: Preprocessing) -> Images:
    """The pixels of pictures, in memory if they take at most `MAX_BYTES_IN_MEMORY`."""
    shape = (len(pictures.labels), preprocessing.num_channels, preprocessing.image_size, preprocessing.image_size)
    if math.prod(shape) > MAX_BYTES_IN_MEMORY:
        return DecodedImages(pictures, preprocessing)
    return StoredImages(preprocessing.all_pixels(pictures))
