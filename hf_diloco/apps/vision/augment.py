"""Random changes of training images, as pure functions of the seed, the epoch and the example."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from hf_diloco.apps.vision.draws import uniform
from hf_diloco.apps.vision.pictures import IntArray
from hf_diloco.apps.vision.settings import AugmentBlock


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
