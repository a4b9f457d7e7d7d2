"""Augmentation is a pure function of seed, epoch and example, and equals the same written one example at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hf_diloco.apps.vision.dataset import augment, uniform
from hf_diloco.apps.vision.runfile import AugmentBlock

BLOCKS = [
    AugmentBlock(random_crop=2),
    AugmentBlock(horizontal_flip=True),
    AugmentBlock(random_crop=3, horizontal_flip=True),
]


def random_pixels(num_examples: int, channels: int = 3, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_examples)
    return torch.randint(0, 256, (num_examples, channels, size, size), dtype=torch.uint8, generator=generator)


def draw(name: str, seed: int, epoch: int, example: int) -> float:
    return float(uniform(name, seed, epoch, np.array([example]))[0])


def crop_and_flip_one(block: AugmentBlock, image: np.ndarray, seed: int, epoch: int, example: int) -> np.ndarray:
    """The same in words: pad with black, cut out, mirror."""
    size, padding = image.shape[-1], block.random_crop
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    top = int(draw("row", seed, epoch, example) * (2 * padding + 1))
    left = int(draw("column", seed, epoch, example) * (2 * padding + 1))
    cut = padded[:, top : top + size, left : left + size]
    is_flipped = block.horizontal_flip and draw("flip", seed, epoch, example) < 0.5
    return cut[:, :, ::-1] if is_flipped else cut


@given(
    padding=st.integers(0, 4),
    flip=st.booleans(),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
)
def test_equals_one_example_at_a_time(padding: int, flip: bool, channels: int, seed: int, epoch: int) -> None:
    block = AugmentBlock(random_crop=padding, horizontal_flip=flip)
    pixels, examples = random_pixels(5, channels), np.array([7, 0, 3, 70_000, 4], dtype=np.int64)
    changed = augment(block, pixels, seed, epoch, examples)
    for image, example, result in zip(pixels.numpy(), examples, changed.numpy(), strict=True):
        np.testing.assert_array_equal(result, crop_and_flip_one(block, image, seed, epoch, int(example)))


@pytest.mark.parametrize("block", BLOCKS)
def test_is_a_pure_function_of_seed_epoch_and_example(block: AugmentBlock) -> None:
    pixels, examples = random_pixels(12), np.arange(12, dtype=np.int64)
    whole = augment(block, pixels, 1, 2, examples)
    torch.manual_seed(99)
    np.random.seed(99)
    order = np.array([4, 11, 0, 7])
    assert torch.equal(augment(block, pixels[order], 1, 2, examples[order]), whole[order])
    for seed, epoch, numbers in ((2, 2, examples), (1, 3, examples), (1, 2, examples + 12)):
        assert not torch.equal(augment(block, pixels, seed, epoch, numbers), whole)


def test_leaves_its_input_as_it_is() -> None:
    pixels = random_pixels(6)
    before = pixels.clone()
    for block in BLOCKS:
        augment(block, pixels, 0, 0, np.arange(6, dtype=np.int64))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("other", [{"draw": "flip"}, {"seed": 1}, {"epoch": 1}, {"shift": 1}])
def test_numbers_are_uniform_and_independent(other: dict[str, Any]) -> None:
    examples = np.arange(50_000, dtype=np.int64)
    numbers = uniform("row", 0, 0, examples)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert np.abs(histogram - 2500).max() < 5 * 2500**0.5
    others = uniform(
        other.get("draw", "row"), other.get("seed", 0), other.get("epoch", 0), examples + other.get("shift", 0)
    )
    assert abs(np.corrcoef(numbers, others)[0, 1]) < 5 / 50_000**0.5


def test_splitmix64_has_the_published_values() -> None:
    """The generator of seed 1234567 (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64)."""
    from hf_diloco.apps.vision.dataset import _mix

    step = np.uint64(0x9E3779B97F4A7C15)
    state, numbers = np.array([1234567], dtype=np.uint64), []
    for _ in range(3):
        numbers.append(int(_mix(state)[0]))
        state = state + step
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]
