"""What a DataLoader reads: batches of normalised pixels, made at once and not one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hf_diloco.apps.vision.crops import RandomCrops
from hf_diloco.apps.vision.draws import uniform
from hf_diloco.apps.vision.images import Images
from hf_diloco.apps.vision.normalize import Normalization
from hf_diloco.apps.vision.pictures import IntArray
from hf_diloco.apps.vision.settings import AugmentBlock


class ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples with `pixel_values`, fp32 [channels, size, size], and `labels`, int.

    Read with `collate`. With augmentation, call `set_epoch` at the start of every epoch, before the DataLoader begins;
    persistent workers keep the epoch that they began with.

    Args:
        images: the pixels.
        labels: int64 [examples].
        normalization: the same on all nodes.
        augmentation: None or inactive: every epoch gives the same.
        seed: of the augmentation.
        numbers: int64 [examples] of the examples in the whole training set, on which augmentation depends.
        crops: makes the pixels instead of `images`.
    """

    def __init__(
        self,
        images: Images,
        labels: IntArray,
        normalization: Normalization,
        augmentation: AugmentBlock | None = None,
        seed: int = 0,
        numbers: IntArray | None = None,
        crops: RandomCrops | None = None,
    ) -> None:
        self.images = images
        self.labels = labels
        self.normalization = normalization
        self.epoch = 0
        self._augmentation = augmentation if augmentation is not None and augmentation.is_active else None
        self._crops = crops
        self._seed = seed
        self._numbers = np.arange(len(labels), dtype=np.int64) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        batch = self.batch(np.array([index % len(self)], dtype=np.int64))
        return {"pixel_values": batch["pixel_values"][0], "labels": int(batch["labels"][0])}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A list of one whole batch: the DataLoader calls this, and `collate` takes the batch out of the list."""
        return [self.batch(np.asarray(indices, dtype=np.int64))]

    def batch(self, indices: IntArray) -> dict[str, torch.Tensor]:
        """`pixel_values`, fp32 [indices, channels, size, size], and `labels`, int64 [indices]."""
        drawn_for = (self._seed, self.epoch, self._numbers[indices])
        pixels = self._crops.pixels(indices, *drawn_for) if self._crops else self.images.pixels(indices)
        if self._augmentation is not None:
            pixels = augment(self._augmentation, pixels, *drawn_for)
        return {"pixel_values": self.normalization(pixels), "labels": torch.from_numpy(self.labels[indices])}

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from 0, from which the augmentation is drawn."""
        self.epoch = epoch


def collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of single examples, or the one batch that `ImageDataset.__getitems__` has made.

    Returns:
        `pixel_values`, fp32 [batch, channels, size, size], and `labels`, int64 [batch].
    """
    if len(examples) == 1 and examples[0]["pixel_values"].dim() == 4:
        return dict(examples[0])
    pixels = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixels, "labels": torch.tensor([int(example["labels"]) for example in examples])}


def augment(block: AugmentBlock, pixels: torch.Tensor, seed: int, epoch: int, examples: IntArray) -> torch.Tensor:
    """Changes a batch: crop with padding, then flip. Resized crops are made before: see `RandomCrops`.

    Args:
        block: which changes.
        pixels: uint8 [batch, channels, size, size].
        seed: of the run.
        epoch: from 0.
        examples: int64 [batch], numbers of the examples in the whole training set.

    Returns:
        uint8 of the same shape.
    """
    if block.random_crop == 0 and not block.horizontal_flip:
        return pixels
    padding, none = block.random_crop, np.zeros(len(examples), dtype=np.int64)
    tops, lefts = none, none
    if padding:
        num_places = 2 * padding + 1
        tops = (uniform("row", seed, epoch, examples) * num_places).astype(np.int64)
        lefts = (uniform("column", seed, epoch, examples) * num_places).astype(np.int64)
    flips = uniform("flip", seed, epoch, examples) < 0.5 if block.horizontal_flip else none.astype(bool)
    return _crop_and_flip(pixels, padding, torch.from_numpy(tops), torch.from_numpy(lefts), torch.from_numpy(flips))


def _crop_and_flip(
    pixels: torch.Tensor, padding: int, tops: torch.Tensor, lefts: torch.Tensor, flips: torch.Tensor
) -> torch.Tensor:
    batch, channels, size, _ = pixels.shape
    steps = torch.arange(size)
    rows = tops[:, None] + steps
    columns = lefts[:, None] + torch.where(flips[:, None], size - 1 - steps, steps)
    padded = pad(pixels, [padding] * 4)  # with black
    places = (rows[:, :, None] * padded.shape[-1] + columns[:, None, :]).view(batch, 1, size * size)
    taken = padded.reshape(batch, channels, -1).gather(2, places.expand(batch, channels, size * size))
    return taken.view(batch, channels, size, size)
