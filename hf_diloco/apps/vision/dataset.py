"""The data set that a DataLoader reads: whole batches of normalised pixels, with random augmentation.

Random numbers are pure functions (hashes) of seed, epoch, example and purpose, without a generator's state. So a
resumed run, other numbers of loader workers, and nodes that are threads of one process see the same images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import pad

from hf_diloco.apps.vision.images import Images, IntArray, Normalization, Pictures, UInt8Array
from hf_diloco.apps.vision.preprocess import Preprocessing, convert
from hf_diloco.apps.vision.runfile import AugmentBlock, ResizedCropBlock

FloatArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
_UInt64Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

_DRAWS = {name: number for number, name in enumerate(("row", "column", "flip", "area", "ratio", "top", "left"))}


class ImageDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples that are read in batches of `pixel_values`, fp32 [batch, channels, size, size], and `labels`.

    Use with `collate`. With augmentation, call `set_epoch` at the start of every epoch, before the DataLoader begins;
    persistent workers keep their first epoch.

    Args:
        images: the pixels, or random parts of pictures.
        labels: int64 [examples].
        augmentation: random changes, drawn from `seed`; if None or inactive, all epochs are equal.
        numbers: int64 [examples], their indices in the whole training set, on which augmentation depends.
    """

    def __init__(
        self,
        images: Images | RandomCrops,
        labels: IntArray,
        normalization: Normalization,
        augmentation: AugmentBlock | None = None,
        seed: int = 0,
        numbers: IntArray | None = None,
    ) -> None:
        self.images = images
        self.labels = labels
        self.normalization = normalization
        self.epoch = 0
        self._augmentation = augmentation if augmentation is not None and augmentation.is_active else None
        self._seed = seed
        self._numbers = np.arange(len(labels), dtype=np.int64) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Returns a list with one whole batch, for the DataLoader; `collate` takes the batch out of the list."""
        return [self.batch(np.asarray(indices, dtype=np.int64))]

    def batch(self, indices: IntArray) -> dict[str, torch.Tensor]:
        """Returns `pixel_values`, fp32 [indices, channels, size, size], and `labels`, int64 [indices]."""
        drawn_for = (self._seed, self.epoch, self._numbers[indices])
        if isinstance(self.images, RandomCrops):
            pixels = self.images.pixels(indices, *drawn_for)
        else:
            pixels = self.images.pixels(indices)
        if self._augmentation is not None:
            pixels = augment(self._augmentation, pixels, *drawn_for)
        return {"pixel_values": self.normalization(pixels), "labels": torch.from_numpy(self.labels[indices])}

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 0, from which the augmentation is drawn."""
        self.epoch = epoch


def collate(batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the batch that `ImageDataset.__getitems__` returned in a list."""
    return batches[0]


def augment(block: AugmentBlock, pixels: torch.Tensor, seed: int, epoch: int, examples: IntArray) -> torch.Tensor:
    """Augments a batch, uint8 [batch, channels, size, size]: crop with padding, then flip.

    Resized crops come before: see `RandomCrops`. For seed, epoch and examples see `uniform`.
    """
    if block.random_crop == 0 and not block.horizontal_flip:
        return pixels
    num_places = 2 * block.random_crop + 1
    tops = (uniform("row", seed, epoch, examples) * num_places).astype(np.int64)
    lefts = (uniform("column", seed, epoch, examples) * num_places).astype(np.int64)
    flips = (uniform("flip", seed, epoch, examples) < 0.5) & block.horizontal_flip
    batch, channels, size, _ = pixels.shape
    steps = torch.arange(size)
    rows = torch.from_numpy(tops)[:, None] + steps
    columns = torch.from_numpy(lefts)[:, None] + torch.where(torch.from_numpy(flips)[:, None], size - 1 - steps, steps)
    padded = pad(pixels, [block.random_crop] * 4)  # with black
    places = (rows[:, :, None] * padded.shape[-1] + columns[:, None, :]).view(batch, 1, size * size)
    taken = padded.reshape(batch, channels, -1).gather(2, places.expand(batch, channels, size * size))
    return taken.view(batch, channels, size, size)


@dataclass(frozen=True)
class RandomCrops:
    """Pixels of random parts of pictures, stretched to the model's size, as usual for ImageNet (arXiv 1409.4842).

    Parts are cut out of the picture at full size; pictures are decoded on every read.
    """

    pictures: Pictures
    preprocessing: Preprocessing
    block: ResizedCropBlock

    def pixels(self, indices: IntArray, seed: int, epoch: int, examples: IntArray) -> torch.Tensor:
        """Returns uint8 [indices, channels, size, size] of these pictures; for the other arguments see `uniform`."""
        pairs = zip(indices, examples, strict=True)
        return torch.from_numpy(np.stack([self._part(int(index), seed, epoch, example) for index, example in pairs]))

    def _part(self, index: int, seed: int, epoch: int, example: np.int64) -> UInt8Array:
        """Returns one picture's part; only one decoded picture is in memory at a time."""
        from PIL import Image

        picture = convert(self.pictures.open(index), self.preprocessing.num_channels)
        width, height = (np.array([side], dtype=np.int64) for side in picture.size)
        boxes = crop_boxes(self.block, height, width, seed, epoch, np.array([example]))
        top, left, tall, wide = (int(value[0]) for value in boxes)
        part = picture.crop((left, top, left + wide, top + tall))
        size = self.preprocessing.image_size
        array = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def crop_boxes(
    block: ResizedCropBlock, heights: IntArray, widths: IntArray, seed: int, epoch: int, examples: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Draws top, left, height and width of a random part of each picture; all int64 [pictures], in pixels.

    The area is uniform in `scale`, the logarithm of width / height uniform in `ratio`. A side longer than the picture
    is clipped to it, where torchvision draws again. For seed, epoch and examples see `uniform`.
    """
    low, high = block.scale
    area = heights * widths * (low + (high - low) * uniform("area", seed, epoch, examples))
    log_low, log_high = np.log(block.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * uniform("ratio", seed, epoch, examples))
    width = np.clip(np.rint(np.sqrt(area * ratio)), 1, widths).astype(np.int64)
    height = np.clip(np.rint(np.sqrt(area / ratio)), 1, heights).astype(np.int64)
    top = (uniform("top", seed, epoch, examples) * (heights - height + 1)).astype(np.int64)
    left = (uniform("left", seed, epoch, examples) * (widths - width + 1)).astype(np.int64)
    return top, left, height, width


def uniform(draw: str, seed: int, epoch: int, examples: IntArray) -> FloatArray:
    """Returns a number in [0, 1) for each example, by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        draw: the purpose of the number; different draws are independent.
        examples: int64 [batch], numbers of the examples in the whole training set.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, _DRAWS[draw]):
        key = _mix(key ^ np.uint64(part))
    hashed = _mix(_mix(key ^ examples.astype(np.uint64)))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: _UInt64Array) -> _UInt64Array:
    """Does one SplitMix64 step; unsigned 64-bit numbers wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
