"""Random changes of training images, as pure functions of the seed, the epoch and the example.

No generator has a state: a number is a hash of what it is for. So a resumed run, other numbers of loader workers, and
nodes that are threads of one process see the same images.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import grid_sample, pad

from hf_diloco.vision.pictures import IntArray
from hf_diloco.vision.settings import AugmentBlock, ResizedCropBlock

FloatArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
_UInt64Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

_DRAWS = {name: number for number, name in enumerate(("row", "column", "flip", "area", "ratio", "top", "left"))}


def uniform(draw: str, seed: int, epoch: int, examples: IntArray) -> FloatArray:
    """A number in [0, 1) for each example, by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        draw: what it is for; other draws are independent.
        seed: of the run.
        epoch: from 0.
        examples: int64 [batch], numbers of the examples in the whole training set.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, _DRAWS[draw]):
        key = _mix(key ^ np.uint64(part))
    hashed = _mix(_mix(key ^ examples.astype(np.uint64)))
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def augment(block: AugmentBlock, pixels: torch.Tensor, seed: int, epoch: int, examples: IntArray) -> torch.Tensor:
    """Changes a batch: resized crop, then crop with padding, then flip.

    Args:
        block: which changes.
        pixels: uint8 [batch, channels, size, size].
        seed: of the run.
        epoch: from 0.
        examples: int64 [batch], numbers of the examples in the whole training set.

    Returns:
        uint8 of the same shape.
    """
    if block.random_resized_crop is not None:
        pixels = _resized_crop(block.random_resized_crop, pixels, seed, epoch, examples)
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


def crop_boxes(
    block: ResizedCropBlock, size: int, seed: int, epoch: int, examples: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Top, left, height and width of a random part of each image, in pixels.

    The area is uniform in `scale`, the logarithm of width / height uniform in `ratio`; a side that would be longer
    than the image is cut to it, where torchvision draws again.
    """
    low, high = block.scale
    area = size * size * (low + (high - low) * uniform("area", seed, epoch, examples))
    log_low, log_high = np.log(block.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * uniform("ratio", seed, epoch, examples))
    width = np.clip(np.rint(np.sqrt(area * ratio)), 1, size).astype(np.int64)
    height = np.clip(np.rint(np.sqrt(area / ratio)), 1, size).astype(np.int64)
    top = (uniform("top", seed, epoch, examples) * (size - height + 1)).astype(np.int64)
    left = (uniform("left", seed, epoch, examples) * (size - width + 1)).astype(np.int64)
    return top, left, height, width


def _mix(values: _UInt64Array) -> _UInt64Array:
    """SplitMix64: unsigned 64-bit numbers wrap around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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


def _resized_crop(
    block: ResizedCropBlock, pixels: torch.Tensor, seed: int, epoch: int, examples: IntArray
) -> torch.Tensor:
    size = pixels.shape[-1]
    top, left, height, width = (torch.from_numpy(box) for box in crop_boxes(block, size, seed, epoch, examples))
    rows, columns = _positions(top, height, size), _positions(left, width, size)
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=-1)
    # enlarges only, so bilinear without antialiasing is what PIL and torchvision do too
    enlarged = grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return enlarged.round_().clamp_(0, 255).to(torch.uint8)


def _positions(start: torch.Tensor, length: torch.Tensor, size: int) -> torch.Tensor:
    """Where each pixel of the result lies in the image, in the units of `grid_sample`: -1 to 1 from edge to edge."""
    centers = (torch.arange(size) + 0.5) / size
    return (start[:, None] + centers * length[:, None]) * (2 / size) - 1
